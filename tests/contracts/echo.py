"""The other side of the transports' contract: it echoes, refuses, or takes its time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from distributed import get_worker

from dps.cluster.transport.calls import Meter, answer
from dps.cluster.transport.port import Port, port_of
from dps.errors import StaleEpoch
from dps.protocol import wire
from dps.protocol.messages import Describe, Flush, GetTable, Save, Waiting


class Echo:
    """What answers: wherever it is, a test can wait until it has begun on something slow."""

    def __init__(self) -> None:
        self._busy = asyncio.Event()

    async def reply_to(self, message: Any) -> Any:
        """Answer a message.

        It refuses a `Save`, takes a `GetTable`'s patience, answers a `Waiting` once a `GetTable`
        is here, has a defect that a `Describe` shows, and sends anything else back.
        """
        match message:
            case Describe():
                return {}["echo"]
            case Save():
                raise StaleEpoch(f"shard {message.shard} is in another epoch")
            case GetTable():
                self._busy.set()
                await asyncio.sleep(message.patience)
                return Flush()
            case Waiting():
                await self._busy.wait()
                return message
            case _:
                return message


class EchoActor:
    """An echo as a Dask actor."""

    def __init__(self) -> None:
        self._echo = Echo()
        dask_worker = get_worker()
        dask_worker.loop.add_callback(self._serve, port_of(dask_worker))

    async def handle(self, link: str, *frames: np.ndarray) -> wire.Frames:
        return await answer(self._echo.reply_to, Meter(), link, list(frames))

    def _serve(self, port: Port) -> None:
        port.enter()
        port.handlers["echo"] = self.handle
