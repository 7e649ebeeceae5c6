"""The shard: the state machine that applies operations to a shard's blocks and rows.

State is one immutable value: weights, rows, optimizer state, version, dedupe table and workers'
clocks must be copied, replicated and restored together. Applying an operation yields the next
state; the old one stays valid. The epoch of a shard is no part of it: the coordinator decides that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from dps.core.blocks import Empty, ShardLayout, all_finite
from dps.core.filters.encoding import widened
from dps.core.functions import Function, carried_out, changed_buffer
from dps.core.leases import BatchRecord, as_tick, has, with_batches
from dps.core.rules.rule import UpdateRule, by_rows, factor, factor_at, is_per_array, rule_for
from dps.core.rules.wrappers import check_base, compensated
from dps.core.tables.table import Level, SparseTable, are_sorted, check_fit, table_of
from dps.core.updates import Batch, Operation, UpdateId
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch

CHUNK_BYTES = 1 << 20

# Calls a function with each item. Items do not depend on one another, so any order will do.
Each = Callable[[Callable[[Any], object], Sequence[Any]], None]
# Returns the factor on the learning rate of a rule in one step.
Scale = Callable[[UpdateRule], float]


def in_turn(work: Callable[[Any], object], items: Sequence[Any]) -> None:
    """Call a function with one item after the other."""
    for item in items:
        work(item)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one worker is on a shard."""

    incarnation: int
    seq: int  # of its last applied update: older ones are duplicates
    clock: int  # its position against the other workers
    applied: int  # number of its updates in the state
    active: bool  # whether consistency gates count it


@dataclass(frozen=True, slots=True)
class ShardState:
    """Everything a shard is, at one moment. Immutable: arrays in it must not be written to."""

    index: int  # number of applied operations, joins and leaves included; orders the chain
    version: int  # number of applied updates
    steps: int  # number of steps of the rule: fewer than updates after a summed replay
    values: np.ndarray  # uint8 buffer of the shard's blocks (see `ShardLayout`)
    slots: dict[str, np.ndarray]  # optimizer state, each a buffer like `values`
    # The dedupe table and the clocks. Callers of functions are in it too, never active.
    workers: dict[str, Progress] = field(default_factory=dict)
    # Those rows of sparse tables that were pushed to, with their optimizer state.
    tables: dict[str, SparseTable] = field(default_factory=dict)
    # The packed result of the last call of each caller that has not left.
    results: dict[str, np.ndarray] = field(default_factory=dict)
    batches: BatchRecord = field(default_factory=dict)  # of leased data, that were applied

    @property
    def nbytes(self) -> int:
        """Size of all arrays and tables in bytes, without the dedupe table."""
        arrays = (self.values, *self.slots.values(), *self.results.values())
        dense = sum(array.nbytes for array in arrays)
        return dense + sum(table.nbytes for table in self.tables.values())

    @property
    def clocks(self) -> dict[str, int]:
        """Clock of each active worker."""
        return {name: p.clock for name, p in self.workers.items() if p.active}

    @property
    def entry_clock(self) -> int:
        """The clock at which a newcomer begins: the slowest, or the fastest of those that left."""
        # It never goes back. So a shard that was restored to an earlier state, where current
        # workers enter again, takes none to be further than it is; others would not wait for it.
        clocks, left = self.clocks.values(), (p.clock for p in self.workers.values())
        return min(clocks) if clocks else max(left, default=0)


class AppliedUpdate(NamedTuple):
    """One update that was applied: its version and how stale its gradient was."""

    id: UpdateId
    version: int
    staleness: int
    based_at: float
    replayed: bool


class Step(NamedTuple):
    """The result of applying one operation."""

    outcome: Literal["applied", "duplicate"]
    state: ShardState
    operation: Operation  # that the next replica applies: a call comes with its result
    updates: tuple[AppliedUpdate, ...] = ()


def initial_state(values: np.ndarray, rule: UpdateRule) -> ShardState:
    """Return version 0 of a shard with these values and zero optimizer state."""
    return ShardState(0, 0, 0, values, {name: np.zeros_like(values) for name in rule.slots})


def is_duplicate(state: ShardState, update: UpdateId) -> bool:
    """Whether the state already contains the update, or a later one of its worker."""
    # Updates of one worker reach a shard in order, one at a time, so the last number is enough.
    known = state.workers.get(update.worker)
    return known is not None and (update.incarnation, update.seq) <= (known.incarnation, known.seq)


def is_evicted(state: ShardState, update: UpdateId) -> bool:
    """Whether the worker, in the incarnation of this update, was evicted or has left."""
    known = state.workers.get(update.worker)
    if known is None or known.active or known.incarnation != update.incarnation:
        return False
    # A resent update that was applied must not be taken for lost. A read has the number 0.
    return not 0 < update.seq <= known.seq


def is_superseded(state: ShardState, update: UpdateId) -> bool:
    """Whether the worker has entered again since, or left in a later incarnation."""
    known = state.workers.get(update.worker)
    return known is not None and known.incarnation > update.incarnation


def result_of(state: ShardState, op: Operation) -> np.ndarray | None:
    """Return the packed result of a call; None if it is no call, or its caller made a later one."""
    known = state.workers.get(op.id.worker)
    if op.kind != "apply" or known is None:
        return None
    is_last = (known.incarnation, known.seq) == (op.id.incarnation, op.id.seq)
    return state.results.get(op.id.worker) if is_last else None


def _progress(
    workers: Mapping[str, Progress], update: UpdateId, clock: int, applied: int
) -> Progress:
    known = workers.get(update.worker)
    active = known.active if known and known.incarnation == update.incarnation else True
    total = applied + (known.applied if known else 0)
    return Progress(update.incarnation, update.seq, clock, total, active)


@dataclass(frozen=True, slots=True)
class StateMachine:
    """Applies operations to the states of one shard. Thread-safe."""

    layout: ShardLayout
    rule: UpdateRule
    functions: Mapping[str, Function] = field(default_factory=dict)
    each: Each = in_turn  # runs the chunks of a step
    empty: Empty = np.empty  # allocates the buffer of the weights after a step

    def apply(self, state: ShardState, op: Operation) -> Step:
        """Return the state after `op`, or refuse it; a duplicate leaves the state as it is."""
        if op.kind == "leave":
            return _left(state, op)
        if op.kind == "join" and op.id.incarnation == 0:
            return _held(state, op)
        if is_duplicate(state, op.id):
            return Step("duplicate", state, op)
        if op.kind == "apply":
            return self._called(state, op)
        if op.batch is not None and has(state.batches, op.batch):
            op = as_tick(op)  # another worker, or another incarnation, has computed it before
        if op.kind not in ("join", "tick"):
            return self._stepped(state, compensated(self.layout, self.rule, state.values, op))
        # A join has no number, unless it reports a clock that the shard may have lost.
        clock = op.id.seq if op.kind == "tick" else op.id.seq or state.entry_clock
        workers = {**state.workers, op.id.worker: _progress(state.workers, op.id, clock, 0)}
        batches = _with(state, [op.batch])
        after = replace(state, index=state.index + 1, workers=workers, batches=batches)
        return Step("applied", after, op)

    def written_bytes(self, state: ShardState, op: Operation) -> int:
        """Estimate the bytes that a step with the operation writes, and so how long it may take."""
        dense = 0 if op.gradient is None else op.gradient.nbytes
        total = self.layout.nbytes if op.codec else dense
        for rows in op.rows:
            copied = table_of(state.tables, rows.table).copied(len(rows.keys))
            total += copied * self.layout.table(rows.table).row_nbytes
        return total

    def _called(self, state: ShardState, op: Operation) -> Step:
        """Run a function, unless its result is known; it is an update if it changed any values."""
        assert op.call is not None
        call, caller = op.call, op.id.worker
        if call.result is None:
            call = carried_out(self.functions, self.layout, state.values, call)
        assert call.result is not None
        changed = int(call.values is not None)
        progress = replace(_progress(state.workers, op.id, 0, changed), active=False)
        after = replace(
            state,
            index=state.index + 1,
            version=state.version + changed,
            values=changed_buffer(self.layout, state.values, call),
            workers={**state.workers, caller: progress},
            results={**state.results, caller: call.result},
        )
        update = AppliedUpdate(op.id, after.version, 0, 0.0, replayed=False)
        return Step("applied", after, op._replace(call=call), (update,) * changed)

    def _stepped(self, state: ShardState, op: Operation) -> Step:
        merged = ((op.id, op.based_on, op.based_at, op.batch), *op.merged)
        # The mean of what they missed. They miss none of each other: they enter in the same step.
        staleness = sum(max(0, state.version - base) for _, base, *_ in merged) / len(merged)

        def scale_of(own: UpdateRule) -> float:
            return op.scale * factor(own, staleness) * factor_at(own, state.version)

        values, slots = self._stepped_arrays(state, op, scale_of)
        tables = self._stepped_tables(state, op, scale_of) if op.rows else state.tables
        updates: list[AppliedUpdate] = []
        version, workers = state.version, dict(state.workers)
        for update, based_on, based_at, _ in merged:
            # Weights from before a rollback may have a higher version than the shard has now.
            missed = max(0, version - based_on)
            version += 1
            workers[update.worker] = _progress(workers, update, update.seq, applied=1)
            updates.append(AppliedUpdate(update, version, missed, based_at, op.replayed))
        counts = state.index + 1, version, state.steps + 1
        batches = _with(state, [batch for *_, batch in merged])
        after = ShardState(*counts, values, slots, workers, tables, state.results, batches)
        return Step("applied", after, op, tuple(updates))

    def _stepped_arrays(
        self, state: ShardState, op: Operation, scale_of: Scale
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Run the rule over what the gradient covers and copy the rest; return new buffers."""
        if op.gradient is None and op.rows:
            return state.values, state.slots
        chunks = list(_chunks(self.layout, op, self.rule))
        values = self.empty(state.values.shape, state.values.dtype.str)
        slots = {name: np.empty_like(slot) for name, slot in state.slots.items()}

        def step(chunk: _Chunk) -> None:
            assert chunk.rule is not None
            t, scale = state.steps + 1, scale_of(chunk.rule)
            old = {name: chunk.of(slot) for name, slot in state.slots.items()}
            # A chunk stays in the processor's cache from the check on. If it is not finite, nothing
            # refers to the new buffers yet, so nothing was applied. A diverging run shows in its
            # results. The setting is each thread's own.
            with np.errstate(over="ignore", invalid="ignore"):
                gradient = _checked(self.layout, op, chunk)
                _, new = chunk.rule.step(
                    chunk.of(state.values), gradient, old, t, scale, chunk.of(values)
                )
            for name, slot in slots.items():  # some may belong to the rules of other arrays
                chunk.of(slot)[:] = new.get(name, old[name])

        def copy(gap: slice) -> None:
            values[gap] = state.values[gap]
            for name, slot in state.slots.items():
                slots[name][gap] = slot[gap]

        self.each(step, chunks)
        if sum(chunk.end - chunk.begin for chunk in chunks) < self.layout.nbytes:
            self.each(copy, list(_gaps(self.layout, chunks)))
        values.flags.writeable = False  # receivers may share this very memory
        return values, slots

    def _stepped_tables(
        self, state: ShardState, op: Operation, scale_of: Scale
    ) -> dict[str, SparseTable]:
        """Return the tables after a step; rows that are not pushed stay, under any rule."""
        _check_rows(self.layout, op)
        after = dict(state.tables)
        for rows in op.rows:
            if not len(rows.keys):
                continue
            table, spec = table_of(state.tables, rows.table), self.layout.table(rows.table)
            rule, full = rule_for(self.rule, rows.table), rows.gradient.shape
            shape = full if by_rows(rule) else (-1,)
            present = table.rows(spec, rows.keys, rule.slots)
            values, gradient = present.values.reshape(shape), rows.gradient.reshape(shape)
            old = {name: slot.reshape(shape) for name, slot in present.slots.items()}
            t, scale = state.steps + 1, scale_of(rule)
            with np.errstate(over="ignore", invalid="ignore"):  # as for arrays
                values, slots = rule.step(values, gradient, old, t, scale)
            slots = {name: slot.reshape(full) for name, slot in slots.items()}
            # The keys may be a view of a whole message, which a table must not keep alive.
            level = Level(rows.keys.copy(), values.reshape(full), slots)
            after[rows.table] = table.written(level)
        return after


def _with(state: ShardState, batches: Sequence[Batch | None]) -> BatchRecord:
    new = [batch for batch in batches if batch is not None]
    return with_batches(state.batches, new) if new else state.batches


def _left(state: ShardState, op: Operation) -> Step:
    known = state.workers.get(op.id.worker)
    if known is None or known.incarnation < op.id.incarnation:
        # The join may still be on its way; it will be too late, and gates ignore the worker.
        clock, applied = (known.clock, known.applied) if known else (0, 0)
        gone = Progress(op.id.incarnation, 0, clock, applied, active=False)
    elif known.incarnation == op.id.incarnation and (known.active or op.id.worker in state.results):
        gone = replace(known, active=False)
    else:
        return Step("duplicate", state, op)
    workers = {**state.workers, op.id.worker: gone}
    results = {caller: kept for caller, kept in state.results.items() if caller != op.id.worker}
    after = replace(state, index=state.index + 1, workers=workers, results=results)
    return Step("applied", after, op)


def _held(state: ShardState, op: Operation) -> Step:
    """Keep a place at the entry clock for an unknown or inactive worker; gates wait for it."""
    known = state.workers.get(op.id.worker)
    # A copy of the message may arrive after the worker has joined and left.
    if known is not None and (known.active or known.incarnation >= op.id.seq):
        return Step("duplicate", state, op)
    place = replace(known or Progress(0, 0, 0, 0, True), clock=state.entry_clock, active=True)
    workers = {**state.workers, op.id.worker: place}
    return Step("applied", replace(state, index=state.index + 1, workers=workers), op)


def check_gradient(layout: ShardLayout, op: Operation, each: Each = in_turn) -> None:
    """Refuse a gradient of the wrong size, or with NaN or infinity in it, naming the array."""
    check_base(op)
    each(partial(_checked, layout, op), list(_chunks(layout, op)))
    _check_rows(layout, op)


def _check_rows(layout: ShardLayout, op: Operation) -> None:
    for rows in op.rows:
        spec = layout.table(rows.table)
        try:
            check_fit(spec, rows.keys, rows.gradient)
        except ShapeMismatch as error:
            raise ShapeMismatch(f"update {op.id}: {error}") from None
        if rows.keys.dtype != np.int64 or not are_sorted(rows.keys):
            raise ShapeMismatch(f"update {op.id}: keys of table {spec.name!r} are not in order")
        if not all_finite(rows.gradient):
            raise NonFiniteGradient(
                f"update {op.id}: the rows for table {spec.name!r} hold NaN or infinity; "
                "nothing of this update was applied"
            )


class _Chunk(NamedTuple):
    """Bytes `begin` to `end` of a shard's buffer, of one dtype, and the gradient for them."""

    begin: int
    end: int
    dtype: str
    row: int  # number of elements of one of its rows; 0: it is no matrix
    part: np.ndarray  # of the gradient, as it is in the operation
    rule: UpdateRule | None

    def of(self, buffer: np.ndarray) -> np.ndarray:
        return _shaped(buffer[self.begin : self.end], self.dtype, self.row)


def _shaped(part: np.ndarray, dtype: str, row: int) -> np.ndarray:
    flat = part.view(dtype)
    return flat.reshape(-1, row) if row else flat


def _checked(layout: ShardLayout, op: Operation, chunk: _Chunk) -> np.ndarray:
    """Return the gradient of a chunk, which must be finite."""
    part = widened(chunk.part) if chunk.part.dtype == np.uint16 else chunk.part
    gradient = _shaped(part, chunk.dtype, chunk.row)
    if not all_finite(gradient):
        wrong = int(np.flatnonzero(~np.isfinite(gradient))[0])
        byte = chunk.begin + wrong * gradient.itemsize
        name = next(p.block.name for p in layout.pieces if p.offset <= byte < p.end)
        raise NonFiniteGradient(
            f"update {op.id}: the gradient of {name!r} holds NaN or infinity; "
            "nothing of this update was applied"
        )
    return gradient


def _gaps(layout: ShardLayout, chunks: Sequence[_Chunk]) -> Iterator[slice]:
    bounds = [0, *sorted(edge for chunk in chunks for edge in (chunk.begin, chunk.end))]
    bounds.append(layout.nbytes)
    for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
        for at in range(begin, end, CHUNK_BYTES):
            yield slice(at, min(at + CHUNK_BYTES, end))


def _chunks(layout: ShardLayout, op: Operation, rule: UpdateRule | None = None) -> Iterator[_Chunk]:
    """Cut what the gradient covers, and the gradient, into chunks of one rule."""
    if op.gradient is None and op.rows:
        return  # a gradient of rows of tables alone
    stretches = _stretches(layout, op, rule)
    expected = sum(end - begin for begin, end, *_ in stretches)
    is_halves = op.gradient is not None and op.gradient.dtype == np.uint16
    are_wide = all(dtype == "float32" for _, _, dtype, *_ in stretches)
    covered = 4 if is_halves and are_wide else 1  # bytes of the shard for each item
    if op.gradient is None or op.codec or op.gradient.size * covered != expected:
        size = 0 if op.gradient is None else op.gradient.nbytes
        raise ShapeMismatch(f"update {op.id}: {size} bytes of gradient, expected {expected}")
    at = 0
    for first, last, dtype, row, own in stretches:
        unit = max(1, row) * np.dtype(dtype).itemsize
        most = max(1, CHUNK_BYTES // unit) * unit
        for begin in range(first, last, most):
            end = min(begin + most, last)
            part = op.gradient[at // covered : (at + end - begin) // covered]
            yield _Chunk(begin, end, dtype, row, part, own)
            at += end - begin


# First byte, end byte, dtype, elements of a row if the rule needs whole ones (otherwise 0), rule.
_Stretch = tuple[int, int, str, int, UpdateRule | None]


def _stretches(layout: ShardLayout, op: Operation, rule: UpdateRule | None) -> list[_Stretch]:
    if not op.pieces and (rule is None or not (is_per_array(rule) or by_rows(rule))):
        return [(*run, 0, rule) for run in layout.runs]
    chosen = [layout.pieces[i] for i in op.pieces] if op.pieces else layout.pieces
    names = {piece.block.name for piece in chosen}
    rules = {name: None if rule is None else rule_for(rule, name) for name in names}
    stretches: list[_Stretch] = []
    for piece in chosen:
        begin, dtype, own = piece.offset, piece.block.dtype, rules[piece.block.name]
        whole_rows = own is not None and by_rows(own)
        row = piece.block.row if whole_rows else 0
        if whole_rows and not row:
            raise ConfigurationError(
                f"the update rule needs whole rows, but blocks of {piece.block.name!r} may split "
                "them; create the layout with whole_rows=True"
            )
        if stretches and not row and stretches[-1][1:] == (begin, dtype, 0, own):
            begin = stretches.pop()[0]  # one stretch for a rule that treats elements on their own
        stretches.append((begin, piece.end, dtype, row, own))
    return stretches
