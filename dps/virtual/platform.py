"""What dps stands on where time is virtual: see `dps.cluster.platform`, whose place it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from greenlet import GreenletExit

from dps.cluster.platform import Flag, Platform, Running, Timer, Usage
from dps.protocol.transport import TransportChoice
from dps.sim.process import EPOCH_SECONDS, Process
from dps.virtual.monitors import VirtualLinks, VirtualMonitor
from dps.virtual.threads import BlockingLoop, VirtualFlag, VirtualThread, begin

T = TypeVar("T")


class VirtualClock:
    """The virtual time: the same in every process."""

    def __init__(self, loop: BlockingLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        """Seconds since the Unix epoch, where every simulation begins at the same moment."""
        return EPOCH_SECONDS + self._loop.time()

    def monotonic(self) -> float:
        """Seconds since the simulation began."""
        return self._loop.time()


class Beginning:
    """What every clock shows before a simulation has begun."""

    def now(self) -> float:
        """Seconds since the Unix epoch, as a simulation begins with."""
        return EPOCH_SECONDS

    def monotonic(self) -> float:
        """Zero."""
        return 0.0


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
        self.presence = monitor.presence(process)
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
        return self._monitor.links(told, on_failure)

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
        return _Thread(thread)

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


class _Thread:
    """A `VirtualThread` as `threading.Thread` is used."""

    def __init__(self, thread: VirtualThread) -> None:
        self._future = thread.future

    def join(self) -> None:
        self._future.exception()

    def is_alive(self) -> bool:
        return not self._future.done()


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
