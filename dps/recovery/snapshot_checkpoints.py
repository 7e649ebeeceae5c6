"""A shard's durability in files that belong to consistent cuts (see
`dps.protocol.coordinator.snapshots`).

A checkpoint that is due is asked of the coordinator, which takes a cut of all shards. What is acked
counts as saved when that cut is complete on all of them.
"""

from __future__ import annotations

import asyncio
from functools import partial

from dps.core.shard import ShardState
from dps.errors import CheckpointCorrupt, DpsError
from dps.events import CheckpointRefused
from dps.protocol.messages import WantCut
from dps.recovery.checkpoint_schedule import Checkpoints, CheckpointSettings
from dps.recovery.durability import ServerContext

FIRST = 0  # the cut of the states with which a group starts


class CutCheckpoints(Checkpoints):
    """A shard's durability in files, when all shards go back together."""

    window = 1 << 30  # a cut may need any update that is under way, and each worker has but one
    _save_attempts = 10  # shards may be too busy for a cut, or change their servers

    def __init__(self, wanted: CheckpointSettings, context: ServerContext) -> None:
        super().__init__(wanted, context)
        self._timings = context.timings
        self._coordinator = context.coordinator
        self._transport = context.transport
        self.cuts = self
        self._begun = False
        self._taken: dict[int, tuple[int, float]] = {}
        self._ended = asyncio.Condition()

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Write the first state of the shard, once; any other one is in its cut already."""
        if self._begun:
            return
        there = await self._in_thread(self._files.found)
        if not any((found.epoch, found.cut) == (epoch, FIRST) for found in there):
            await self._write(epoch, state, FIRST)
            self._saved(state.version, self._clock.monotonic())
        self._begun = True

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the shard's state in a cut.

        Raises
        ------
        CheckpointCorrupt
            It is damaged, or not there; a cut before it must do, on all shards.
        """
        for found in await self._in_thread(self._files.found):
            if found.cut == cut:
                try:
                    state = await self._in_thread(partial(self._files.read, found))
                except CheckpointCorrupt as error:
                    now = self._clock.now()
                    refused = CheckpointRefused(now, self._shard, found.manifest, str(error))
                    self._emit(refused)
                    continue
                self._begun = True
                self._saved(state.version, self._clock.monotonic())
                return state
        raise CheckpointCorrupt(f"shard {self._shard}: there is no whole checkpoint of cut {cut}")

    async def write_cut(self, epoch: int, cut: int, state: ShardState) -> None:
        """Write the shard's state in a cut."""
        noted = self._clock.monotonic()
        try:
            await self._write(epoch, state, cut)
        except DpsError as error:
            self._failed(epoch, str(error))
            raise
        self._taken[cut] = (state.version, noted)

    async def end_cut(self, epoch: int, cut: int, oldest: int) -> None:
        """Take note that a cut is complete, and remove those that are not needed any more."""
        taken = self._taken.pop(cut, None)
        if taken is not None and taken[0] > self._complete:
            self._saved(*taken)
        self._taken = {other: at for other, at in self._taken.items() if other > cut}
        async with self._ended:
            self._ended.notify_all()
        await self._in_thread(partial(self._files.prune_cuts, epoch, oldest))

    async def _try_to_publish(self, epoch: int, state: ShardState, noted: float) -> None:
        """Have a cut taken that holds the state."""
        timings = self._timings
        try:
            request = WantCut(self._shard, epoch, state.version)
            await self._transport.call(self._coordinator, request, timings.call)
            async with asyncio.timeout(timings.hold), self._ended:
                await self._ended.wait_for(lambda: self._complete >= state.version)
        except TimeoutError:
            self._failed(epoch, "no cut could be completed in time")
        except DpsError as error:
            self._failed(epoch, str(error))
