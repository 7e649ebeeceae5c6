"""Injected conditions on the dps messages of one process: messages are held back or delayed.

Dask's own messages are not affected, so that conditions can be lifted. Every condition ends after
its time, even if the process that imposed it is gone. Without conditions, a message costs one
attribute lookup.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dps.cluster.platform import made_once
from dps.protocol import wire

if TYPE_CHECKING:
    import distributed

Way = Literal["in", "out"]
BOTH: tuple[Way, ...] = ("in", "out")
NAME = "dps-links"


@dataclass(frozen=True, slots=True)
class Closed:
    """Hold messages in these directions back until the end, as TCP does by resending."""

    ways: tuple[Way, ...] = BOTH


@dataclass(frozen=True, slots=True)
class Late:
    """Delay messages in these directions by `seconds`."""

    seconds: float
    ways: tuple[Way, ...] = BOTH


Condition = Closed | Late


@dataclass(slots=True)
class _Current:
    condition: Condition
    over: asyncio.Event
    timer: asyncio.TimerHandle
    affected: int = 0


class Links:
    """The conditions under which one process sends and receives. Used from its event loop.

    Attributes
    ----------
    disturbed
        Whether there is any condition.
    """

    def __init__(self) -> None:
        self.disturbed = False
        self._current: dict[int, _Current] = {}
        self._affected: dict[int, int] = {}

    def impose(self, number: int, condition: Condition, seconds: float) -> None:
        """Impose a condition, known by a number, for some seconds."""
        timer = asyncio.get_running_loop().call_later(seconds, self.lift, number)
        self._current[number] = _Current(condition, asyncio.Event(), timer)
        self.disturbed = True

    def lift(self, number: int) -> None:
        """End a condition, if it has not ended; messages that it held back pass."""
        current = self._current.pop(number, None)
        if current is not None:
            self._affected[number] = current.affected
            current.timer.cancel()
            current.over.set()
        self.disturbed = bool(self._current)

    def lift_all(self) -> None:
        """End every condition."""
        for number in list(self._current):
            self.lift(number)

    @property
    def cut_off(self) -> bool:
        """Whether all messages that the process sends are held back."""
        conditions = [current.condition for current in self._current.values()]
        return any(isinstance(each, Closed) and "out" in each.ways for each in conditions)

    def affected(self, number: int) -> int:
        """Return the number of messages that a condition has held back or delayed."""
        current = self._current.get(number)
        return current.affected if current is not None else self._affected.get(number, 0)

    async def passage(self, way: Way) -> None:
        """Wait until a message may pass."""
        for current in list(self._current.values()):
            match current.condition:
                case Closed(ways) if way in ways:
                    current.affected += 1
                    await current.over.wait()
                case Late(seconds, ways) if way in ways:
                    current.affected += 1
                    await asyncio.sleep(seconds)

    async def carry_out(
        self, answer: Callable[[wire.Frames], Awaitable[wire.Frames]], request: wire.Frames
    ) -> wire.Frames:
        """Pass a request to `answer` and return the reply, subject to the current conditions."""
        await self.passage("in")
        reply = await answer(request)
        await self.passage("out")
        return reply


def links_of(dask_worker: distributed.Worker) -> Links:
    """The links of a node's process: the same for all that runs in it."""
    return made_once(dask_worker, NAME, Links)
