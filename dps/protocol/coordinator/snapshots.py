"""Consistent cuts: checkpoints of all shards that hold the same updates of every worker.

The coordinator takes a cut in two steps. First every head stops admitting gradients and returns how
far each worker is. Then each admits only gradients that another shard has already, keeps a
reference to its state, resumes, and writes the state. The cut is complete when all have written.
When a shard is lost, all of them go back to the newest complete cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dps.errors import DpsError, NotServing
from dps.events import CutTaken, RolledBack
from dps.protocol.messages import EndCut, HoldCut, Reach, TakeCut, View, WantCut

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator


class Snapshots:
    """Takes cuts, and knows which are complete. Used from one event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._clock = coordinator.clock
        self._timings = coordinator.group.timings
        self._keep = coordinator.group.recovery.durability.keep
        self._shortest = min(self._timings.lease, self._timings.call)
        self._patience = self._shortest
        self._complete = [0]  # the initial states of all shards are a cut
        self._last = 0
        self._versions: dict[int, int] = {}  # which the next cut has to hold, by shard
        self._wanted = asyncio.Event()
        coordinator.tasks.keep(self._take_forever, self._timings.retry)

    @property
    def newest(self) -> int:
        """The number of the newest complete cut, to which all shards return if one is lost."""
        return self._complete[-1]

    def want(self, m: WantCut) -> None:
        """Take a cut soon that holds a version of a shard; one cut may serve several shards."""
        self._versions[m.shard] = m.version
        self._wanted.set()

    def refuse(self, shard: int, cut: int) -> None:
        """Make all shards go back to the cut before this one, which is damaged."""
        before = [other for other in self._complete if other < cut]
        if before and cut == self.newest:
            self._complete = before
            self.roll_back(shard)

    def roll_back(self, shard: int) -> None:
        """Make all shards go back to the newest cut, because `shard` was lost."""
        self._versions = {}
        self._coordinator.emit(RolledBack(self._clock.now(), shard, self.newest))
        for controller in self._coordinator.controllers:
            if controller.begun:
                controller.forsake()

    async def _take_forever(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._take()
                self._patience = self._shortest
            except (DpsError, TimeoutError):
                # The shards may be too busy to hold within this time.
                self._patience = min(2 * self._patience, self._timings.copy)
                await asyncio.sleep(self._timings.retry)
                self._wanted.set()

    async def _take(self) -> None:
        views, before = self._coordinator.views, self.newest
        if not all(view.serving for view in views):
            raise NotServing("a cut needs all shards")
        self._last += 1
        cut, began = self._last, self._clock.monotonic()
        complete = False
        try:
            held = await self._ask_all(
                lambda v: HoldCut(v.shard, v.epoch, cut, self._patience), views, self._patience / 2
            )
            upto: Reach = {}
            for name, at in (each for reach in held for each in reach.items()):
                upto[name] = max(at, upto.get(name, at))
            taken = await self._ask_all(
                lambda v: TakeCut(v.shard, v.epoch, cut, upto), views, self._timings.copy
            )
            complete = self._coordinator.views == views and self.newest == before
            versions = {v.shard: version for v, version in zip(views, taken, strict=True)}
            self._versions = {s: v for s, v in self._versions.items() if v > versions[s]}
            if not self._versions:
                self._wanted.clear()
        finally:
            if complete:
                self._complete = [*self._complete, cut][-self._keep :]
                took = self._clock.monotonic() - began
                self._coordinator.emit(CutTaken(self._clock.now(), cut, took))
            oldest = self._complete[0]
            with suppress(DpsError):
                await self._ask_all(
                    lambda v: EndCut(v.shard, v.epoch, cut, complete, oldest),
                    views,
                    self._timings.call,
                )

    async def _ask_all(
        self, request: Callable[[View], Any], views: Iterable[View], deadline: float
    ) -> list[Any]:
        calls = (self._coordinator.transport.call(v.chain[0], request(v), deadline) for v in views)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies
