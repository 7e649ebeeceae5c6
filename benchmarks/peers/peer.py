"""What every peer of the benchmark of transports does: the same work, timed call by call.

A call sends a gradient of ones to another process, which applies it to its weights by SGD, and has
the new weights back. So the weights tell how many calls have been carried out.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from dps.errors import DpsError

LEARNING_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """The seconds of each call, and a weight as the first call brought it, and the last one."""

    seconds: list[float]
    weights: tuple[float, float]


# Makes a number of calls.
Timed = Callable[[int], Turn]
# Makes one, and returns the new weights.
Call = Callable[[], Any]
# Sets up the two processes of a peer, for so many bytes of float32.
Peer = Callable[[int], contextlib.AbstractContextManager[Timed]]


def repeat(call: Call, calls: int) -> Turn:
    """Make so many calls, one after the other; at least one."""
    seconds, weights = [], []
    for _ in range(calls):
        began = time.perf_counter()
        brought = call()
        seconds.append(time.perf_counter() - began)
        weights.append(float(brought[0]))
    return Turn(seconds, (weights[0], weights[-1]))


@contextlib.contextmanager
def apart(
    caller: Callable[[int], contextlib.AbstractContextManager[Call]], nbytes: int
) -> Iterator[Timed]:
    """Have the calls of a peer made in a process of their own, which starts the other one.

    `caller` is a function of a module, so that it can be named in the other process.

    Raises `DpsError` if it cannot be set up, or its process has ended; what that wrote to stderr
    says why.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_obey, args=(caller, nbytes, theirs))
    process.start()
    theirs.close()

    def told() -> Any:
        try:
            return ours.recv()
        except (EOFError, OSError):
            raise DpsError("its process has ended, see above") from None

    def timed(calls: int) -> Turn:
        with contextlib.suppress(OSError):  # that it has ended is seen when it is to answer
            ours.send(calls)
        turn: Turn = told()
        return turn

    try:
        told()  # that it is set up
        yield timed
    finally:
        ours.close()
        process.join()


def _obey(
    caller: Callable[[int], contextlib.AbstractContextManager[Call]],
    nbytes: int,
    orders: Connection,
) -> None:
    with caller(nbytes) as call, contextlib.suppress(EOFError):
        orders.send("set up")
        while True:
            orders.send(repeat(call, orders.recv()))
