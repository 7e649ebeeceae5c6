"""Layers: acks wait for memory, and checkpoints are written below it in the background.

- Written: the data of the durability above, and checkpoints, for which no ack waits. - Restored:
from above or, if every copy above is lost, from the newest complete checkpoint. The
  coordinator decides which: a server cannot know which other process has the state.
- Promised: the promise of the durability above. If all its copies are lost, acked updates since the
  newest complete checkpoint are lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from dps.core.ranges import refused
from dps.core.shard import ShardState
from dps.errors import require
from dps.protocol.wire import message
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint, CheckpointPersistence
from dps.recovery.durability import Durability, Persistence, ServerContext
from dps.recovery.shared_store import SharedStore


@message
@dataclass(frozen=True, slots=True)
class Layered(Durability):
    """Shard state lives in `above`, and checkpoints of it are written in the background.

    While a copy above lives, no acked update is lost. If all are lost (every replica of a chain, or
    every state store and the server), the shard is restored from the newest complete checkpoint,
    and acked updates since then are lost. No ack waits for the layer below: `below.every` sets how
    often a write begins, and does not bound the loss if files are slow.

    Parameters
    ----------
    above
        What acks wait for: a `Chain` or a `SharedStore`.
    below
        When and where checkpoints are written: asynchronously, for each shard separately, every N
        updates or seconds.

    Examples
    --------
    >>> Recovery(Layered(Chain(2), Checkpoint(every=1000, path="/data/runs"))).path
    '/data/runs'
    """

    # Without `field()`, the property of `Durability` would be the default.
    above: Chain | SharedStore = field()
    below: Checkpoint = field(default_factory=Checkpoint)
    has_layer_below = True
    writes_checkpoints = True

    def __post_init__(self) -> None:
        above, below = self.above, self.below
        if not isinstance(above, Chain | SharedStore):
            raise refused("Layered: above", above, "Chain(...) or SharedStore(...)")
        if not isinstance(below, Checkpoint):
            raise refused("Layered: below", below, "Checkpoint(...)")
        require(
            below.mode == "async",
            "Layered: below has mode='sync', expected 'async': no ack waits for a layer below",
        )
        require(
            below.scope == "shard",
            "Layered: below has scope='all', expected 'shard': only the lost shard is restored",
        )
        require(
            below.every != "auto",
            "Layered: below has every='auto', expected a number of updates: the choice of "
            "that interval assumes that every lost server is restored from its checkpoints",
        )

    def at(self, path: str) -> Layered:
        """Return the same choice with its files below another path."""
        return replace(self, below=self.below.at(path))

    def persistence(self, context: ServerContext) -> Persistence:
        """Return the object that keeps one shard's state above and writes its checkpoints."""
        return LayeredPersistence(self.above.persistence(context), self.below, context)


class LayeredPersistence(CheckpointPersistence):
    """Keeps one shard's state above, and writes its checkpoints, for which no ack waits."""

    _retry_seconds = 0.5

    def __init__(self, above: Persistence, below: Checkpoint, context: ServerContext) -> None:
        super().__init__(below, context)
        self._above = above
        self._from_below = context.from_below
        if not self._from_below:
            self.source = above.source
        self.window = above.window
        self._begun = False  # there is a checkpoint; after a restore from below, of this epoch
        self._writer: asyncio.Task[None] | None = None

    def take_over(self, saved: int, version: int) -> None:
        """Continue for a replica that had saved version `saved` and sent its state of `version`."""
        self._above.take_over(saved, version)
        super().take_over(saved, version)
        self._begun = True

    def enter(self, epoch: int, state: ShardState | None) -> None:
        """Continue to write unsaved updates, or leave them to another replica."""
        self._above.enter(epoch, state)
        if state is not None:
            self.note(epoch, state)
        else:
            self._forget()

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Make durable the state with which a server starts."""
        # This waits for a checkpoint before a shard is first served, and before it is served from a
        # checkpoint: the new one has the present epoch, and outranks those that a replaced server
        # may still write. Otherwise it does not wait for the layer below.
        published = self._files.published
        if not self._begun and (self._from_below or not await self._in_thread(published)):
            await super().begin(epoch, state)
        else:
            self.note(epoch, state)
        self._begun = True
        await self._above.begin(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the state is kept above; the layer below only notes it."""
        await self._above.commit(epoch, state)
        self.note(epoch, state)
        self._begun = True

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the state above or, if every copy is lost, the newest below."""
        if self._from_below:
            return await super().restore(epoch, cut)
        state = await self._above.restore(epoch, cut)
        self._begun = True
        return state

    async def close(self) -> None:
        """Stop background work of both layers."""
        await self._above.close()
        self._forget()

    def note(self, epoch: int, state: ShardState) -> None:
        """Note an acked state, and start to write it if a write is due."""
        self._note(epoch, state)
        if epoch <= self._refused:
            return
        self._start_timer()
        if self._is_due and (self._writer is None or self._writer.done()):
            self._writer = self._tasks.start(self._write_while_due())

    @property
    def _is_due(self) -> bool:
        return self._newest - self._complete >= self._due

    async def _write_while_due(self) -> None:
        while self._is_due and await self._write_latest():
            pass

    def _forget(self) -> None:
        for task in (self._timer, self._writer):
            if task is not None:
                task.cancel()
        self._timer = self._writer = self._latest = None
        self._newest = self._complete
        self._unsaved.clear()
