"""The coordinator's connections to the monitors of hosts (`dps.cluster.monitor`)."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial

from dps.cluster.monitor import LINE_BYTES, Signed
from dps.errors import Unreachable
from dps.protocol.messages import Sighted
from dps.protocol.monitor import Sighting
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Watched

CONNECT_SECONDS = 5.0
SILENT_SECONDS = 10.0  # a monitor that says nothing for so long is connected to again
AGAIN_SECONDS = 1.0
ATTEMPTS = 10

_log = logging.getLogger("distributed.scheduler.dps")


class MonitorLinks:
    """Hears what monitors see (see `dps.protocol.transport.Monitors`). Used from one event loop.

    Parameters
    ----------
    told
        Called with each report.
    on_failure
        Called with an exception that was not foreseen; the monitor is followed all the same.
    """

    def __init__(
        self,
        told: Callable[[Sighted], Awaitable[object]],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._told = told
        self._tasks = Tasks(on_failure)
        self._on_failure = on_failure
        self._following: set[str] = set()
        self._asked: set[Watched] = set()
        self._writers: dict[str, tuple[asyncio.StreamWriter, Signed]] = {}

    def follow(self, monitor: str) -> None:
        """Pass reports of a monitor to the coordinator."""
        if monitor not in self._following:
            self._following.add(monitor)
            self._tasks.keep(partial(self._follow, monitor), AGAIN_SECONDS)

    async def kill(self, watched: Watched, stopped: float) -> None:
        """Have a monitor kill a process that is stopped."""
        if watched.monitor not in self._writers:
            raise Unreachable(f"the monitor at {_place(watched.monitor)} is not connected")
        writer, signed = self._writers[watched.monitor]
        if watched not in self._asked:  # which is repeated where it may not be killed
            self._asked.add(watched)
            _log.warning(
                "dps: process %d at the monitor %s is stopped, and is killed if it is for %g s and "
                "nothing but one group uses it: others take over what it has",
                watched.number,
                _place(watched.monitor),
                stopped,
            )
        writer.write(signed.line([watched.number, stopped]))

    async def close(self) -> None:
        """End all connections."""
        await self._tasks.close()

    async def _follow(self, monitor: str) -> None:
        """Stay connected; give up a monitor that has ended. It may be named again."""
        failures = 0
        while failures < ATTEMPTS:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    reader, writer, signed = await self._connected(monitor)
                failures = 0
                await self._hear(monitor, reader, writer, signed)
            except (OSError, ValueError, TimeoutError) as error:
                failures += 1
                if failures == ATTEMPTS:
                    _log.info("dps: lost the monitor at %s: %s", _place(monitor), error)
                await asyncio.sleep(AGAIN_SECONDS)
        self._following.discard(monitor)

    async def _connected(
        self, monitor: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Signed]:
        host, port, secret = monitor.split(" ")
        reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_BYTES)
        nonce = secrets.token_hex(16).encode()
        try:
            theirs = (await reader.readline()).rstrip(b"\n")
        except BaseException:
            writer.close()
            raise
        writer.write(nonce + b"\n")
        return reader, writer, Signed(secret.encode(), theirs + nonce, "coordinator")

    async def _hear(
        self,
        monitor: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        signed: Signed,
    ) -> None:
        self._writers[monitor] = writer, signed
        try:
            while True:
                seen = await _report(reader, signed)
                try:
                    await self._told(Sighted(monitor, seen))
                except Exception as error:  # noqa: BLE001 - passed to the coordinator
                    self._on_failure(error)
        finally:
            del self._writers[monitor]
            writer.close()


async def _report(reader: asyncio.StreamReader, signed: Signed) -> tuple[Sighting, ...]:
    async with asyncio.timeout(SILENT_SECONDS):
        line = await reader.readline()
    if not line:
        raise ConnectionError("it has ended")
    return tuple(Sighting(*each) for each in signed.value(line))


def _place(monitor: str) -> str:
    """Where a monitor is, without its secret."""
    return ":".join(monitor.split(" ")[:2])
