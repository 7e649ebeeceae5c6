"""Owns the other side of the transports' contract: it echoes, refuses, or takes its time."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from dps.cluster.transport import Meter, answer
from dps.errors import StaleEpoch
from dps.protocol import wire
from dps.protocol.messages import Audit, Flush, GetTable


async def reply_to(message: Any) -> Any:
    """Refuse an `Audit`, take a `GetTable`'s patience, and send anything else back."""
    match message:
        case Audit():
            raise StaleEpoch(f"shard {message.shard} is in another epoch")
        case GetTable():
            await asyncio.sleep(message.patience)
            return Flush()
        case _:
            return message


class EchoActor:
    """`reply_to` as a Dask actor."""

    async def handle(self, link: str, *frames: np.ndarray) -> wire.Frames:
        return await answer(reply_to, Meter(), link, list(frames))
