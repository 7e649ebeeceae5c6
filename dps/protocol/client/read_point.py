"""What a client has read of the shards by some moment: what a gradient is computed from.

A worker that computes while it sends has newer weights before it has pushed what it computed from
older ones. The read point goes with these weights, so that the gradient is said to be as stale as
it is, and is dropped if another incarnation of the worker has read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dps.protocol.messages import RowsRead, Weights


@dataclass(frozen=True, slots=True)
class ShardRead:
    """What was read of one shard last.

    Attributes
    ----------
    weights
        None: none were.
    incarnation
        That of the worker as which the weights were read; None: they never were.
    number
        That of the worker's last update that was sent before the weights were read.
    seen
        Version, and time in seconds since the Unix epoch, of what was read last, weights or rows.
    """

    weights: Weights | None = None
    incarnation: int | None = None
    number: int = 0
    seen: tuple[int, float] | None = None

    def with_weights(self, incarnation: int, number: int, weights: Weights) -> ShardRead:
        """What it is after weights were read."""
        return ShardRead(weights, incarnation, number, (weights.version, weights.at))

    def with_rows(self, rows: RowsRead) -> ShardRead:
        """What it is after rows of a table were read."""
        return replace(self, seen=(rows.version, rows.at))


@dataclass(frozen=True, slots=True)
class ReadPoint:
    """What was read of each shard by some moment; opaque to who trains, and passed on with a push.

    It keeps the weights in memory that it is about. Thread-safe: it never changes.
    """

    shards: tuple[ShardRead, ...]

    @property
    def incarnations(self) -> set[int]:
        """The incarnations of the worker as which the weights were read."""
        return {read.incarnation for read in self.shards if read.incarnation is not None}

    @property
    def updates(self) -> int:
        """How many updates every shard had applied when its weights were read; 0: none were."""
        return min((0 if r.weights is None else r.weights.version for r in self.shards), default=0)

    @property
    def version(self) -> int | None:
        """The version of what was read last, weights or rows, on the mean of the shards."""
        seen = [read.seen[0] for read in self.shards if read.seen is not None]
        return round(sum(seen) / len(seen)) if seen else None

    @property
    def slack(self) -> int | None:
        """How many more gradients than one may be computed from them; None: there is no bound."""
        bounds = [read.weights.slack for read in self.shards if read.weights is not None]
        return min((bound for bound in bounds if bound >= 0), default=None)

    def lacks(self, number: int) -> int:
        """How many of the worker's updates up to this one the weights lack: they are buffered."""
        numbers = (read.number for read in self.shards if read.weights is not None)
        return max(0, number - min(numbers, default=number))

    def with_rows(self, later: ReadPoint) -> ReadPoint:
        """These weights, with rows of tables that were read since, by the time of `later`."""
        pairs = zip(self.shards, later.shards, strict=True)
        return ReadPoint(tuple(replace(mine, seen=theirs.seen) for mine, theirs in pairs))
