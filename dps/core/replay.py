"""Policies for workers during the outage of a shard, and for applying their buffered gradients.

A replay policy turns the buffered operations, oldest first, into those that the shard applies.
Every update keeps its identity, so that none enters twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.ranges import Checked, Positive, whole_from
from dps.core.tables.table import Rows, added
from dps.core.updates import Operation

PUBLISHED_QUEUE, PUBLISHED_SCALE = 50, 0.1


@dataclass(frozen=True, slots=True)
class Wait:
    """Workers wait until the shard is back.

    >>> Wait()
    Wait()
    """


@dataclass(frozen=True, slots=True)
class Continue(Checked):
    """Workers continue with the last weights, and their gradients are buffered.

    They do so while a shard is down. While its server lives, but there is no store, they wait.

    Parameters
    ----------
    limit
        Buffered gradients of one worker and shard; then the worker waits.
    buffer
        "mailbox": on the store's node, where they survive the worker; "worker": in the worker.

    Examples
    --------
    >>> Continue(limit=100, buffer="worker")
    Continue(limit=100, buffer='worker')
    """

    limit: Annotated[int, whole_from(1, "gradients")] = 32
    buffer: Literal["mailbox", "worker"] = "mailbox"


Outage = Wait | Continue
Policy = Literal["sum", "mean", "each", "staleness_scaled", "clip", "drop_older", "published"]


@dataclass(frozen=True, slots=True)
class Replay(Checked):
    """How buffered gradients are applied after an outage (see `dps.core.replay`).

    Parameters
    ----------
    policy
        "sum" or "mean": one step per shard. "each": one step per update. "staleness_scaled": as
        "each", with the learning rate divided by 1 + staleness. "clip": as "sum", scaled down to
        the norm `clip_norm`. "drop_older": as "sum", without updates staler than `drop_older_than`.
        "published": as "sum"; above 50 updates at a tenth of the learning rate.
    clip_norm
        Maximum norm of the sum, for "clip".
    drop_older_than
        Maximum staleness, for "drop_older".

    Examples
    --------
    >>> Replay("clip", clip_norm=5.0).policy
    'clip'
    """

    policy: Policy = "sum"
    clip_norm: Positive = 1.0
    drop_older_than: Annotated[int, whole_from(0, "versions")] = 100


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
    summable: Callable[[Operation], Operation] | None = None,
) -> Plan:
    """Return what to apply for these buffered gradients on a shard that is at `version`.

    `summable` turns an operation into one that can be summed; None: each can.
    """
    latest: dict[str, tuple[int, int]] = {}
    once = []  # without those that the shard would refuse if the gradients arrived one by one
    for op in buffered:
        number = (op.id.incarnation, op.id.seq)
        if number > latest.get(op.id.worker, (0, 0)):
            latest[op.id.worker] = number
            once.append(op)
    ops = [op._replace(replayed=True) for op in once if op.kind == "gradient"]
    # Ticks only advance clocks; one that comes after a later update of its worker changes nothing.
    ticks = [op for op in once if op.kind == "tick"]

    def total(chosen: Iterable[Operation]) -> tuple[Operation, ...]:
        return summed(layout, map(summable, chosen) if summable is not None else chosen)

    def staleness(op: Operation) -> int:
        return max(0, version - op.based_on)

    todo: Iterable[Operation]
    dropped = 0
    match policy.policy:
        case "each":
            todo = ops
        case "staleness_scaled":
            todo = [op._replace(scale=1 / (1 + staleness(op))) for op in ops]
        case "drop_older":
            fresh = [op for op in ops if staleness(op) <= policy.drop_older_than]
            todo, dropped = total(fresh), len(ops) - len(fresh)
        case "mean":
            todo = [_times(layout, op, 1 / (1 + len(op.merged))) for op in total(ops)]
        case "clip":
            todo = [_clipped(layout, op, policy.clip_norm) for op in total(ops)]
        case "published":  # in "Training Through Failure"
            scale = PUBLISHED_SCALE if len(ops) > PUBLISHED_QUEUE else 1.0
            todo = [op._replace(scale=scale) for op in total(ops)]
        case "sum":
            todo = total(ops)
    return Plan((*todo, *ticks), dropped)


def summed(layout: ShardLayout, ops: Iterable[Operation]) -> tuple[Operation, ...]:
    """Merge runs of gradients that cover the same pieces into one operation each."""
    sums: list[Operation] = []
    for op in ops:
        last = sums[-1] if sums else None
        dense = op.gradient is not None
        if last is None or last.pieces != op.pieces or (last.gradient is not None) != dense:
            sums.append(op)
            continue
        gradient = None
        if last.gradient is not None and op.gradient is not None:
            gradient = np.empty_like(last.gradient)
            for piece, part in layout.packed(op.pieces):
                dtype = piece.block.dtype
                both = last.gradient[part].view(dtype), op.gradient[part].view(dtype)
                np.add(*both, out=gradient[part].view(dtype))
        merged = (*last.merged, (op.id, op.based_on, op.based_at, op.batch))
        rows = added(last.rows, op.rows)
        sums[-1] = last._replace(gradient=gradient, merged=merged, rows=rows)
    return tuple(sums)


def _times(layout: ShardLayout, op: Operation, factor: float) -> Operation:
    out = None
    if op.gradient is not None:
        out = np.empty_like(op.gradient)
        for piece, part in layout.packed(op.pieces):
            dtype = piece.block.dtype
            np.multiply(op.gradient[part].view(dtype), factor, out[part].view(dtype))
    rows = tuple(Rows(each.table, each.keys, each.gradient * factor) for each in op.rows)
    return op._replace(gradient=out, rows=rows)


def _clipped(layout: ShardLayout, op: Operation, limit: float) -> Operation:
    total = sum(float(np.square(rows.gradient, dtype=np.float64).sum()) for rows in op.rows)
    if op.gradient is not None:
        for piece, part in layout.packed(op.pieces):
            dense = op.gradient[part].view(piece.block.dtype)
            total += float(np.square(dense, dtype=np.float64).sum())
    norm = float(np.sqrt(total))
    return op if norm <= limit else _times(layout, op, limit / norm)
