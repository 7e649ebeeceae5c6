"""Liveness: how a coordinator learns whether a silent process is dead, stopped or busy.

Each host has a monitor, a process that user code cannot block (`dps.cluster.monitor`). The process
of each node registers there (`NodePresence`) and passes the monitor's address to the coordinator,
with its leases. The coordinator connects to each monitor (`MonitorLinks`), which reports four times
a second, and at once when a process ends:

- A stopped process is killed only if the coordinator asks for it, a single group uses the process,
  and it does not run a Dask client.
- A process that is reported as running is busy, and waited for (`Timings.patience`).
- If the monitor is silent as well, or there is none, the lease of the process decides.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from distributed import Client

from dps.cluster.monitor import LINE_BYTES, Signed, command, peer_of, socket_name
from dps.cluster.platform import made_once, platform_of, split_address
from dps.errors import Unreachable
from dps.protocol.messages import Sighted
from dps.protocol.monitor import Sighting
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Watched

if TYPE_CHECKING:
    import distributed

NAME = "dps-presence"
START_SECONDS = 10.0  # until a monitor that was started must answer
LOOK_SECONDS = 0.02
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 10.0  # after which a silent monitor is connected to again
AGAIN_SECONDS = 1.0  # until the next attempt; for a node, doubled by each failure
MAX_AGAIN_SECONDS = 30.0
ATTEMPTS = 10  # of a coordinator, before it gives a monitor up

_node_log = logging.getLogger("distributed.worker.dps")
_scheduler_log = logging.getLogger("distributed.scheduler.dps")


# -- a node: its process at the monitor of its host ------------------------------------------------


class NodePresence:
    """One process at its monitor. Used from the event loop of the process."""

    def __init__(self, dask_worker: distributed.Worker) -> None:
        self.watched: Watched | None = None  # None: no monitor watches it. For any thread.
        self._host = split_address(dask_worker.address)[1] or "127.0.0.1"
        self._uses = Counter[str]()  # by group
        self._staying: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()  # set after the first attempt to register
        self._writer: asyncio.StreamWriter | None = None

    def enter(self, group: str) -> None:
        """Register, if this is the first use of the process by any group."""
        self._uses[group] += 1
        self._send(self._permission)
        if self._staying is None and sys.platform.startswith("linux"):
            self._tried.clear()
            self._staying = asyncio.create_task(self._stay())

    async def registered(self) -> None:
        """Wait until the process is registered, or cannot be."""
        if self._staying is not None:
            await self._tried.wait()

    def exit(self, group: str) -> None:
        """Leave, if this was the last use."""
        self._uses[group] -= 1
        self._send(self._permission)
        if not self._uses.total() and self._staying is not None:
            self._staying.cancel()
            self._staying = self.watched = None

    def silence(self, seconds: float) -> None:
        """Make the monitor not report this process for `seconds`, as if both were cut off."""
        self._send({"silent": seconds})

    @property
    def _permission(self) -> dict[str, bool]:
        # A coordinator cannot know what other groups would lose. And a user's own program may have
        # Dask workers in its process.
        groups = sum(uses > 0 for uses in self._uses.values())
        return {"may_be_killed": groups == 1 and not Client._instances}

    def _send(self, request: Mapping[str, object]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(request).encode() + b"\n")

    async def _stay(self) -> None:
        warned, pause = False, AGAIN_SECONDS
        while True:
            try:
                await self._register()
                pause = AGAIN_SECONDS
            except Exception as error:  # noqa: BLE001 - training continues without a monitor
                if not warned:
                    _node_log.warning(
                        "dps: no monitor watches the processes on this host: %s. A process that is "
                        "busy for longer than its lease is treated as lost. If steps take longer, "
                        "raise timings=dps.Timings(lease=...)",
                        error,
                    )
                warned = True
                self._tried.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_AGAIN_SECONDS)

    async def _register(self) -> None:
        """Register, and return when the monitor has ended."""
        try:
            async with asyncio.timeout(START_SECONDS):
                for _ in range(2):  # a monitor may be about to end with the last process on it
                    reader, self._writer = await _connected_to_own()
                    _, user = peer_of(self._writer.get_extra_info("socket"))
                    if user != os.getuid():
                        raise ConnectionRefusedError(f"its socket belongs to user {user}")
                    self._send({"host": self._host, **self._permission})
                    if reply := await reader.readline():
                        break
                    self._writer.close()
                else:
                    raise ConnectionRefusedError(f"it cannot be reached at {self._host}")
            self.watched = Watched(*json.loads(reply))
            self._tried.set()
            await reader.read()
        finally:
            self.watched = None
            if self._writer is not None:
                self._writer.close()
            self._writer = None


async def _connected_to_own() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the monitor of this host; start one if there is none."""
    name, started = socket_name(), False
    while True:
        try:
            return await asyncio.open_unix_connection(name)
        except ConnectionRefusedError:
            if not started:
                # In its own session, so that signals to the node, such as Ctrl-C, do not reach it.
                subprocess.Popen(
                    command(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
            started = True
            await asyncio.sleep(LOOK_SECONDS)


def presence_of(dask_worker: distributed.Worker) -> NodePresence:
    """Return the registration of a node's process, which all groups in it share."""
    own = platform_of(dask_worker).presence
    return made_once(dask_worker, NAME, lambda: own or NodePresence(dask_worker))


# -- a coordinator: its connections to monitors ----------------------------------------------------


class MonitorLinks:
    """Receives the reports of monitors (`dps.protocol.transport.Monitors`), on one event loop."""

    def __init__(
        self,
        on_report: Callable[[Sighted], Awaitable[object]],
        on_failure: Callable[[Exception], None],  # the monitor is followed all the same
    ) -> None:
        self._on_report = on_report
        self._tasks = Tasks(on_failure)
        self._on_failure = on_failure
        self._failures: dict[str, int] = {}  # consecutive ones, of each monitor that is followed
        self._asked: set[Watched] = set()
        self._links: dict[str, tuple[asyncio.StreamWriter, Signed]] = {}

    def follow(self, monitor: str) -> None:
        """Pass reports of a monitor to the coordinator."""
        if monitor not in self._failures:
            self._failures[monitor] = 0
            self._tasks.keep(partial(self._follow, monitor), AGAIN_SECONDS)

    async def kill(self, watched: Watched, stopped: float) -> None:
        """Ask a monitor to kill a process that has been stopped for `stopped` seconds."""
        if watched.monitor not in self._links:
            raise Unreachable(f"the monitor at {_place(watched.monitor)} is not connected")
        writer, signed = self._links[watched.monitor]
        if watched not in self._asked:  # the request is repeated while the process lives
            self._asked.add(watched)
            _scheduler_log.warning(
                "dps: process %d of the monitor at %s is stopped. If only one group uses it, it is "
                "killed after %g s, and other processes take over",
                watched.number,
                _place(watched.monitor),
                stopped,
            )
        writer.write(signed.line([watched.number, stopped]))

    async def close(self) -> None:
        """End all connections."""
        await self._tasks.close()

    async def _follow(self, monitor: str) -> None:
        """Stay connected; give up a monitor that has ended. It may be followed again later."""
        while self._failures[monitor] < ATTEMPTS:
            try:
                await self._listen(monitor)
            except (OSError, ValueError) as error:
                self._failures[monitor] += 1
                if self._failures[monitor] == ATTEMPTS:
                    _scheduler_log.info("dps: lost the monitor at %s: %s", _place(monitor), error)
                await asyncio.sleep(AGAIN_SECONDS)
        del self._failures[monitor]

    async def _listen(self, monitor: str) -> None:
        host, port, secret = monitor.split(" ")
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_BYTES)
        try:
            nonce = secrets.token_hex(16).encode()
            writer.write(nonce + b"\n")
            async with asyncio.timeout(CONNECT_SECONDS):
                nonces = (await reader.readline()).rstrip(b"\n") + nonce
            signed = Signed(secret.encode(), nonces, "coordinator")
            self._links[monitor] = writer, signed
            self._failures[monitor] = 0
            while True:
                async with asyncio.timeout(SILENT_SECONDS):
                    line = await reader.readline()
                if not line:
                    raise ConnectionError("it has ended")
                seen = tuple(Sighting(*each) for each in signed.value(line))
                try:
                    await self._on_report(Sighted(monitor, seen))
                except Exception as error:  # noqa: BLE001 - passed to the coordinator
                    self._on_failure(error)
        finally:
            self._links.pop(monitor, None)
            writer.close()


def _place(monitor: str) -> str:
    """Return where a monitor is, without its secret."""
    return ":".join(monitor.split(" ")[:2])
