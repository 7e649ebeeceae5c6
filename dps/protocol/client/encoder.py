"""From a worker's gradients to one operation for each shard: checked, clipped, cut, filtered.

All but filtering runs in the thread of the training function, as it reads all of the gradients.
Each gradient passes the filters once: a retry sends the same operation.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from dps.core.blocks import Arrays, Empty, Gathered, Layout, Named
from dps.core.filters.chain import Counts, FilterChain, Outbox, Prepared
from dps.core.filters.encoding import stretches
from dps.core.rules.rule import UpdateRule, needs_base, within
from dps.core.rules.wrappers import Clipped, frozen
from dps.core.tables.key_routing import Gradients, check_rows, dealt
from dps.core.tables.table import Rows
from dps.core.updates import Operation
from dps.errors import ConfigurationError
from dps.protocol.client.read_point import ReadPoint
from dps.protocol.compression import packed
from dps.protocol.executor import INLINE_BYTES, offload
from dps.protocol.group import Group

PASSES = 8  # how often filters read a gradient, for the estimate of how long they take
NO_ROWS: Gradients = MappingProxyType({})


class OnDevice(Named):
    """The gradients of arrays as tensors on a device, where they are clipped and cut."""

    @abstractmethod
    def parts(self, names: Sequence[str], clipping: Clipped | None) -> Mapping[int, Gathered]:
        """Return the part of each shard, as its outbox takes it, and the indices of its pieces."""


# Makes the outbox of a shard, which takes over the residuals of the present one, if there is one.
MakeOutbox = Callable[[Layout, int, Mapping[str, FilterChain], Empty, Outbox | None], Outbox]


class Parts(NamedTuple):
    """One update, cut by shard: of arrays' gradients, and of rows, one entry per table."""

    dense: Mapping[int, Gathered]
    rows: Mapping[int, tuple[Rows, ...]]

    @property
    def nbytes(self) -> int:
        """Size of both."""
        of_rows = sum(each.nbytes for tables in self.rows.values() for each in tables)
        return of_rows + sum(buffer.nbytes for buffer, _ in self.dense.values())


def split(
    layout: Layout,
    rule: UpdateRule,
    gradients: Arrays,
    rows: Gradients = NO_ROWS,
    *,
    values: bool = True,
    empty: Empty = np.empty,
) -> Parts:
    """Check an update, clip it as the rule defines, and cut it by shard. Thread-safe.

    Arrays and tables that the rule does not train are left out. The parts are read-only, so that
    they can be sent without a copy; `empty` allocates those that are no views of a gradient.

    Raises `ShapeMismatch` if the gradients do not fit, and `NonFiniteGradient` if they hold NaN or
    infinity, which is looked for if `values`.
    """
    if still := frozen(rule, [*gradients, *rows]):
        layout.check(gradients, values=False)
        check_rows(layout, {name: each for name, each in rows.items() if name in still})
        gradients = {name: array for name, array in gradients.items() if name not in still}
        rows = {name: each for name, each in rows.items() if name not in still}
    layout.check(gradients, values)
    dense = {shard: layout.gather(shard, gradients, empty) for shard in layout.shards_of(gradients)}
    parts = Parts(dense, dealt(layout, rows, values))
    clipping = within(rule, Clipped)
    if clipping is not None:
        parts = _clipped(layout, parts, clipping, empty)
    for buffer, _ in parts.dense.values():
        buffer.flags.writeable = False
    return parts


class Encoder:
    """Makes a client's operations. Not thread-safe, except for `split`."""

    def __init__(self, group: Group, empty: Empty) -> None:
        self._layout = group.layout
        self._rule = group.rule
        self._needs_base = needs_base(group.rule)
        self._empty = empty
        self._chains = group.filters
        shards = range(len(group.layout.shards)) if group.filters else ()
        self._outboxes = [Outbox(group.layout, shard, group.filters, empty) for shard in shards]

    @property
    def filters(self) -> bool:
        """Whether gradients of arrays pass filters."""
        return bool(self._outboxes)

    def filter_by(self, make: MakeOutbox) -> None:
        """Filter gradients of arrays by other outboxes from now on."""
        layout, chains = self._layout, self._chains
        old: list[Any] = self._outboxes or [None] * len(layout.shards)
        self._outboxes = [make(layout, s, chains, self._empty, own) for s, own in enumerate(old)]

    def split(self, gradients: Arrays, rows: Gradients = NO_ROWS) -> Parts:
        """Check, clip and cut an update (see the function `split`). Thread-safe.

        Gradients on a device are checked when they are filtered. They are clipped there, so rows
        beside them must not be clipped: raises `ConfigurationError`.
        """
        if isinstance(gradients, OnDevice):
            clipping = within(self._rule, Clipped)
            if rows and clipping is not None:
                raise ConfigurationError(
                    "Clipped cannot clip rows of tables together with gradients on a CUDA device; "
                    "expected a rule without it, with torch.nn.utils.clip_grad_norm_ before step()"
                )
            still = frozen(self._rule, gradients)
            names = [name for name in gradients if name not in still]
            beside = split(self._layout, self._rule, {}, rows).rows
            return Parts(gradients.parts(names, clipping), beside)
        # If a shard refused an update, another might have applied it. One shard checks for itself.
        values = len(self._layout.shards) > 1 or bool(self._outboxes)
        return split(self._layout, self._rule, gradients, rows, values=values, empty=self._empty)

    async def operations(
        self, operation: Operation, parts: Parts, point: ReadPoint
    ) -> dict[int, Operation]:
        """Filter an update, computed from `point`; return its operation for each shard it changes.

        No other method may be called until this returns. If it is cancelled, or raises
        `NonFiniteGradient` because a gradient with what was withheld before is too large, nothing
        is changed.
        """
        if not self._outboxes:
            return self.plain_operations(operation, parts, point)
        dense = {shard: _plain(operation, part) for shard, part in parts.dense.items()}
        cost = PASSES * sum(op.nbytes for op in dense.values())
        if self._waits:
            cost = max(cost, INLINE_BYTES)
            if len(dense) > 1:  # one thread waits, not one for each shard
                await offload(partial(self._until_ready, dense), cost)
        work = [self._prepared(shard, op, point, cost) for shard, op in dense.items()]
        dense = self._committed(dict(zip(dense, await asyncio.gather(*work), strict=True)))
        return self._based(_with_rows(dense, parts, operation), point)

    def plain_operations(
        self, operation: Operation, parts: Parts, point: ReadPoint
    ) -> dict[int, Operation]:
        """Return the operations of an update that passes no filters."""
        dense = {shard: _plain(operation, part) for shard, part in parts.dense.items()}
        return self._based(_with_rows(dense, parts, operation), point)

    async def remainders(self, operation: Operation, point: ReadPoint) -> dict[int, Operation]:
        """Return all that is withheld as one more update; as `operations`."""
        nbytes = sum(outbox.nbytes for outbox in self._outboxes)

        def work() -> dict[int, Prepared]:
            left = {s: outbox for s, outbox in enumerate(self._outboxes) if outbox.withheld()}
            return {shard: _packed(outbox.remainder(operation)) for shard, outbox in left.items()}

        cost = INLINE_BYTES if self._waits else PASSES * nbytes
        return self._based(self._committed(await offload(work, cost)), point)

    def state(self, saved_bytes: int) -> dict[str, Any]:
        """Return the figures of `dps.events.Filtered`; key caching has saved this many bytes."""
        counts = sum((outbox.counts for outbox in self._outboxes), Counts(sent_bytes=-saved_bytes))
        norms = (outbox.residual_norm for outbox in self._outboxes)
        return {**asdict(counts), "residual_norm": math.hypot(*norms)}

    def _based(self, operations: Mapping[int, Operation], point: ReadPoint) -> dict[int, Operation]:
        """Note what gradients were computed from: more may be read before they are sent."""
        based = {}
        for shard, op in operations.items():
            read, base = point.shards[shard], None
            on, at = read.seen or (op.based_on, op.based_at)
            if read.weights is not None and op.gradient is not None and self._needs_base:
                base = self._layout.shards[shard].taken(read.weights.values, op.pieces)
            based[shard] = op._replace(based_on=on, based_at=at, base=base)
        return based

    async def _prepared(
        self, shard: int, operation: Operation, point: ReadPoint, cost: int
    ) -> Prepared:
        """Filter a gradient for one shard, in a thread if the update is large; change nothing."""
        base = point.shards[shard].weights
        work = partial(self._outboxes[shard].prepared, operation, base.values if base else None)
        return await offload(lambda: _packed(work()), cost)

    @property
    def _waits(self) -> bool:
        return any(outbox.waits for outbox in self._outboxes)

    def _until_ready(self, operations: Mapping[int, Operation]) -> None:
        for shard, op in operations.items():
            self._outboxes[shard].until_ready(op)

    def _committed(self, prepared: Mapping[int, Prepared]) -> dict[int, Operation]:
        for shard, one in prepared.items():
            self._outboxes[shard].commit(one)
        return {shard: one.operation for shard, one in prepared.items()}


def _plain(operation: Operation, part: Gathered) -> Operation:
    gradient, pieces = part
    return operation._replace(gradient=gradient, pieces=pieces)


def _with_rows(
    dense: Mapping[int, Operation], parts: Parts, operation: Operation
) -> dict[int, Operation]:
    made = dict.fromkeys(parts.rows, operation) | dict(dense)
    return made | {shard: made[shard]._replace(rows=rows) for shard, rows in parts.rows.items()}


def _packed(prepared: Prepared) -> Prepared:
    return replace(prepared, operation=packed(prepared.operation, prepared.lossless))


def _clipped(layout: Layout, parts: Parts, clipping: Clipped, empty: Empty) -> Parts:
    """Clip an update as a whole, into new memory; return `parts` if nothing is clipped."""
    before = _arrays(layout, parts)
    copy = cache(partial(_like, parts, empty))
    after = clipping.clipped(before, lambda: _arrays(layout, copy()))
    return parts if after is before else copy()


def _arrays(layout: Layout, parts: Parts) -> list[np.ndarray]:
    dense = [
        stretch.view(buffer)
        for shard, (buffer, pieces) in parts.dense.items()
        for stretch in stretches(layout.shards[shard], pieces)
    ]
    return [*dense, *(rows.gradient for tables in parts.rows.values() for rows in tables)]


def _like(parts: Parts, empty: Empty) -> Parts:
    dense = {s: (empty(buffer.shape, "uint8"), at) for s, (buffer, at) in parts.dense.items()}
    rows = {
        s: tuple(replace(each, gradient=np.empty_like(each.gradient)) for each in tables)
        for s, tables in parts.rows.items()
    }
    return Parts(dense, rows)
