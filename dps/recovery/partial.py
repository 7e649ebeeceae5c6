"""Partial checkpoints: what has changed most of a shard's state is written to files, more often."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dps.core import ranges
from dps.core.arguments import path_field
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message
from dps.recovery.checkpoint import CHECKPOINT_EVERY, Checkpoint
from dps.recovery.durability import Durability, Feature, Persistence, ServerContext

_REFUSALS: dict[Feature, str] = {
    "functions": (
        "functions do not go with partial_checkpoint: after a loss some blocks would have what a "
        "call has changed, and others not; use checkpoint, chain or shared_store"
    )
}


@message
@dataclass(frozen=True, slots=True)
class PartialCheckpoint(Durability):
    """Parts of a shard's state are written to files in turn, what has changed most the most often.

    A lost shard is put together from the newest copy of each block, or page of rows. Copies are of
    different versions, so an update that was acked may be lost to some blocks and not to others; it
    is never applied again, to any.

    Parameters
    ----------
    every
        In how many updates as much is written as the shard has.
    share
        Which part of the shard's bytes a checkpoint holds: one is written every `every * share`
        updates, and no more acked updates than that are ever at risk of being lost as a whole.
        Half of it is what differs most from its saved copy, the other half what was saved the
        longest ago, so that each block is written in 2 / share of them.
    mode
        "sync" has the acks wait for every write that is due; "async" as for `Checkpoint`.
    path
        Any fsspec path that all server nodes can reach. None: a folder of the run's own.
    keep
        How often all blocks are kept, besides what those need.
    """

    every: int = CHECKPOINT_EVERY
    share: float = 0.25
    mode: Literal["sync", "async"] = "async"
    path: str | None = None
    keep: int = 1
    writes_checkpoints: ClassVar[bool] = True
    restores_in_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.count(self, "every", 1, "updates")
        ranges.share(self, "share")
        ranges.count(self, "keep", 1, "checkpoints")
        ranges.choice(self, "mode", "sync", "async")
        path_field(self, "path")

    @property
    def at_risk(self) -> int:
        """How many acked updates are ever at risk of being lost as a whole."""
        return max(1, round(self.every * self.share))

    def refusal(self, feature: Feature) -> str | None:
        """Why it does not go with functions, whose calls take effect on all blocks or none."""
        return _REFUSALS.get(feature)

    def at(self, path: str) -> PartialCheckpoint:
        """Return the same choice with its files below another path."""
        return replace(self, path=path)

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Return True: all blocks are written before a shard is served."""
        return True

    def persistence(self, context: ServerContext) -> Persistence:
        """Return what writes one shard's partial checkpoints."""
        from dps.recovery.partial_checkpoints import PartialCheckpoints

        parts = Checkpoint(self.at_risk, self.mode, self.path, self.keep)
        return PartialCheckpoints(parts, self.share, context)
