"""What dps stands on where time is virtual: see `dps.cluster.platform`, whose place it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from greenlet import GreenletExit

from dps.cluster.platform import Flag, Platform, Running, Timer, Usage
from dps.protocol.messages import Sighted
from dps.protocol.monitor import Look, Monitor
from dps.protocol.tasks import Tasks
from dps.protocol.transport import TransportChoice, Watched
from dps.virtual.loop import Process, VirtualClock
from dps.virtual.threads import BlockingLoop, VirtualFlag, VirtualThread, begin

T = TypeVar("T")


class VirtualPlatform(Platform):
    """The platform of one process on virtual time. Not thread-safe: there is one thread.

    Parameters
    ----------
    tokens
        Numbers that nobody has had; shared by all processes.
    number
        That of the process.
    disk
        Where files are, as fsspec knows it.
    busy
        Says for how many seconds the process has been at work on messages.
    monitor
        Watches the process.
    """

    handles_signals = False
    serves_metrics = False  # the registry is the program's, and would keep whoever is killed
    kills = (GreenletExit,)

    def __init__(
        self,
        loop: BlockingLoop,
        process: Process,
        number: int,
        tokens: Iterator[int],
        disk: str,
        busy: Callable[[], float],
        monitor: VirtualMonitor,
    ) -> None:
        self.presence = VirtualPresence(monitor, process)
        self._monitor = monitor
        self.clock = VirtualClock(loop)
        self._loop = loop
        self._process = process
        self._number = number
        self._tokens = tokens
        self._disk = disk
        self._busy = busy

    @property
    def pid(self) -> int:
        """The number of the process, which the system does not know."""
        return self._number

    @property
    def host(self) -> str:
        """The name of its host: it has one of its own."""
        return f"host-of-{self._process.name}"

    @property
    def started(self) -> float:
        """Nothing: no two virtual processes have the same number."""
        return 0.0

    def usage(self) -> Usage:
        """What the profile says of its messages; of memory it says nothing."""
        return Usage(self._busy(), 0)

    def token(self) -> str:
        """Return eight characters that nobody else has, the same ones each time."""
        return f"{next(self._tokens):08x}"

    def monitors(
        self,
        told: Callable[[Any], Awaitable[object]],
        on_failure: Callable[[Exception], None],
    ) -> VirtualLinks:
        """Return the coordinator's way to the monitor of all virtual nodes."""
        return VirtualLinks(self._monitor, told, on_failure)

    def way(self, chosen: TransportChoice) -> TransportChoice:
        """Return what stands for all connections: there are no sockets."""
        return "dask"

    def place(self, path: str | None) -> str | None:
        """Return a place on a disk in memory, which all virtual nodes reach."""
        if path is not None and path.startswith(self._disk):
            return path
        return f"{self._disk}/{(path or 'checkpoints').replace('://', '/').strip('/')}"

    def begin(self, request: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> Future[T]:
        """Have the loop do something; whoever waits for the future gives way to it."""
        return begin(request, self._loop)

    def sleep(self, seconds: float) -> None:
        """Give way for so many virtual seconds."""
        self._loop.wait(_never, max(0.0, seconds))

    def flag(self) -> Flag:
        """Return something to wait for, which is not set."""
        return VirtualFlag(self._loop)

    def start(self, work: Callable[[], object], name: str) -> Running:
        """Begin work beside the rest."""
        thread = VirtualThread(work, self._loop, self._process)
        thread.future.add_done_callback(self._tell_of_failure)
        return thread

    def wait(
        self, client: Any, futures: Sequence[Any], timeout: float, every: bool = False
    ) -> bool:
        """Wait for the first of some futures, or `every` one; False after so many seconds."""
        until = self._loop.time() + timeout
        while True:
            left = [future for future in futures if not future.done()]
            if not left or (len(left) < len(futures) and not every):
                return True
            if self._loop.time() >= until:
                return False
            changed = self.flag()
            for future in left:
                future.add_done_callback(lambda _, flag=changed: flag.set())
            changed.wait(until - self._loop.time())

    def after(self, seconds: float, work: Callable[[], object]) -> Timer:
        """Begin work beside the rest in so many virtual seconds."""
        return _Timer(self, seconds, work)

    def at_once(self, work: Callable[[str], T], names: Sequence[str]) -> list[T]:
        """Do something for several names at the same time."""
        threads = [VirtualThread(partial(work, name), self._loop, self._process) for name in names]
        return [thread.future.result() for thread in threads]

    def _tell_of_failure(self, future: Future[Any]) -> None:
        """Nobody asks what became of work beside the rest, so say it."""
        error = None if future.cancelled() else future.exception()
        if error is not None:
            told = {"message": "work beside the rest failed", "exception": error}
            self._loop.call_exception_handler(told)


class _Timer:
    """Work that begins later, as by `threading.Timer`."""

    def __init__(
        self, platform: VirtualPlatform, seconds: float, work: Callable[[], object]
    ) -> None:
        self._cancelled = platform.flag()
        self._work = work
        self._running = platform.start(lambda: self._wait(seconds), "timer")

    def cancel(self) -> None:
        self._cancelled.set()

    def join(self) -> None:
        self._running.join()

    def _wait(self, seconds: float) -> None:
        if not self._cancelled.wait(seconds):
            self._work()


def _never(wake: Callable[..., None]) -> None:
    pass


LOOK_SECONDS = 0.2
NAME = "virtual"


class VirtualMonitor:
    """One monitor for all nodes of a virtual cluster. Used from its loop.

    Parameters
    ----------
    kill
        Ends the process of a node.

    Attributes
    ----------
    state
        What it has seen.
    processes
        Those that it watches, by their numbers.
    """

    def __init__(self, kill: Callable[[Process], None]) -> None:
        self._kill = kill
        self.state = Monitor()
        self.processes: dict[int, Process] = {}
        self.loop = asyncio.get_running_loop()

    def remove(self, number: int) -> None:
        """Watch a process no more."""
        self.state.remove(number)
        self.processes.pop(number, None)

    def look(self) -> Sighted:
        """Look at all processes that have not ended; the scheduler reports those itself."""
        for number in [n for n, process in self.processes.items() if not process.alive]:
            self.remove(number)
        seen = self.state.look(self.loop.time(), lambda number: look_at(self.processes[number]))
        return Sighted(NAME, tuple(seen))

    def kill(self, number: int, stopped: float) -> None:
        """Kill a process that is stopped."""
        process, now = self.processes.get(number), self.loop.time()
        if process is not None and self.state.may_kill(number, now, look_at(process), stopped):
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
            self.watched = Watched(NAME, self._monitor.state.add(may_be_killed=True))
            self._monitor.processes[self.watched.number] = self._process

    async def registered(self) -> None:
        """Do nothing: it is."""

    def exit(self, group: str) -> None:
        """Leave, if this was the last use."""
        self._users -= 1
        if not self._users and self.watched is not None:
            self._monitor.remove(self.watched.number)
            self.watched = None

    def silence(self, seconds: float) -> None:
        """Have the monitor say nothing of this process for a while."""
        if self.watched is not None:
            until = self._monitor.loop.time() + seconds
            self._monitor.state.silence(self.watched.number, until)


class VirtualLinks:
    """A coordinator's way to the monitor (see `dps.protocol.transport.Monitors`)."""

    def __init__(
        self,
        monitor: VirtualMonitor,
        told: Callable[[Sighted], Awaitable[object]],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._monitor = monitor
        self._told = told
        self._tasks = Tasks(on_failure)
        self._is_following = False
        self.close = self._tasks.close

    def follow(self, monitor: str) -> None:
        """Pass reports of the monitor to the coordinator."""
        if not self._is_following:
            self._is_following = True
            self._tasks.keep(self._follow, LOOK_SECONDS)

    async def kill(self, watched: Watched, stopped: float) -> None:
        """Have a stopped process killed."""
        self._monitor.kill(watched.number, stopped)

    async def _follow(self) -> None:
        while True:
            await self._told(self._monitor.look())
            await asyncio.sleep(LOOK_SECONDS)


def look_at(process: Process) -> Look:
    """Look at a simulated process, as `dps.cluster.monitor.look_at` does at a real one."""
    if process.paused_at is None:
        return Look("no", None)
    progress: Any = process.stood
    return Look("stopped", progress)
