"""The encoder of a client's gradients: what goes to its shard clients, filtered or as it is.

A gradient is filtered exactly once, in the order in which gradients are pushed, and carries what it
was computed from. Whatever is sent again later is the operation that came out of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dps.core.blocks import Gathered
from dps.core.filters.outbox import Counts, Outbox, Prepared
from dps.core.rules.rule import needs_base
from dps.core.updates import Operation
from dps.protocol.client.read_point import ReadPoint, ShardRead
from dps.protocol.compression import packed
from dps.protocol.group import Group


@dataclass(frozen=True, slots=True)
class FilterState:
    """What a client's filters have done so far, and the norm of what they withhold now."""

    counts: Counts
    residual_norm: float


def basis(group: Group, read: ShardRead, shard: int) -> Callable[[Operation], Operation]:
    """Return what notes on a gradient from which weights it was computed.

    The gradient may be sent after more was read, and again after that.
    """
    seen, base, layout = read.seen, read.weights, group.layout.shards[shard]

    def noted(op: Operation) -> Operation:
        if seen is not None:
            op = replace(op, based_on=seen[0], based_at=seen[1])
        if base is None or op.gradient is None or not needs_base(group.rule):
            return op
        return replace(op, base=layout.taken(base.values, op.pieces))

    return noted


class Encoder:
    """Makes a client's operations, one for each shard that a gradient touches. Not thread-safe."""

    def __init__(self, group: Group) -> None:
        self._layout = group.layout
        shards = range(len(group.layout.shards)) if group.filters else ()
        self._outboxes = [Outbox(group.layout, shard, group.filters) for shard in shards]

    @property
    def filters(self) -> bool:
        """Whether any array has filters."""
        return bool(self._outboxes)

    def operations(
        self,
        operation: Operation,
        gathered: Callable[[int], Gathered],
        shards: Sequence[int],
        point: ReadPoint,
    ) -> Callable[[int], Operation]:
        """Return what makes the operation for each of the shards; any number of times the same.

        `gathered` returns a shard's part of the gradients, which were computed from what was read
        by `point`.

        Raises
        ------
        NonFiniteGradient
            Gradients and what was withheld before are too large together; nothing has changed.
        """

        def plain(shard: int) -> Operation:
            gradient, pieces = gathered(shard)
            return replace(operation, gradient=gradient, pieces=pieces)

        if not self.filters:
            return plain
        bases = {s: point.shards[s].weights for s in shards}
        prepared = {
            s: self._outboxes[s].prepared(plain(s), base.values if base is not None else None)
            for s, base in bases.items()
        }
        return {shard: self._committed(shard, p) for shard, p in prepared.items()}.__getitem__

    def remainders(self, operation: Operation) -> dict[int, Operation]:
        """Return all that is withheld as one more update, for the shards that it touches."""
        left = [shard for shard, outbox in enumerate(self._outboxes) if outbox.withheld()]
        return {s: self._committed(s, self._outboxes[s].remainder(operation)) for s in left}

    def withheld(self, shard: int) -> dict[str, np.ndarray]:
        """What is withheld from a shard, by array (see `Outbox.withheld`)."""
        return self._outboxes[shard].withheld() if self._outboxes else {}

    @property
    def state(self) -> FilterState:
        """What the filters have done so far."""
        counts = sum((outbox.counts for outbox in self._outboxes), Counts())
        norms = (outbox.residual_norm for outbox in self._outboxes)
        return FilterState(counts, math.hypot(*norms))

    def _committed(self, shard: int, prepared: Prepared) -> Operation:
        op = packed(prepared.operation, prepared.lossless)
        assert op.gradient is not None
        self._outboxes[shard].commit(prepared, op.gradient.nbytes)
        return op
