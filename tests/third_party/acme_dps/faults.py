"""A kind of fault of another maker: the event loop of a node is blocked in turns.

The node itself counts the turns, which proves that the fault had its effect.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dps.errors import ConfigurationError
from dps.faults import Lasting
from dps.faults.effects import Effect, Hit, Seen

TURNS = "acme_stutter"


@dataclass(frozen=True)
class Stutter(Lasting):
    """The event loop of a node is blocked for `block` seconds, lets go for as long, and so on."""

    block: float = 0.01
    kind = "acme_stutter"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.block < self.seconds:
            raise ConfigurationError(f"Stutter: block={self.block}, expected 0 to seconds")

    def effect(self, hit: Hit) -> Effect:
        """Return what blocks the event loop."""
        return Stuttering(self, hit)


class Stuttering:
    """The blocked turns of one node."""

    proven = True  # `begin` has counted one

    def __init__(self, fault: Stutter, hit: Hit) -> None:
        self._fault = fault
        self._hit = hit

    def begin(self) -> Seen:
        """Begin to block, and see the first turn."""
        turns = self._hit.run(_begin, self._fault.block, self._fault.seconds)
        return Seen(f"its event loop was blocked {turns} times", turns > 0)

    def end(self) -> Seen:
        """Stop blocking, and count the turns."""
        turns = self._hit.run(_end)
        return Seen(f"its event loop was blocked {turns} times in all", turns > 0)


# -- what runs on the nodes ------------------------------------------------------------------------


class _Turns:
    """Counts the turns of a node, each of which blocks its event loop."""

    def __init__(self) -> None:
        self.count = 0
        self.first = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def take(self, block: float, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(block)
            self.count += 1
            self.first.set()
            await asyncio.sleep(block)


async def _begin(block: float, seconds: float, dask_worker: Any) -> int:
    turns = _Turns()
    setattr(dask_worker, TURNS, turns)
    turns.task = asyncio.create_task(turns.take(block, seconds))
    await turns.first.wait()
    return turns.count


async def _end(dask_worker: Any) -> int:
    turns: _Turns = getattr(dask_worker, TURNS)
    assert turns.task is not None
    turns.task.cancel()
    with suppress(asyncio.CancelledError):
        await turns.task
    return turns.count
