"""The replay policies: how gradients that were buffered during an outage are applied.

A policy turns the buffered operations, oldest first, into the operations that the shard applies.
Whatever it does to the gradients, every update keeps its identity, so that none enters twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.outage import Replay
from dps.core.tables.row_gradients import added, squares, times
from dps.core.updates import Operation

Summable = Callable[[Operation], Operation]

PUBLISHED_QUEUE = 50
PUBLISHED_SCALE = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """The operations to apply, in order, and how many gradients the policy left out."""

    operations: tuple[Operation, ...]
    dropped: int = 0


def plan(
    policy: Replay,
    layout: ShardLayout,
    version: int,
    buffered: Sequence[Operation],
    summable: Summable | None = None,
) -> Plan:
    """Return what to apply for these buffered gradients on a shard that is at `version`.

    `summable` makes of an operation one that can be summed; None: each can.

    Policies
    --------
    sum, mean
        One step with the sum, or the mean, of the gradients.
    each
        One step for each, in order.
    staleness_scaled
        One step for each, its learning rate divided by 1 + its staleness.
    clip
        One step with the sum, scaled down to the norm `clip_norm` if it is longer.
    drop_older
        Gradients staler than `drop_older_than` versions are left out; the others are summed.
    published
        The rule of "Training Through Failure": the sum; over 50 gradients, a tenth of the
        learning rate.
    """
    once = _each_once(buffered)
    ops = [replace(op, replayed=True) for op in once if op.kind == "gradient"]
    planned = _plan(policy, layout, version, ops, summable or _as_it_is)
    # Ticks only move clocks on; one that comes after a later update of its worker changes nothing.
    ticks = tuple(op for op in once if op.kind == "tick")
    return replace(planned, operations=(*planned.operations, *ticks))


def _as_it_is(op: Operation) -> Operation:
    return op


def _plan(
    policy: Replay, layout: ShardLayout, version: int, ops: list[Operation], summable: Summable
) -> Plan:

    def total_of(chosen: Iterable[Operation]) -> tuple[Operation, ...]:
        return summed(layout, map(summable, chosen))

    match policy.policy:
        case "each":
            return Plan(tuple(ops))
        case "staleness_scaled":
            scaled = (replace(op, scale=1 / (1 + _staleness(version, op))) for op in ops)
            return Plan(tuple(scaled))
        case "drop_older":
            fresh = [op for op in ops if _staleness(version, op) <= policy.drop_older_than]
            return Plan(total_of(fresh), len(ops) - len(fresh))
        case "mean":
            return Plan(tuple(_times(layout, op, 1 / _count(op)) for op in total_of(ops)))
        case "clip":
            return Plan(tuple(_clipped(layout, op, policy.clip_norm) for op in total_of(ops)))
        case "published":
            scale = PUBLISHED_SCALE if len(ops) > PUBLISHED_QUEUE else 1.0
            return Plan(tuple(replace(op, scale=scale) for op in total_of(ops)))
        case "sum":
            return Plan(total_of(ops))


def _each_once(buffered: Sequence[Operation]) -> list[Operation]:
    """Leave out what the shard would refuse if the gradients came one by one."""
    latest: dict[str, tuple[int, int]] = {}
    once = []
    for op in buffered:
        number = (op.id.incarnation, op.id.seq)
        if number > latest.get(op.id.worker, (0, 0)):
            latest[op.id.worker] = number
            once.append(op)
    return once


def _staleness(version: int, op: Operation) -> int:
    return max(0, version - op.based_on)


def _count(op: Operation) -> int:
    return 1 + len(op.merged)


def summed(layout: ShardLayout, ops: Iterable[Operation]) -> tuple[Operation, ...]:
    """Merge runs of gradients that cover the same pieces into one operation each.

    They may be of different rows. The updates keep their identity: the first gives the operation
    its own, the others are `merged`.
    """
    merged: list[Operation] = []
    for op in ops:
        last = merged[-1] if merged else None
        if last is None or not _cover_the_same(last, op):
            merged.append(op)
            continue
        identity = (op.id, op.based_on, op.based_at)
        merged[-1] = replace(
            last,
            gradient=_combined(layout, last, op),
            merged=(*last.merged, identity),
            rows=added(last.rows, op.rows),
        )
    return tuple(merged)


def _cover_the_same(a: Operation, b: Operation) -> bool:
    return a.pieces == b.pieces and (a.gradient is None) == (b.gradient is None)


def _combined(layout: ShardLayout, a: Operation, b: Operation) -> np.ndarray | None:
    if a.gradient is None or b.gradient is None:
        return None
    out = np.empty_like(a.gradient)
    for where, dtype in _parts(layout, a):
        np.add(a.gradient[where].view(dtype), b.gradient[where].view(dtype), out[where].view(dtype))
    return out


def _times(layout: ShardLayout, op: Operation, factor: float) -> Operation:
    out = None
    if op.gradient is not None:
        out = np.empty_like(op.gradient)
        for where, dtype in _parts(layout, op):
            np.multiply(op.gradient[where].view(dtype), factor, out[where].view(dtype))
    return replace(op, gradient=out, rows=times(op.rows, factor))


def _clipped(layout: ShardLayout, op: Operation, limit: float) -> Operation:
    total = squares(op.rows)
    if op.gradient is not None:
        for where, dtype in _parts(layout, op):
            part = op.gradient[where].view(dtype)
            total += float(np.square(part, dtype=np.float64).sum())
    norm = float(np.sqrt(total))
    return op if norm <= limit else _times(layout, op, limit / norm)


def _parts(layout: ShardLayout, op: Operation) -> list[tuple[slice, str]]:
    """Stretches of one dtype in the buffer of a gradient."""
    parts, at = [], 0
    for piece in [layout.pieces[i] for i in op.pieces] if op.pieces else layout.pieces:
        parts.append((slice(at, at + piece.block.nbytes), piece.block.dtype))
        at += piece.block.nbytes
    return parts
