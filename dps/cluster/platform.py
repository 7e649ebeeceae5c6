"""What dps stands on in a process: its clocks and threads, and what the system says of the process.

All of `dps.cluster` and `dps.faults` asks this, and nothing else, for the time, for something that
goes on beside the rest, and for names that nobody else has. That is why it runs on virtual time as
it is, where the platform is another one (`dps.virtual`).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil
from distributed import wait

from dps.protocol.transport import Clock, TransportChoice, Watched

if TYPE_CHECKING:
    import distributed

T = TypeVar("T")

# `time.monotonic` stands still on Linux while the machine is suspended; leases must not.
BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The real time."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back, those in which the machine was suspended too."""
        return time.clock_gettime(BOOT_TIME)


class Running(Protocol):
    """Work that was begun beside the rest, such as `threading.Thread`."""

    def join(self) -> None:
        """Wait until it has ended."""
        ...

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        ...


class Timer(Protocol):
    """Work that is to begin later, such as `threading.Timer`."""

    def cancel(self) -> None:
        """Do not begin it, if it has not begun."""
        ...

    def join(self) -> None:
        """Wait until it has ended, or was cancelled before it began."""
        ...


class Flag(Protocol):
    """Something to wait for, such as `threading.Event`."""

    def set(self) -> None:
        """Have whoever waits go on."""
        ...

    def is_set(self) -> bool:
        """Whether it is set."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for `timeout` seconds at most; return whether it is."""
        ...


class Presence(Protocol):
    """The registration of a process with the monitor of its host.

    Attributes
    ----------
    watched
        How the process is known there; None: no monitor watches it.
    """

    watched: Watched | None

    def enter(self, group: str) -> None:
        """Register, if this is the first use of the process by any group."""
        ...

    async def registered(self) -> None:
        """Wait until the process is registered, or cannot be.

        Before that, a busy process cannot be distinguished from a dead one.
        """
        ...

    def exit(self, group: str) -> None:
        """Leave, if this was the last use."""
        ...

    def silence(self, seconds: float) -> None:
        """Have the monitor say nothing of this process for a while, as if both were cut off."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used since it started: seconds of cores, and bytes of memory at most."""

    cpu_seconds: float
    peak_bytes: int


class Platform:
    """The platform of a real process. Thread-safe.

    Attributes
    ----------
    clock
        The clock of events, leases and deadlines.
    handles_signals
        Whether the process is told by a signal that it is to end.
    serves_metrics
        Whether the process has an endpoint where metrics are asked for.
    presence
        The registration with a monitor that the platform provides; None: one of the host is used.
    kills
        What is raised in a thread whose process is killed.
    """

    clock: Clock = SystemClock()
    handles_signals = True
    serves_metrics = True
    presence: Presence | None = None
    kills: tuple[type[BaseException], ...] = ()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return os.getpid()

    @property
    def host(self) -> str:
        """The name of its host."""
        return socket.gethostname()

    @property
    def started(self) -> float:
        """When the process began, in seconds since the Unix epoch."""
        return _started(self.pid)

    def usage(self) -> Usage:
        """Measure what the process has used."""
        times = psutil.Process().cpu_times()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Usage(times.user + times.system, peak)

    def token(self) -> str:
        """Return eight characters that nobody else has, for a name."""
        return uuid.uuid4().hex[:8]

    def monitors(
        self,
        told: Callable[[Any], Awaitable[object]],
        on_failure: Callable[[Exception], None],
    ) -> Any:
        """Return the monitors that the platform provides (`dps.protocol.transport.Monitors`).

        None: those of the hosts are used. `told` is called with each `Sighted`.
        """
        return None

    def way(self, chosen: TransportChoice) -> TransportChoice:
        """Return by what arrays are sent, if `chosen` is what a user wants."""
        return chosen

    def place(self, path: str | None) -> str | None:
        """Return where the files are that a user wants at a path."""
        return path

    def begin(self, request: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> Future[T]:
        """Have an event loop do something; the future can be waited for in a thread."""
        return asyncio.run_coroutine_threadsafe(request, loop)

    def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""
        time.sleep(seconds)

    def flag(self) -> Flag:
        """Return something to wait for, which is not set."""
        return threading.Event()

    def start(self, work: Callable[[], object], name: str) -> Running:
        """Begin work beside the rest; it ends with the process at the latest."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def wait(
        self, client: Any, futures: Sequence[Any], timeout: float, every: bool = False
    ) -> bool:
        """Wait for the first of some Dask futures, or `every` one; return whether that has ended.

        It is False after `timeout` seconds.
        """
        when = "ALL_COMPLETED" if every else "FIRST_COMPLETED"
        try:
            with client.as_current():
                wait(list(futures), timeout=max(0.0, timeout), return_when=when)
        except TimeoutError:
            return False
        return True

    def after(self, seconds: float, work: Callable[[], object]) -> Timer:
        """Begin work beside the rest in so many seconds."""
        timer = threading.Timer(seconds, work)
        timer.start()
        return timer

    def at_once(self, work: Callable[[str], T], names: Sequence[str]) -> list[T]:
        """Do something for several names at the same time."""
        with ThreadPoolExecutor(len(names), thread_name_prefix="dps-at-once") as threads:
            return list(threads.map(work, names))


SYSTEM = Platform()


@cache
def _started(pid: int) -> float:
    # Once: psutil adds the time of boot, which moves when the system's clock is corrected.
    return float(psutil.Process(pid).create_time())


def platform_of(holder: object) -> Platform:
    """The platform of a Dask worker, scheduler or client: its own, or that of this process."""
    found = getattr(holder, "dps_platform", SYSTEM)
    return found if isinstance(found, Platform) else SYSTEM  # an rpc has attributes of every name


# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

KEEP_BYTES = 1 << 30
PAD_BYTES = 64 << 20


def keep_memory(platform: Platform = SYSTEM) -> bool:
    """Have freed memory kept by this process; return whether the C library knows how.

    A process in which nodes are simulated is somebody else's, and stays as it is.
    """
    if platform is not SYSTEM or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = (
        (M_MMAP_THRESHOLD, KEEP_BYTES),
        (M_TRIM_THRESHOLD, KEEP_BYTES),
        (M_TOP_PAD, PAD_BYTES),
        # The arenas of other threads cannot hold large arrays and would map them after all.
        (M_ARENA_MAX, 1),
    )
    taken = [libc.mallopt(name, value) for name, value in settings]  # each, whatever came of others
    return all(taken)


_ATTRIBUTE = "dps_state"
_making = Lock()


def state_of(dask_worker: distributed.Worker) -> dict[str, Any]:
    """What is kept, by names. Thread-safe.

    It is not among Dask's `extensions`: Dask goes through those for each heartbeat, and gives a
    worker up whose extensions change meanwhile, as they do when an actor is made in a thread.
    """
    found: dict[str, Any] = vars(dask_worker).setdefault(_ATTRIBUTE, {})
    return found


def made_once(dask_worker: distributed.Worker, name: str, make: Callable[[], T]) -> T:
    """What is kept by this name, made if there is none. Thread-safe."""
    state = state_of(dask_worker)
    with _making:
        if name not in state:
            state[name] = make()
        found: T = state[name]
    return found
