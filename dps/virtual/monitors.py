"""The monitor of virtual nodes: it sees which are stopped, as that of a host does for real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dps.protocol.messages import Sighted
from dps.protocol.monitor import Monitor
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Watched
from dps.sim.monitors import look_at
from dps.sim.process import Process

LOOK_SECONDS = 0.2
NAME = "virtual"


class VirtualMonitor:
    """One monitor for all nodes of a virtual cluster. Used from its loop.

    Parameters
    ----------
    kill
        Ends the process of a node.
    """

    def __init__(self, kill: Callable[[Process], None]) -> None:
        self._kill = kill
        self._monitor = Monitor()
        self._processes: dict[int, Process] = {}
        self._loop = asyncio.get_running_loop()

    def presence(self, process: Process) -> VirtualPresence:
        """Return the registration of a process, which is not made yet."""
        return VirtualPresence(self, process)

    def links(
        self,
        told: Callable[[Sighted], Awaitable[object]],
        on_failure: Callable[[Exception], None],
    ) -> VirtualLinks:
        """Return what a coordinator knows the monitor by (see `MonitorLinks`)."""
        return VirtualLinks(self, told, Tasks(on_failure))

    def add(self, process: Process) -> Watched:
        """Watch a process."""
        number = self._monitor.add(may_be_killed=True)
        self._processes[number] = process
        return Watched(NAME, number)

    def remove(self, watched: Watched) -> None:
        """Watch a process no more."""
        self._monitor.remove(watched.number)
        self._processes.pop(watched.number, None)

    def silence(self, watched: Watched, seconds: float) -> None:
        """Say nothing of a process for a while."""
        self._monitor.silence(watched.number, self._loop.time() + seconds)

    def look(self) -> Sighted:
        """Look at all processes that have not ended; the scheduler reports those itself."""
        for number in [n for n, process in self._processes.items() if not process.alive]:
            self._monitor.remove(number)
            del self._processes[number]
        now = self._loop.time()
        seen = self._monitor.look(now, lambda number: look_at(self._processes[number]))
        return Sighted(NAME, tuple(seen))

    def kill(self, watched: Watched, stopped: float) -> None:
        """Kill a process that is stopped."""
        process, now = self._processes.get(watched.number), self._loop.time()
        if process is not None and self._monitor.may_kill(
            watched.number, now, look_at(process), stopped
        ):
            self._kill(process)


class VirtualPresence:
    """The registration of a virtual process (see `dps.cluster.platform.Presence`)."""

    def __init__(self, monitor: VirtualMonitor, process: Process) -> None:
        self.watched: Watched | None = None
        self._monitor = monitor
        self._process = process
        self._users = 0

    def enter(self, group: str) -> None:
        """Register, if this is the first use of the process."""
        self._users += 1
        if self.watched is None:
            self.watched = self._monitor.add(self._process)

    async def registered(self) -> None:
        """Do nothing: it is."""

    def exit(self, group: str) -> None:
        """Leave, if this was the last use."""
        self._users -= 1
        if not self._users and self.watched is not None:
            self._monitor.remove(self.watched)
            self.watched = None

    def silence(self, seconds: float) -> None:
        """Have the monitor say nothing of this process for a while."""
        if self.watched is not None:
            self._monitor.silence(self.watched, seconds)


class VirtualLinks:
    """A coordinator's way to the monitor (see `dps.protocol.transport.Monitors`)."""

    def __init__(
        self,
        monitor: VirtualMonitor,
        told: Callable[[Sighted], Awaitable[object]],
        tasks: Tasks,
    ) -> None:
        self._monitor = monitor
        self._told = told
        self._tasks = tasks
        self._is_following = False

    def follow(self, monitor: str) -> None:
        """Pass reports of the monitor to the coordinator."""
        if not self._is_following:
            self._is_following = True
            self._tasks.keep(self._follow, LOOK_SECONDS)

    async def kill(self, watched: Watched, stopped: float) -> None:
        """Have a stopped process killed."""
        self._monitor.kill(watched, stopped)

    async def close(self) -> None:
        """Tell the coordinator nothing more."""
        await self._tasks.close()

    async def _follow(self) -> None:
        while True:
            await self._told(self._monitor.look())
            await asyncio.sleep(LOOK_SECONDS)
