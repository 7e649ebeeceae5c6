"""Virtual time: processes, and an asyncio event loop that jumps to the next scheduled event.

Callbacks run in an order that follows from the program alone, so a simulation with one seed is
reproducible exactly. Callbacks of a paused process run, in order, when it resumes. A context
variable, which tasks inherit, holds the process that a task runs in.
"""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from random import Random
from typing import Any, TypeVar, TypeVarTuple

from dps.protocol import wire

HOPELESS = 3600.0  # seconds; nothing in the protocol waits for longer
FRANTIC = 100_000  # turns of the loop without progress in time
TIDY = 200  # timers; most are of deadlines that were met, and cancelled long before they are due

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH_SECONDS = 1e9  # the time at the start of a simulation

here: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """A simulated process; no other process may access its objects."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.alive = True
        self.stood = 0.0  # seconds of past pauses
        self.paused_at: float | None = None  # None: it runs
        self.services: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.expected: dict[asyncio.Future[wire.Frames | None], None] = {}

    @cached_property
    def context(self) -> Context:
        """Copies of it are the contexts of everything that runs in this process."""
        context = copy_context()
        context.run(here.set, self)
        return context

    @property
    def is_stopped(self) -> bool:
        """Whether it seems stopped to a monitor."""
        return self.paused_at is not None

    def do(self, function: Callable[[], T]) -> T:
        """Call a function as this process; the tasks that it creates belong to the process."""
        return self.context.copy().run(function)

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task in this process."""
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())


P = TypeVar("P", bound=Process)


class VirtualClock:
    """The virtual time, the same on the clocks of all processes; without a loop, the start time."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        # Seconds since the simulation began.
        self.monotonic: Callable[[], float] = loop.time if loop is not None else lambda: 0.0

    def now(self) -> float:
        """Seconds since the Unix epoch, in the simulated world."""
        return EPOCH_SECONDS + self.monotonic()


class Deadlock(RuntimeError):
    """Every task waits, and no event is left that could end the waiting."""


class _Call(TimerHandle):
    """A callback that is due, or will be; asyncio's own collects debugging information, slowly."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def cancel(self) -> None:
        """Skip it when its time comes, and keep nothing alive until then."""
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time."""

    def __init__(self, random: Random, work: float) -> None:
        super().__init__()
        # Called before work in an executor; returns a function that is called after it, and returns
        # the seconds that its reads and writes take in addition.
        self.files: Callable[[], Callable[[], float]] = lambda: float
        self._now = 0.0
        self._random = random
        self.work = work  # the longest duration of work in an executor
        self._timers: list[tuple[float, int, _Call]] = []
        self._numbers = count()
        self._tidy_at = TIDY
        self._rounds = 0
        self._parked: dict[Process, list[_Call]] = {}
        self._ready: deque[_Call]  # asyncio's own queue of what is to be called next
        self._stopping: bool

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> _Call:
        """Call a function in the next turn of the loop."""
        call = _Call(callback, args, context)
        self._ready.append(call)
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Call:
        """Call a function after some seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> _Call:
        """Call a function at a time; callbacks of the same time run in the order of these calls."""
        call = _Call(callback, args, context)
        heappush(self._timers, (when, next(self._numbers), call))
        return call

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run the work inline, at the end of a duration that is drawn."""
        # Work whose waiter is cancelled before that, because its process is gone, is not done.
        done: asyncio.Future[T] = self.create_future()
        self.call_later(self._random.uniform(0, self.work), self._do, done, lambda: func(*args))
        return done

    def _do(self, done: asyncio.Future[T], work: Callable[[], T]) -> None:
        if done.done():
            return
        takes = self.files()
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised where the work is waited for
            if not done.done():
                done.set_exception(error)
            return
        if seconds := takes():
            self.call_later(seconds, fulfil, done, result)
        else:
            fulfil(done, result)

    def pause(self, process: Process) -> None:
        """Run nothing of a process until it is resumed."""
        self._parked.setdefault(process, [])

    def resume(self, process: Process) -> None:
        """Run the callbacks that became due while the process was paused."""
        self._ready.extend(self._parked.pop(process, ()))

    def resume_all(self) -> None:
        """Resume every process."""
        for process in list(self._parked):
            self.resume(process)

    def _run_once(self) -> None:
        """Let the time pass until a callback is due, then call all that are due."""
        timers, ready, parked = self._timers, self._ready, self._parked
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if ready:
            self._rounds += 1
            if self._rounds > FRANTIC:
                raise Deadlock(f"{FRANTIC} turns of the loop without progress at {self._now:.6f} s")
        elif not self._stopping:
            if not timers or timers[0][0] > self._now + HOPELESS:
                raise Deadlock(f"nothing is left to run at {self._now:.6f} s; {_waiting(self)}")
            self._now = max(self._now, timers[0][0])
            self._rounds = 0
            if len(timers) > self._tidy_at:
                timers[:] = [entry for entry in timers if not entry[2]._cancelled]
                heapify(timers)
                self._tidy_at = TIDY + 2 * len(timers)
        while timers and timers[0][0] <= self._now:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            call = ready.popleft()
            if call._cancelled or (parked and self._park(call)):
                continue
            try:
                call._context.run(call._callback, *call._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio's own loop does
                self.call_exception_handler({"message": "a callback failed", "exception": error})

    def _park(self, call: _Call) -> bool:
        process = call._context.get(here)
        parked = self._parked.get(process) if process is not None else None
        if parked is None:
            return False
        parked.append(call)
        return True

    def _process_events(self, event_list: list[Any]) -> None:
        """Required by asyncio; there are no events from outside."""

    def _write_to_self(self) -> None:
        """Required by asyncio, to interrupt a wait; there is none."""


def only_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore tasks that were destroyed while they waited, such as requests to a dropped replica."""
    if "exception" in context:
        loop.default_exception_handler(context)


def fulfil(done: asyncio.Future[T], result: T) -> None:
    """Give a future its result, unless it is done."""
    if not done.done():
        done.set_result(result)


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    tasks = sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks(loop))  # type: ignore[union-attr]
    return f"waiting: {', '.join(tasks) or 'no task'}"
