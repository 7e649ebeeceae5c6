"""Layers: what acks wait for is in memory, and checkpoints are written below it in the background.

When every copy above is lost, a shard is restored from the newest complete checkpoint. The
coordinator decides that: a server cannot know who else has the state.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from dps.core.ranges import shown
from dps.core.shard import ShardState
from dps.errors import require
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import CutPersistence, Durability, Feature, Persistence, ServerContext
from dps.recovery.shared_store import SharedStore

if TYPE_CHECKING:
    from dps.recovery.background_checkpoints import BackgroundCheckpoints


@message
@dataclass(frozen=True, slots=True)
class Layered(Durability):
    """Shard state lives as `above` says, and checkpoints of it are written in the background.

    As long as one copy above lives, nothing acked is lost, and no checkpoint is read. When all are
    lost (every replica of a chain; every state store, and the server with it), the shard is
    restored from the newest complete checkpoint: acked updates since then are lost. No ack waits
    for the layer, so `below.every` sets how often a write begins, and is no bound on the loss:
    while files are slow, or cannot be written, more is at risk.

    Parameters
    ----------
    above
        What acks wait for: a `Chain` or a `SharedStore`.
    below
        When and where checkpoints are written: asynchronous ones, of each shard by itself, every so
        many updates or seconds.
    """

    above: Chain | SharedStore
    below: Checkpoint = field(default_factory=Checkpoint)
    has_layer_below: ClassVar[bool] = True
    writes_checkpoints: ClassVar[bool] = True

    def __post_init__(self) -> None:
        above, below = self.above, self.below
        require(
            isinstance(above, Chain | SharedStore),
            f"Layered: above={shown(above)}, expected Chain(...) or SharedStore(...)",
        )
        require(
            isinstance(below, Checkpoint),
            f"Layered: below={shown(below)}, expected Checkpoint(...)",
        )
        require(
            below.mode == "async",
            "Layered: below has mode='sync', expected 'async': no ack waits for a layer below",
        )
        require(
            below.scope == "shard",
            "Layered: below has scope='all', expected 'shard': only what is lost goes back",
        )
        require(
            below.every != "auto",
            "Layered: below has every='auto', expected a number of updates: that interval is "
            "chosen for checkpoints that every lost server goes back to",
        )

    @property
    def replicas(self) -> int:
        """How many replicas each shard has above."""
        return self.above.replicas

    @property
    def reads(self) -> Literal["tail", "any"]:
        """Who serves pulls above."""
        return self.above.reads

    @property
    def aggregate(self) -> int:
        """How many updates are summed into one above."""
        return self.above.aggregate

    @property
    def linger(self) -> float:
        """For how many seconds an update waits above for others to be summed with."""
        return self.above.linger

    @property
    def needs_store(self) -> bool:
        """Whether the state above is in a state store."""
        return self.above.needs_store

    @property
    def stores(self) -> int:
        """How many stores keep each state above."""
        return self.above.stores

    @property
    def path(self) -> str | None:
        """Where the checkpoints are."""
        return self.below.path

    @property
    def keep(self) -> int:
        """How many checkpoints of each shard are kept."""
        return self.below.keep

    def refusal(self, feature: Feature) -> str | None:
        """Why either layer does not go with something."""
        return self.above.refusal(feature) or self.below.refusal(feature)

    def at(self, path: str) -> Layered:
        """Return the same choice with its files below another path."""
        return replace(self, below=self.below.at(path))

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Whether the state above can be restored; the layer below is used only if it cannot."""
        return self.above.is_restorable(stored, stores)

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Whether a host has the last copy above, which is newer than any below."""
        return self.above.is_last_copy(alone, tried, restorable)

    def persistence(self, context: ServerContext) -> LayeredPersistence:
        """Return what keeps one shard's state above, and writes its checkpoints."""
        from dps.recovery.background_checkpoints import BackgroundCheckpoints

        above, below = self.above.persistence(context), BackgroundCheckpoints(self.below, context)
        return LayeredPersistence(above, below, context.from_below)


class LayeredPersistence:
    """State is kept by one durability, and written to files beside it.

    Used from one event loop.

    Parameters
    ----------
    from_below
        Whether the state is restored from the files.
    """

    immediate = False  # each commit must come here, to be noted for the layer below
    cuts: CutPersistence | None = None

    def __init__(
        self, above: Persistence, below: BackgroundCheckpoints, from_below: bool = False
    ) -> None:
        self.source = below.source if from_below else above.source
        self.window = above.window
        self._above = above
        self._below = below
        self._from_below = from_below
        self._begun = False  # whether there is a checkpoint, and of this epoch if it is restored

    @property
    def saved(self) -> int:
        """The version of the newest checkpoint that is known to be complete."""
        return self._below.saved

    def take_over(self, saved: int, version: int) -> None:
        """Go on where that of another replica is."""
        self._above.take_over(saved, version)
        self._below.take_over(saved, version)
        self._begun = True

    def enter(self, epoch: int, state: ShardState | None) -> None:
        """Go on with what is not written yet, or leave it to another replica."""
        self._above.enter(epoch, state)
        self._below.enter(epoch, state)

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Make the state durable with which a server starts.

        Before a shard is served for the first time there is a checkpoint; and before it is served
        from one, there is one of its epoch, which outranks what a replaced server may still write.
        Otherwise nothing waits for the layer below here either.
        """
        if not self._begun and (self._from_below or not await self._below.has_any()):
            await self._below.begin(epoch, state)
        else:
            self._below.note(epoch, state)
        self._begun = True
        await self._above.begin(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the state is kept above; the layer below only takes note of it."""
        await self._above.commit(epoch, state)
        self._below.note(epoch, state)
        self._begun = True

    async def save(self, epoch: int, state: ShardState) -> None:
        """Return when a checkpoint holds a state that was committed."""
        await self._below.save(epoch, state)

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the state to go on from: the one above, or the newest below."""
        if self._from_below:
            return await self._below.restore(epoch, cut)
        state = await self._above.restore(epoch, cut)
        self._begun = True
        return state

    async def close(self) -> None:
        """Do nothing more by itself."""
        await self._above.close()
        await self._below.close()
