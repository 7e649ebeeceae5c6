"""The platform of a process: its clock and threads, and what the system reports of it.

`dps.cluster` and `dps.faults` use only the platform for time, for background work and for unique
names. So they run unchanged on virtual time, which is another platform (`dps.virtual`).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil
from distributed import wait
from distributed.comm import parse_address, parse_host_port

from dps.cluster import broken_pipes  # noqa: F401 - it repairs TLS in every process of dps
from dps.protocol.transport import Clock, TransportChoice

if TYPE_CHECKING:
    import distributed

T = TypeVar("T")
AnyFuture = asyncio.Future[Any] | Future[Any]

# `time.monotonic` stands still on Linux while the machine is suspended; leases must not.
BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The real time."""

    def now(self) -> float:
        """Return the seconds since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds of a clock that never goes back, and counts while the machine sleeps."""
        return time.clock_gettime(BOOT_TIME)


class Running(Protocol):
    """Background work, such as `threading.Thread`."""

    def join(self) -> None:
        """Wait until it has ended."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        ...


class Platform:
    """The platform of a real process. Thread-safe."""

    clock: Clock = SystemClock()  # of events, leases and deadlines
    presence: Any = None  # in place of a `dps.cluster.liveness.NodePresence`
    kills: tuple[type[BaseException], ...] = ()  # raised in a thread whose process is killed

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

    def usage(self) -> tuple[float, int]:
        """Return what the process has used since it started: CPU seconds, peak memory in bytes."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024

    def token(self) -> str:
        """Return eight characters for a unique name."""
        return uuid.uuid4().hex[:8]

    def monitors(
        self, on_report: Callable[[Any], Awaitable[object]], on_failure: Callable[[Exception], None]
    ) -> Any:
        """Return the platform's own `Monitors`; None: those of the hosts are used."""
        return None

    def way(self, chosen: TransportChoice) -> TransportChoice:
        """Return the transport of arrays for the user's choice."""
        return chosen

    def place(self, path: str | None) -> str | None:
        """Return the path on this platform for a path of the user."""
        return path

    def begin(self, request: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> Future[T]:
        """Start a coroutine on an event loop; a thread may wait for the future."""
        return asyncio.run_coroutine_threadsafe(request, loop)

    def begin_at_once(
        self,
        attempt: Callable[[Future[T]], bool],
        request: Callable[[], Coroutine[Any, Any, T]],
        loop: asyncio.AbstractEventLoop,
    ) -> Future[T]:
        """Call `attempt` on an event loop or, if that returns False, start a coroutine there."""
        future: Future[T] = Future()

        def begin() -> None:
            try:
                if not attempt(future):
                    task = loop.create_task(request())
                    future.add_done_callback(lambda _: task)  # which keeps the task alive
                    task.add_done_callback(partial(settle, future))
            except Exception as error:  # noqa: BLE001 - raised by the caller
                future.set_exception(error)

        loop.call_soon_threadsafe(begin)
        return future

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)

    def flag(self) -> Any:
        """Return a flag that is not set, such as `threading.Event`."""
        return threading.Event()

    def start(self, work: Callable[[], object], name: str) -> Running:
        """Start background work; it ends with the process at the latest."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def wait(
        self, client: Any, futures: Sequence[Any], timeout: float, every: bool = False
    ) -> bool:
        """Wait for the first of some Dask futures, or for `every` one; false after `timeout` s."""
        when = "ALL_COMPLETED" if every else "FIRST_COMPLETED"
        try:
            with client.as_current():
                wait(list(futures), timeout=max(0.0, timeout), return_when=when)
        except TimeoutError:
            return False
        return True

    def at_once(self, work: Callable[[str], T], names: Sequence[str]) -> list[T]:
        """Call a function for several names at the same time; return the results in order."""
        with ThreadPoolExecutor(len(names), thread_name_prefix="dps-at-once") as threads:
            return list(threads.map(work, names))


def settle(future: AnyFuture, ended: AnyFuture) -> None:
    """Give a future the result or the error of one that has ended, unless it is done."""
    if future.done():
        return
    if ended.cancelled():
        future.cancel()
    elif (error := ended.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(ended.result())


SYSTEM = Platform()


@cache
def _started(pid: int) -> float:
    # Once: psutil adds the time of boot, which moves when the system's clock is corrected.
    return float(psutil.Process(pid).create_time())


def platform_of(holder: object) -> Platform:
    """Return the platform of a Dask worker, scheduler or client: its own, or this process's."""
    platform = getattr(holder, "dps_platform", SYSTEM)
    # An rpc has attributes of every name.
    return platform if isinstance(platform, Platform) else SYSTEM


def keep_memory(platform: Platform) -> None:
    """Make this process keep freed memory: otherwise large arrays are mapped every time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform is SYSTEM else None
    if mallopt is not None:  # with glibc, whose malloc.h has these numbers
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        mallopt(-2, 64 << 20)  # M_TOP_PAD
        mallopt(-8, 1)  # M_ARENA_MAX: arenas of other threads would map large arrays after all


def split_address(address: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a Dask address; host "" if it is no network address."""
    scheme, location = parse_address(address)
    return (scheme, *parse_host_port(location)) if scheme in ("tcp", "tls") else (scheme, "", 0)


_making = Lock()


def state_of(dask_worker: distributed.Worker) -> dict[str, Any]:
    """Return the objects that dps keeps on a Dask worker, by name. Thread-safe."""
    # They are not among Dask's `extensions`: Dask iterates over those for each heartbeat, and gives
    # up a worker whose extensions change during that, as when a thread makes an actor.
    state: dict[str, Any] = vars(dask_worker).setdefault("dps_state", {})
    return state


def made_once(dask_worker: distributed.Worker, name: str, make: Callable[[], T]) -> T:
    """Return the object that is kept by this name; make it if there is none. Thread-safe."""
    state = state_of(dask_worker)
    with _making:
        if name not in state:
            state[name] = make()
        made: T = state[name]
        return made


def weakly(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a handler that calls a bound method while its object lives, and then does nothing."""
    # Dask's scheduler and client keep a handler even after it is unsubscribed. A bound method would
    # keep its group, with all its arrays, for as long as the cluster exists.
    known = weakref.WeakMethod(method)

    async def handle(*args: Any, **kwargs: Any) -> Any:
        bound = known()
        return None if bound is None else await bound(*args, **kwargs)

    return handle
