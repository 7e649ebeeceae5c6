"""The shard: the state machine that applies operations to a shard's blocks and rows.

State is one immutable value: weights, rows, optimizer state, version, dedupe table and workers'
clocks together, because they must be copied, replicated and restored together. Applying an
operation yields the next state; the old one stays valid for whoever holds it. The epoch in which a
shard is served is no part of it: `dps.protocol.coordinator.shard_controller` decides that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from dps.core.blocks import Piece, ShardLayout, all_finite
from dps.core.flat import Empty
from dps.core.functions import Function, carried_out, changed_buffer
from dps.core.rules.rule import UpdateRule, by_rows, factor, factor_at, is_per_array, rule_for
from dps.core.rules.wrappers import check_base, compensated
from dps.core.tables.row_gradients import Rows, are_sorted, check_fit
from dps.core.tables.spec import SparseSpec
from dps.core.tables.table import Level, SparseTable, table_of
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch

CHUNK_BYTES = 1 << 20

# Does a piece of work for each of some items, which do not depend on one another, in any order.
Each = Callable[[Callable[[Any], None], Sequence[Any]], None]


def in_turn(work: Callable[[Any], None], items: Sequence[Any]) -> None:
    """Do a piece of work for one item after the other."""
    for item in items:
        work(item)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one worker is on a shard.

    `seq` is its last applied update (older ones are duplicates), `clock` its position against the
    other workers, `applied` how many of its updates are in the state, `active` whether it takes
    part in the consistency gates.
    """

    incarnation: int
    seq: int
    clock: int
    applied: int
    active: bool


@dataclass(frozen=True, slots=True)
class ShardState:
    """Everything a shard is, at one moment. Never changed: arrays in it must not be written to.

    Attributes
    ----------
    index
        How many operations have been applied, joins and leaves included; orders the chain.
    version
        How many updates have been applied.
    steps
        How many steps the update rule has taken (fewer than updates after a summed replay).
    values
        uint8 buffer of the shard's blocks (see `ShardLayout`).
    slots
        Optimizer state, each a buffer like `values`.
    workers
        The dedupe table and the clocks. Callers of functions are in it too, never active.
    tables
        The rows of sparse tables, with their optimizer state; those that were pushed to.
    results
        The packed result of the last call of each caller that has not left.
    """

    index: int
    version: int
    steps: int
    values: np.ndarray
    slots: dict[str, np.ndarray]
    workers: dict[str, Progress] = field(default_factory=dict)
    tables: dict[str, SparseTable] = field(default_factory=dict)
    results: dict[str, np.ndarray] = field(default_factory=dict)

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
        """The clock at which a newcomer begins: the slowest, or the fastest of all who have left.

        It never goes back. So a shard that has gone back to an earlier state, where workers of now
        are entered again, takes none to be further than it is; others would not wait for it.
        """
        left = (p.clock for p in self.workers.values())
        return min(self.clocks.values()) if self.clocks else max(left, default=0)


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """One update that was applied: its version and how stale its gradient was."""

    id: UpdateId
    version: int
    staleness: int
    based_at: float
    replayed: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What applying one operation came to.

    `operation` is what a replica is to apply that follows: of a call, with what came of it.
    """

    outcome: Literal["applied", "duplicate"]
    state: ShardState
    operation: Operation
    updates: tuple[AppliedUpdate, ...] = ()


def initial_state(values: np.ndarray, rule: UpdateRule) -> ShardState:
    """Return version 0 of a shard with these values and zero optimizer state."""
    return ShardState(0, 0, 0, values, {name: np.zeros_like(values) for name in rule.slots})


def is_duplicate(state: ShardState, update: UpdateId) -> bool:
    """Whether the state already contains the update, or a later one of its worker.

    Updates of one worker reach a shard in order, one at a time, so the last number is enough.
    """
    known = state.workers.get(update.worker)
    return known is not None and (update.incarnation, update.seq) <= (known.incarnation, known.seq)


def result_of(state: ShardState, op: Operation) -> np.ndarray | None:
    """The packed result of a call; None if it is no call, or its caller has made a later one."""
    known = state.workers.get(op.id.worker)
    if op.kind != "apply" or known is None:
        return None
    is_last = (known.incarnation, known.seq) == (op.id.incarnation, op.id.seq)
    return state.results.get(op.id.worker) if is_last else None


def apply(
    layout: ShardLayout,
    rule: UpdateRule,
    state: ShardState,
    op: Operation,
    functions: Mapping[str, Function] | None = None,
    each: Each = in_turn,
    empty: Empty = np.empty,
) -> Step:
    """Return the state after `op`; a duplicate leaves it as it is.

    `each` runs the chunks of a step, which is the same bit by bit however it does that. `empty`
    makes the buffer of the weights after it.

    Raises
    ------
    NonFiniteGradient, ShapeMismatch
        The gradient was refused; the state stays as it is.
    FunctionFailed
        The function raised, or returned what it may not; the state stays as it is.
    """
    if op.kind == "leave":
        return _leave(state, op)
    if op.kind == "apply":
        return _called(layout, functions or {}, state, op)
    if is_duplicate(state, op.id):
        return Step("duplicate", state, op)
    if op.kind == "join":
        # A newcomer has no number yet; one that says again how far it is keeps its clock.
        clock = op.id.seq or state.entry_clock
        return Step("applied", _entered(state, op.id, clock), op)
    if op.kind == "tick":
        return Step("applied", _entered(state, op.id, op.id.seq), op)
    return _gradient(layout, rule, state, op, each, empty)


def check_gradient(layout: ShardLayout, op: Operation, each: Each = in_turn) -> None:
    """Refuse a gradient of the wrong size, or with NaN or infinity in it, naming the array."""
    check_base(op)
    each(partial(_check_chunk, layout, op), list(_chunks(layout, op)))
    check_rows(layout, op)


def _leave(state: ShardState, op: Operation) -> Step:
    known = state.workers.get(op.id.worker)
    if known is None or known.incarnation < op.id.incarnation:
        # Its join may still be on the way: it then comes too late, and nobody waits for the worker.
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


def _called(
    layout: ShardLayout, functions: Mapping[str, Function], state: ShardState, op: Operation
) -> Step:
    """Run a function, unless what came of it is known; it counts as an update if it changed any."""
    if is_duplicate(state, op.id):
        return Step("duplicate", state, op)
    assert op.call is not None
    call = op.call
    if call.result is None:
        call = carried_out(functions, layout, state.values, call)
    assert call.result is not None
    caller, known = op.id.worker, state.workers.get(op.id.worker)
    changed = int(call.values is not None)
    total = changed + (known.applied if known else 0)
    progress = Progress(op.id.incarnation, op.id.seq, 0, total, active=False)
    after = replace(
        state,
        index=state.index + 1,
        version=state.version + changed,
        values=changed_buffer(layout, state.values, call),
        workers={**state.workers, caller: progress},
        results={**state.results, caller: call.result},
    )
    update = AppliedUpdate(op.id, after.version, 0, 0.0, replayed=False)
    return Step("applied", after, replace(op, call=call), (update,) * changed)


def _entered(state: ShardState, update: UpdateId, clock: int) -> ShardState:
    """Record an operation of a worker that changes no weights; its clock shows `clock` then."""
    workers = {**state.workers, update.worker: _progress(state.workers, update, clock, 0)}
    return replace(state, index=state.index + 1, workers=workers)


def _progress(
    workers: Mapping[str, Progress], update: UpdateId, clock: int, applied: int
) -> Progress:
    """How far a worker is after one more operation, with which `applied` updates are applied."""
    known = workers.get(update.worker)
    active = known.active if known and known.incarnation == update.incarnation else True
    total = applied + (known.applied if known else 0)
    return Progress(update.incarnation, update.seq, clock, total, active)


def _gradient(
    layout: ShardLayout,
    rule: UpdateRule,
    state: ShardState,
    op: Operation,
    each: Each,
    empty: Empty,
) -> Step:
    op = compensated(layout, rule, state.values, op)
    staleness = _staleness(state, op)

    def scale_of(own: UpdateRule) -> float:
        return op.scale * factor(own, staleness) * factor_at(own, state.version)

    values, slots = _stepped(layout, rule, state, op, scale_of, each, empty)
    tables = stepped_tables(layout, rule, state.tables, op, state.steps + 1, scale_of)
    updates: list[AppliedUpdate] = []
    version, workers = state.version, dict(state.workers)
    for update, based_on, based_at in ((op.id, op.based_on, op.based_at), *op.merged):
        # Weights from before a rollback may have a higher version than the shard has now.
        staleness = max(0, version - based_on)
        version += 1
        workers[update.worker] = _progress(workers, update, update.seq, applied=1)
        updates.append(AppliedUpdate(update, version, staleness, based_at, op.replayed))
    after = ShardState(
        index=state.index + 1,
        version=version,
        steps=state.steps + 1,
        values=values,
        slots=slots,
        workers=workers,
        tables=tables,
        results=state.results,
    )
    return Step("applied", after, op, tuple(updates))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes `begin` to `end` of a shard's buffer, of one dtype, and the gradient for them.

    `rule` is the one of the arrays in it; `row` is how many elements its rows have, 0: it is no
    matrix of rows.
    """

    begin: int
    end: int
    dtype: str
    row: int
    gradient: np.ndarray
    rule: UpdateRule | None

    def of(self, buffer: np.ndarray) -> np.ndarray:
        """The chunk in a buffer like the shard's, typed, without a copy."""
        return _shaped(buffer[self.begin : self.end], self.dtype, self.row)


def _shaped(part: np.ndarray, dtype: str, row: int) -> np.ndarray:
    flat = part.view(dtype)
    return flat.reshape(-1, row) if row else flat


def _stepped(
    layout: ShardLayout,
    rule: UpdateRule,
    state: ShardState,
    op: Operation,
    scale_of: Callable[[UpdateRule], float],
    each: Each,
    empty: Empty,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Run the rule over what the gradient covers, copy the rest; return new buffers.

    It goes in chunks that stay in the processor's cache from the check to the last operation. One
    that is not finite ends it: the new buffers are nobody's yet, so nothing was applied.
    """
    if op.gradient is None and op.rows:
        return state.values, state.slots
    chunks = list(_chunks(layout, op, rule))
    values = empty(state.values.shape, state.values.dtype.str)
    slots = {name: np.empty_like(slot) for name, slot in state.slots.items()}

    def step(chunk: _Chunk) -> None:
        assert chunk.rule is not None
        # A diverging run shows in its results. The setting is each thread's own.
        with np.errstate(over="ignore", invalid="ignore"):
            _check_chunk(layout, op, chunk)
            _, new_slots = chunk.rule.step(
                chunk.of(state.values),
                chunk.gradient,
                {name: chunk.of(slot) for name, slot in state.slots.items()},
                state.steps + 1,
                scale_of(chunk.rule),
                out=chunk.of(values),
            )
        for name, slot in slots.items():  # some may be those of other arrays' rules
            chunk.of(slot)[:] = (
                new_slots[name] if name in new_slots else chunk.of(state.slots[name])
            )

    def copy(gap: slice) -> None:
        values[gap] = state.values[gap]
        for name, slot in state.slots.items():
            slots[name][gap] = slot[gap]

    each(step, chunks)
    if sum(chunk.end - chunk.begin for chunk in chunks) < layout.nbytes:
        each(copy, list(_gaps(layout, chunks)))
    values.flags.writeable = False  # whoever is sent it may look at this very memory
    return values, slots


def _gaps(layout: ShardLayout, chunks: Sequence[_Chunk]) -> Iterator[slice]:
    """What no chunk covers, in parts of their size."""
    bounds = [0, *sorted(edge for chunk in chunks for edge in (chunk.begin, chunk.end))]
    bounds.append(layout.nbytes)
    for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
        for at in range(begin, end, CHUNK_BYTES):
            yield slice(at, min(at + CHUNK_BYTES, end))


def _staleness(state: ShardState, op: Operation) -> float:
    """How many updates the gradient has missed; the mean of those that are summed in it.

    Those that it is summed with are none of them: they enter in the same step.
    """
    bases = [op.based_on, *(based_on for _, based_on, _ in op.merged)]
    return sum(max(0, state.version - based_on) for based_on in bases) / len(bases)


def _check_chunk(layout: ShardLayout, op: Operation, chunk: _Chunk) -> None:
    if not all_finite(chunk.gradient):
        wrong = int(np.flatnonzero(~np.isfinite(chunk.gradient))[0])
        name = layout.name_at(chunk.begin + wrong * chunk.gradient.itemsize)
        raise NonFiniteGradient(
            f"update {op.id}: the gradient of {name!r} holds NaN or infinity; "
            "nothing of this update was applied"
        )


# First byte, end byte, dtype, elements of a row if the rule has to see whole ones (else 0), rule.
_Stretch = tuple[int, int, str, int, UpdateRule | None]


def _chunks(layout: ShardLayout, op: Operation, rule: UpdateRule | None = None) -> Iterator[_Chunk]:
    """Cut what the gradient covers into chunks of one rule, of whole rows where it needs them.

    The gradient is cut with it. One of rows of tables alone covers nothing here.
    """
    if op.gradient is None and op.rows:
        return
    stretches = _stretches(layout, op, rule)
    expected = sum(end - begin for begin, end, *_ in stretches)
    if op.gradient is None or op.codec or op.gradient.nbytes != expected:
        size = 0 if op.gradient is None else op.gradient.nbytes
        raise ShapeMismatch(f"update {op.id}: {size} bytes of gradient, expected {expected}")
    at = 0
    for first, last, dtype, row, own in stretches:
        unit = max(1, row) * np.dtype(dtype).itemsize
        most = max(1, CHUNK_BYTES // unit) * unit
        for begin in range(first, last, most):
            end = min(begin + most, last)
            gradient = _shaped(op.gradient[at : at + end - begin], dtype, row)
            yield _Chunk(begin, end, dtype, row, gradient, own)
            at += end - begin


def _stretches(layout: ShardLayout, op: Operation, rule: UpdateRule | None) -> list[_Stretch]:
    """What the gradient covers, in the order of the buffer."""
    named = rule is not None and is_per_array(rule)
    rows = rule is not None and by_rows(rule)
    if not (op.pieces or named or rows):
        return [(*run, 0, rule) for run in layout.runs]
    chosen = [layout.pieces[i] for i in op.pieces] if op.pieces else layout.pieces
    if rule is None or not named:
        return [(p.offset, p.end, p.block.dtype, _row(p) if rows else 0, rule) for p in chosen]
    own = {name: rule_for(rule, name) for name in {p.block.name for p in chosen}}
    rows_of = {name: by_rows(each) for name, each in own.items()}
    found: list[_Stretch] = []
    for piece in chosen:
        begin, dtype, name = piece.offset, piece.block.dtype, piece.block.name
        row = _row(piece) if rows_of[name] else 0
        if found and not row and found[-1][1:] == (begin, dtype, 0, own[name]):
            begin = found.pop()[0]  # both are one stretch for a rule that looks at each element
        found.append((begin, piece.end, dtype, row, own[name]))
    return found


def _row(piece: Piece) -> int:
    if not piece.block.row:
        raise ConfigurationError(
            f"the update rule needs whole rows, but the blocks of {piece.block.name!r} may "
            "cut them: make the layout with whole_rows=True"
        )
    return piece.block.row


# -- rows of sparse tables ----------------------------------------------------------------------


def check_rows(layout: ShardLayout, op: Operation) -> None:
    """Refuse rows of unknown tables, of a wrong width or dtype, or with NaN or infinity."""
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


def stepped_tables(
    layout: ShardLayout,
    rule: UpdateRule,
    tables: Mapping[str, SparseTable],
    op: Operation,
    t: int,
    scale_of: Callable[[UpdateRule], float],
) -> dict[str, SparseTable]:
    """Return the tables after one step of the rule with the rows of an operation.

    `scale_of` returns the factor on the learning rate of a rule. Missing rows are created. All
    other rows stay unchanged, even if the rule would change them on a gradient of zeros.
    """
    check_rows(layout, op)
    after = dict(tables)
    for rows in op.rows:
        if len(rows.keys):
            table, spec = table_of(tables, rows.table), layout.table(rows.table)
            own = rule_for(rule, rows.table)
            after[rows.table] = table.written(
                _stepped_rows(spec, own, table, rows, t, scale_of(own))
            )
    return after


def written_bytes(layout: ShardLayout, tables: Mapping[str, SparseTable], op: Operation) -> int:
    """Estimate the bytes that a step with the operation writes, and so how long it may take."""
    dense = 0 if op.gradient is None else op.gradient.nbytes
    total = layout.nbytes if op.codec else dense
    for rows in op.rows:
        copied = table_of(tables, rows.table).copied(len(rows.keys))
        total += copied * layout.table(rows.table).row_nbytes
    return total


def _stepped_rows(
    spec: SparseSpec, rule: UpdateRule, table: SparseTable, rows: Rows, t: int, scale: float
) -> Level:
    """The rows of these keys after the step."""
    now = table.rows(spec, rows.keys, rule.slots)
    shape = rows.gradient.shape if by_rows(rule) else (-1,)
    slots = {name: slot.reshape(shape) for name, slot in now.slots.items()}
    gradient = rows.gradient.reshape(shape)
    with np.errstate(over="ignore", invalid="ignore"):  # a diverging run shows in its results
        values, slots = rule.step(now.values.reshape(shape), gradient, slots, t, scale)
    full = rows.gradient.shape
    # Copy the keys: they may be a view of a whole message, which a table must not keep alive.
    return Level(
        rows.keys.copy(),
        values.reshape(full),
        {name: slot.reshape(full) for name, slot in slots.items()},
    )
