"""Checkpoints: shard state is written to files, of each shard by itself or of all together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dps.core import ranges
from dps.core.arguments import path_field
from dps.errors import require
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message
from dps.recovery.durability import Durability, Feature, Persistence, ServerContext

CHECKPOINT_EVERY = 100

# Between these an interval is chosen that is not given.
LEAST = 10
MOST = 10_000

# Why what would change one shard alone does not go with shards that go back together.
_REFUSALS: dict[Feature, str] = {
    "buffered gradients": (
        "checkpoint with scope='all' does not go with outage=continue: gradients buffered for "
        "the lost shard would follow on its cut, but not on those of the others; use "
        "outage=wait, or scope='shard'"
    ),
    "functions": (
        "functions do not go with checkpoint's scope='all': a cut of all shards would have to "
        "hold a call on each of them or on none; use scope='shard'"
    ),
    "moves": (
        "shards cannot move under Checkpoint(scope='all'), where all of them go back together; "
        "take scope='shard', or another durability, to choose or change the number of servers"
    ),
}


@message
@dataclass(frozen=True, slots=True)
class Checkpoint(Durability):
    """Shard state is written to files; a lost shard restarts from the last complete one.

    Parameters
    ----------
    every
        The promise, in updates: no more than `every` acked updates are ever at risk. If neither
        this nor `seconds` is given, it is 100. "auto" chooses the interval again after each write,
        by what writes have cost, and how often shards were lost
        (`dps.core.checkpoint_interval`); the promise is that of `most`.
    mode
        "sync" has the acks wait for every write that is due. "async" starts a write when half of
        the interval is over and acks go on meanwhile; they wait only if the promise would be
        broken.
    path
        Any fsspec path that all server nodes can reach. None: a folder of the run's own.
    keep
        How many checkpoints of each shard to keep.
    seconds
        The promise, in time: an acked update is saved within so many seconds, by a timer if no
        other update follows. While the path cannot be written to, nothing more is acked than came
        within that time.
    scope
        What goes back when a shard is lost: "shard", that one alone, or "all" of them, to the
        newest consistent cut, in which all shards hold the same updates. The promise then counts
        from that cut.
    least, most
        With `every="auto"`, the shortest and the longest interval that is chosen, in updates.
    mtbf
        With `every="auto"`, for how long a shard goes without a failure on the average, in seconds,
        as far as it is known beforehand: it counts as much as one failure that is seen. None: it
        is not known.
    """

    every: int | Literal["auto"] | None = None
    mode: Literal["sync", "async"] = "async"
    path: str | None = None
    keep: int = 2
    seconds: float | None = None
    scope: Literal["shard", "all"] = "shard"
    least: int = LEAST
    most: int = MOST
    mtbf: float | None = None
    writes_checkpoints: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.every is None and self.seconds is None:
            object.__setattr__(self, "every", CHECKPOINT_EVERY)
        is_auto = isinstance(self.every, str) and self.every == "auto"
        if not is_auto and self.every is not None:
            ranges.count(self, "every", 1, "updates, or 'auto'")
        ranges.count(self, "least", 1, "updates")
        ranges.count(self, "most", self.least, f"updates, as least={self.least}")
        if self.mtbf is not None:
            ranges.positive(self, "mtbf")
        given = (self.least, self.most, self.mtbf) != (LEAST, MOST, None)
        require(
            is_auto or not given,
            "Checkpoint: least, most and mtbf go with every='auto' alone",
        )
        if self.seconds is not None:
            ranges.positive(self, "seconds")
        ranges.count(self, "keep", 1, "checkpoints")
        ranges.choice(self, "mode", "sync", "async")
        ranges.choice(self, "scope", "shard", "all")
        path_field(self, "path")

    @property
    def at_risk(self) -> int | None:
        """How many acked updates are ever at risk at most; None: any number."""
        return self.most if isinstance(self.every, str) else self.every

    @property
    def restores_together(self) -> bool:
        """Whether all shards go back when one is lost."""
        return self.scope == "all"

    def refusal(self, feature: Feature) -> str | None:
        """Why it does not go with what would change one shard alone, if all go back together."""
        return _REFUSALS.get(feature) if self.restores_together else None

    def at(self, path: str) -> Checkpoint:
        """Return the same choice with its files below another path."""
        return replace(self, path=path)

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Return True: there is a checkpoint before a shard is served."""
        return True

    def persistence(self, context: ServerContext) -> Persistence:
        """Return what writes one shard's checkpoints."""
        # Here, and not above: `import dps` takes half as long again with what writes files.
        from dps.recovery.checkpoint_schedule import Checkpoints
        from dps.recovery.snapshot_checkpoints import CutCheckpoints

        writer = CutCheckpoints if self.restores_together else Checkpoints
        return writer(self, context)
