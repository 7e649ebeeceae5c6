"""The simulated process: what runs in it, whether it lives, and what its clocks show.

Every task knows the process that it runs in by a context variable, which tasks inherit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from dps.protocol import wire

T = TypeVar("T")

EPOCH_SECONDS = 1e9  # what the clocks show when a simulation begins

here: ContextVar[Process | None] = ContextVar("process", default=None)


class Unforeseen(Exception):
    """An exception that no part of dps knows (see `dps.sim.exceptions`)."""


class Process:
    """A simulated process: its memory is the objects in it, which nobody else may touch.

    Attributes
    ----------
    rate, offset
        How fast its monotonic clock runs, and by how many seconds its calendar is off.
    stood
        For how many seconds it has been paused so far, the pause that it is in not counted.
    paused_at
        When the pause began that it is in; None: it runs.
    busy
        Whether it is paused only as far as others can tell: it is at work, and answers nothing.
    clock_stands
        Whether its monotonic clock stands still while it is paused, as on a paused virtual machine.
    missed
        For how many seconds its monotonic clock has stood still.
    machine
        What it shares a power supply and the cache of a disk with.
    silent
        Whether it has ended without a sign: nothing refuses what it is sent.
    ended_at
        When it ended; None: it lives.
    doomed_in
        After how many steps of its background tasks one of them raises an exception; 0: none does.
    doomed
        Whether one has raised.
    unread
        What came while it was paused, each as a call that has it read.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.machine = name
        self.alive = True
        self.silent = False
        self.ended_at: float | None = None
        self.unread: list[Callable[[], None]] = []
        self.rate = 1.0
        self.offset = 0.0
        self.stood = 0.0
        self.paused_at: float | None = None
        self.busy = False
        self.clock_stands = False
        self.missed = 0.0
        self.doomed_in = 0
        self.doomed = False
        self.services: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.expected: dict[asyncio.Future[wire.Frames | None], None] = {}
        self._context: Context | None = None

    def do(self, function: Callable[[], T]) -> T:
        """Call a function as this process: the tasks that it makes belong to it."""
        return self._own_context().run(function)

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task in this process."""
        return asyncio.get_running_loop().create_task(work, context=self._own_context())

    def _own_context(self) -> Context:
        if self._context is None:
            self._context = copy_context()
            self._context.run(here.set, self)
        return self._context.copy()


class SimClock:
    """The virtual time, as the clocks of a process show it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Seconds since the Unix epoch, in the simulated world."""
        return EPOCH_SECONDS + self._process.offset + self._loop.time()

    def monotonic(self) -> float:
        """Seconds since the simulation began, on a clock that may be a little fast or slow."""
        return self._process.rate * (self._loop.time() - self._process.missed)
