"""The encoder of a client's gradients: what goes to its shard clients, filtered or as it is.

A gradient is filtered exactly once, in the order in which gradients are pushed, and carries what it
was computed from. Whatever is sent again later is the operation that came out of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dps.core.blocks import Gathered
from dps.core.filters.outbox import Counts, Outbox, Prepared
from dps.core.rules.rule import needs_base
from dps.core.updates import Operation
from dps.protocol.client.read_point import ReadPoint, ShardRead
from dps.protocol.compression import packed
from dps.protocol.executor import offload
from dps.protocol.group import Group

PASSES = 8  # how often filters go through a gradient, if they do little


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
        if seen is not None and seen != (op.based_on, op.based_at):
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

    async def operations(
        self, operation: Operation, parts: Mapping[int, Gathered], point: ReadPoint
    ) -> Callable[[int], Operation]:
        """Return what makes the operation for each of the shards; any number of times the same.

        `parts` has each shard's part of the gradients, which were computed from what was read by
        `point`. Filters take long, so the event loop goes on meanwhile; nothing else may be called
        until this returns, or is cancelled, which leaves everything as it was.

        Raises
        ------
        NonFiniteGradient
            Gradients and what was withheld before are too large together; nothing has changed.
        """
        if not self.filters:
            return partial(_plain, operation, parts, point)
        work = partial(self._prepared, operation, parts, point)
        prepared = await offload(work, PASSES * sum(part.nbytes for part, _ in parts.values()))
        return self._committed(prepared).__getitem__

    async def remainders(self, operation: Operation) -> dict[int, Operation]:
        """Return all that is withheld as one more update, for the shards that it touches.

        As for `operations`, nothing else may be called meanwhile.
        """
        nbytes = sum(outbox.nbytes for outbox in self._outboxes)
        return self._committed(await offload(partial(self._left, operation), PASSES * nbytes))

    def withheld(self, shard: int) -> dict[str, np.ndarray]:
        """What is withheld from a shard, by array (see `Outbox.withheld`)."""
        return self._outboxes[shard].withheld() if self._outboxes else {}

    @property
    def state(self) -> FilterState:
        """What the filters have done so far."""
        counts = sum((outbox.counts for outbox in self._outboxes), Counts())
        norms = (outbox.residual_norm for outbox in self._outboxes)
        return FilterState(counts, math.hypot(*norms))

    def _prepared(
        self, operation: Operation, parts: Mapping[int, Gathered], point: ReadPoint
    ) -> dict[int, Prepared]:
        """Put a gradient through its filters, in any thread; nothing changes here."""
        found = {}
        for shard in parts:
            base = point.shards[shard].weights
            values = base.values if base is not None else None
            op = _plain(operation, parts, point, shard)
            found[shard] = self._outboxes[shard].prepared(op, values)
        return {shard: _packed(prepared) for shard, prepared in found.items()}

    def _left(self, operation: Operation) -> dict[int, Prepared]:
        left = {s: outbox for s, outbox in enumerate(self._outboxes) if outbox.withheld()}
        return {shard: _packed(outbox.remainder(operation)) for shard, outbox in left.items()}

    def _committed(self, prepared: Mapping[int, Prepared]) -> dict[int, Operation]:
        for shard, one in prepared.items():
            assert one.operation.gradient is not None
            self._outboxes[shard].commit(one, one.operation.gradient.nbytes)
        return {shard: one.operation for shard, one in prepared.items()}


def _plain(
    operation: Operation, parts: Mapping[int, Gathered], point: ReadPoint, shard: int
) -> Operation:
    gradient, pieces = parts[shard]
    version, at = point.shards[shard].seen or (operation.based_on, operation.based_at)
    return replace(operation, gradient=gradient, pieces=pieces, based_on=version, based_at=at)


def _packed(prepared: Prepared) -> Prepared:
    return replace(prepared, operation=packed(prepared.operation, prepared.lossless))
