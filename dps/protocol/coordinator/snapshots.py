"""Consistent cuts: checkpoints of all shards that hold the same updates of every worker.

The coordinator takes a cut in two steps. First every head admits no further gradients and tells how
far each worker is. Then each admits just those that another shard has already, keeps a reference to
its state, lets everything go on, and writes the state. The cut is complete when all have written.
When a shard is lost, all of them go back to the newest complete cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from dps.errors import DpsError, NotServing
from dps.events import CutTaken, RolledBack, Sink
from dps.protocol.group import Group
from dps.protocol.messages import EndCut, HoldCut, Reach, TakeCut, View
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Clock, Transport


class Snapshots:
    """The coordinator's part: it takes cuts, and knows which are complete.

    Parameters
    ----------
    views
        Returns who serves the shards.

    Attributes
    ----------
    newest
        The newest complete cut: what all shards go back to when one is lost.
    """

    def __init__(
        self,
        group: Group,
        transport: Transport,
        clock: Clock,
        emit: Sink,
        views: Callable[[], list[View]],
        tasks: Tasks,
    ) -> None:
        self._keep = group.recovery.durability.keep
        self._timings = group.timings
        self._shortest = min(group.timings.lease, group.timings.call)
        self._patience = self._shortest
        self._transport = transport
        self._clock = clock
        self._emit = emit
        self._views = views
        self._complete = [0]  # the first states of all shards are one
        self._last = 0
        self._versions: dict[int, int] = {}  # what a cut is to hold, by shard
        self._wanted = asyncio.Event()
        tasks.keep(self._take_forever, group.timings.retry)

    @property
    def newest(self) -> int:
        """The number of the newest cut that is complete."""
        return self._complete[-1]

    def want(self, shard: int, version: int) -> None:
        """Take a cut soon that holds this version of a shard; one will do for several shards."""
        self._versions[shard] = version
        self._wanted.set()

    def refuse(self, cut: int) -> bool:
        """Do without a cut that is damaged; return whether there is one before it."""
        before = [other for other in self._complete if other < cut]
        if before:
            self._complete = before
        return bool(before)

    def roll_back(self, shard: int) -> None:
        """Record that all shards go back, because this one was lost."""
        self._versions = {}
        self._emit(RolledBack(self._clock.now(), shard, self.newest))

    async def _take_forever(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._take()
                self._patience = self._shortest
            except (DpsError, TimeoutError):
                # The shards may be too busy to hold in so short a time.
                self._patience = min(2 * self._patience, self._timings.copy)
                await asyncio.sleep(self._timings.retry)
                self._wanted.set()

    async def _take(self) -> None:
        views, before = self._views(), self.newest
        if not all(view.serving for view in views):
            raise NotServing("a cut needs all shards")
        self._last += 1
        cut, began = self._last, self._clock.monotonic()
        complete = False
        try:
            held = await self._ask_all(
                lambda v: HoldCut(v.shard, v.epoch, cut, self._patience), views, self._patience / 2
            )
            upto = _furthest(reply.reach for reply in held)
            taken = await self._ask_all(
                lambda v: TakeCut(v.shard, v.epoch, cut, upto), views, self._timings.copy
            )
            complete = self._views() == views and self.newest == before
            self._satisfy({v.shard: t.version for v, t in zip(views, taken, strict=True)})
        finally:
            if complete:
                self._complete = [*self._complete, cut][-self._keep :]
                took = self._clock.monotonic() - began
                self._emit(CutTaken(self._clock.now(), cut, took))
            oldest = self._complete[0]
            with suppress(DpsError):
                await self._ask_all(
                    lambda v: EndCut(v.shard, v.epoch, cut, complete, oldest),
                    views,
                    self._timings.call,
                )

    def _satisfy(self, versions: Mapping[int, int]) -> None:
        """Want nothing more that these versions hold."""
        left = {s: version for s, version in self._versions.items() if version > versions[s]}
        self._versions = left
        if not left:
            self._wanted.clear()

    async def _ask_all(
        self, request: Callable[[View], Any], views: Iterable[View], deadline: float
    ) -> list[Any]:
        """Ask the head of every shard, and wait for all, whatever becomes of one."""
        calls = (self._transport.call(v.chain[0], request(v), deadline) for v in views)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies


def _furthest(reaches: Iterable[Reach]) -> Reach:
    furthest: Reach = {}
    for reach in reaches:
        for name, at in reach.items():
            furthest[name] = max(at, furthest.get(name, at))
    return furthest
