"""Owns virtual time: an asyncio event loop that never waits but jumps to what happens next.

Every callback runs in an order that follows from the program alone, so a simulation that draws all
its chances from one seeded generator repeats itself exactly. When nothing is left that could ever
happen, waiting would last forever, and the loop says so instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar, TypeVarTuple

HOPELESS = 3600.0  # nothing in the protocol waits for so many seconds

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Deadlock(RuntimeError):
    """Every task waits for something that nothing is left to bring about."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop on virtual time.

    Parameters
    ----------
    random
        Draws how long work takes that is given to an executor.
    work
        The longest time that such work takes, in virtual seconds.
    """

    def __init__(self, random: Random, work: float) -> None:
        super().__init__()
        self._now = 0.0
        self._random = random
        self._work = work
        self._selector = self  # asyncio asks its selector to wait; here that moves the time

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Let the time pass that asyncio would have slept; nothing ever arrives from outside."""
        if timeout is None or timeout > HOPELESS:
            raise Deadlock(f"nothing is left to run at {self._now:.6f} s; {_waiting(self)}")
        self._now += timeout
        return []

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run the work inline, at the end of the time that it is taken to need.

        Work whose waiter is cancelled before (its process is gone) is never done.
        """
        done: asyncio.Future[T] = self.create_future()
        self.call_later(self._random.uniform(0, self._work), _do, done, lambda: func(*args))
        return done

    def _process_events(self, event_list: list[Any]) -> None:
        """Required by asyncio; there are no events from outside."""

    def _write_to_self(self) -> None:
        """Required by asyncio, to interrupt a wait; there is none."""


def run(main: Callable[[], Coroutine[Any, Any, T]], random: Random, work: float = 0.02) -> T:
    """Run a coroutine, and whatever it starts, on a `VirtualLoop`; return its result.

    Raises
    ------
    Deadlock
        It waits for something that can never happen.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(random, work)) as runner:
        return runner.run(main())


def _do(done: asyncio.Future[T], work: Callable[[], T]) -> None:
    if done.done():
        return
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the work
        done.set_exception(error)


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    tasks = sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks(loop))  # type: ignore[union-attr]
    return f"waiting: {', '.join(tasks) or 'no task'}"
