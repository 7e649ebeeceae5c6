"""The interfaces that the protocol runs against: `Transport`, `Clock` and `Monitors`.

`dps.cluster` implements them on Dask, `dps.virtual` on virtual time in one process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np

from dps.errors import NotServing, TransportError

T = TypeVar("T")

# How processes of a group call each other: the best transport that works, or a chosen one where it
# works; "dask" always works.
TransportChoice = Literal["auto", "shared_memory", "stream", "dask"]
TRANSPORTS: tuple[TransportChoice, ...] = get_args(TransportChoice)


# Takes a reply, or an exception in its place.
Done = Callable[[Any], None]


class Endpoint(NamedTuple):
    """The address of a process, and the key of the object called there."""

    address: str
    key: str


class Transport(Protocol):
    """Carries a message to an endpoint and brings the reply back."""

    async def call(self, to: Endpoint, message: Any, deadline: float, link: str = "control") -> Any:
        """Send `message` and return the reply, or raise the `DpsError` that the other side raised.

        Raises `Unreachable` if the connection is refused or lost, and `DeadlineExceeded` if there
        is no reply within `deadline` seconds: the message may have been carried out. The bytes are
        counted as `link`: "train", "replicate", "store" or "control".
        """

    def begin(
        self, to: Endpoint, message: Any, deadline: float, link: str, done: Done
    ) -> Callable[[], None] | None:
        """Send a small message at once, without a task; return a function that gives it up.

        `done` is called with the reply, what `call` raises, or `TimeoutError` if it was given up.
        None: nothing was sent, because something has to be awaited first, and `call` does that.
        """

    async def gone(self, address: str) -> bool:
        """Whether it is proven that the process at `address` has ended: its port is closed.

        False proves nothing: the process may be cut off, paused, or alive. Returns promptly.
        """

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an uninitialized array, in memory that is sent without a copy if possible.

        Thread-safe. The array must not be written to after it was sent.
        """


async def answers_of(calls: Sequence[Coroutine[Any, Any, T]], grace: float) -> list[T]:
    """Return the answers to calls of several processes, in order; some may be unreachable.

    After the first answer, the others have `grace` seconds. If no call is answered, the error of
    the first is raised.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    waiting = set(tasks)
    try:
        while waiting and not any(t.exception() is None for t in tasks if t.done()):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=grace)
    finally:
        for task in tasks:
            task.cancel()
    over = [task for task in tasks if task not in waiting]
    errors = [error for task in over if (error := task.exception()) is not None]
    for error in errors:
        if len(errors) == len(over) or not isinstance(error, TransportError | NotServing):
            raise error
    return [task.result() for task in over if task.exception() is None]


class Clock(Protocol):
    """The time. Waiting is asyncio's; a simulation has its own event loop."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""

    def monotonic(self) -> float:
        """Seconds on a clock of this process that never goes back, for durations and leases."""


class Watched(NamedTuple):
    """A process that a monitor watches: the monitor's address, and the process's number there."""

    monitor: str
    number: int


class Monitors(Protocol):
    """The monitors of the hosts that a group runs on, as the coordinator reaches them.

    Their reports reach the coordinator as `dps.protocol.messages.Sighted`.
    """

    def follow(self, monitor: str) -> None:
        """Pass reports of a monitor to the coordinator from now on; no effect if repeated."""

    async def kill(self, watched: Watched, stopped: float) -> None:
        """Make a monitor kill a process that has been stopped for `stopped` seconds, and still is.

        Raises `DpsError` if the monitor cannot be reached, but not if it does not kill the process.
        """
