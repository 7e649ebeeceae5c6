"""The registration of a node's process with the monitor of its host (`dps.cluster.monitor`)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed import Client

from dps.cluster import monitor
from dps.cluster.platform import Presence, made_once, platform_of
from dps.cluster.transport.port import split_address
from dps.protocol.transport import Watched

if TYPE_CHECKING:
    import distributed

NAME = "dps-presence"
START_SECONDS = 10.0  # until a monitor that was started must answer
LOOK_SECONDS = 0.02
AGAIN_SECONDS = 1.0  # until the next attempt to register; doubled by each failure
MOST_AGAIN_SECONDS = 30.0

_log = logging.getLogger("distributed.worker.dps")


class NodePresence:
    """One process at its monitor. Used from the event loop of the process.

    The process registers when the first group uses it, and leaves after the last use. If the
    monitor ends, another one is started. The process may be killed only while a single group uses
    it, because a coordinator cannot know what other groups would lose.

    Attributes
    ----------
    watched
        The monitor, and the process's number there; None if no monitor watches it. May be read in
        any thread.
    """

    def __init__(self, dask_worker: distributed.Worker) -> None:
        self.watched: Watched | None = None
        self._host = split_address(dask_worker.address)[1] or "127.0.0.1"
        self._uses = Counter[str]()  # by group
        self._staying: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()  # set after the first attempt to register
        self._writer: asyncio.StreamWriter | None = None

    def enter(self, group: str) -> None:
        """Register, if this is the first use of the process by any group."""
        self._uses[group] += 1
        self._tell(self._standing)
        if self._staying is None and monitor.is_supported():
            self._tried.clear()
            self._staying = asyncio.create_task(self._stay())

    async def registered(self) -> None:
        """Wait until the process is registered, or cannot be."""
        if self._staying is not None:
            await self._tried.wait()

    def exit(self, group: str) -> None:
        """Leave, if this was the last use."""
        self._uses[group] -= 1
        self._tell(self._standing)
        if not self._uses.total() and self._staying is not None:
            self._staying.cancel()
            self._staying = self.watched = None

    def silence(self, seconds: float) -> None:
        """Make the monitor not report this process for a while, as if both were cut off."""
        self._tell({"silent": seconds})

    @property
    def _standing(self) -> dict[str, bool]:
        groups = sum(uses > 0 for uses in self._uses.values())
        return {"may_be_killed": groups == 1 and _is_own_process()}

    def _tell(self, request: Mapping[str, object]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(request).encode() + b"\n")

    async def _stay(self) -> None:
        told, pause = False, AGAIN_SECONDS
        while True:
            try:
                await self._register()
                pause = AGAIN_SECONDS
            except Exception as error:  # noqa: BLE001 - training continues without a monitor
                if not told:
                    _log.warning(
                        "dps: no monitor watches the processes on this host, so a process that is "
                        "busy for longer than its lease is treated as lost. If steps take so long, "
                        "raise timings=dps.Timings(lease=...). The monitor failed with: %s",
                        error,
                    )
                told = True
                self._tried.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_AGAIN_SECONDS)

    async def _register(self) -> None:
        """Register, and return when the monitor has ended."""
        try:
            async with asyncio.timeout(START_SECONDS):
                reader, reply = await self._introduced()
                if not reply:  # it was about to end, with the last process of before
                    reader, reply = await self._introduced()
            if not reply:
                raise ConnectionRefusedError(f"it cannot be reached at {self._host}")
            self.watched = Watched(*json.loads(reply))
            self._tried.set()
            await reader.read()
        finally:
            self.watched = None
            if self._writer is not None:
                self._writer.close()
            self._writer = None

    async def _introduced(self) -> tuple[asyncio.StreamReader, bytes]:
        """Tell the monitor of this process; return its reply, which is empty if it ends instead."""
        if self._writer is not None:
            self._writer.close()
        reader, self._writer = await self._connected()
        _, user = monitor.peer_of(self._writer.get_extra_info("socket"))
        if user != os.getuid():
            raise ConnectionRefusedError(f"its socket is that of user {user}")
        self._tell({"host": self._host, **self._standing})
        return reader, await reader.readline()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the monitor; start one if there is none."""
        name, started = monitor.socket_name(), False
        while True:
            try:
                return await asyncio.open_unix_connection(name)
            except ConnectionRefusedError:
                if not started:
                    _start()
                started = True
                await asyncio.sleep(LOOK_SECONDS)


def presence_of(dask_worker: distributed.Worker) -> Presence:
    """Return the registration of a node's process, which all groups in it share."""

    def made() -> Presence:
        of_platform = platform_of(dask_worker).presence
        return NodePresence(dask_worker) if of_platform is None else of_platform

    return made_once(dask_worker, NAME, made)


def _start() -> None:
    # In its own session, so that signals to the node, such as Ctrl-C, do not reach it.
    nothing: Any = subprocess.DEVNULL
    subprocess.Popen(
        monitor.command(),
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        cwd="/",
        start_new_session=True,
    )


def _is_own_process() -> bool:
    """Whether the process is only a Dask worker, and not a user's program with workers in it."""
    return not Client._instances
