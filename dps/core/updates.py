"""The identity of updates and the operations that change a shard.

An operation travels from a worker to a shard, down a chain and into a mailbox. A shard is a state
machine over operations: replicas that apply the same ones in the same order are bitwise equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from dps.core.tables.row_gradients import Rows, owned


class UpdateId(NamedTuple):
    """Identity of a pushed update: worker, the worker's incarnation, and its number.

    Numbers count up by one. The number of a worker's last update is its clock, the same on all
    shards whatever these have lost, so a worker that joins continues from the clocks of the others.
    """

    worker: str
    incarnation: int
    seq: int


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the gradient of one array on one shard is encoded (see `dps.core.filters.encoding`).

    Attributes
    ----------
    entries
        Number of entries that are sent; -1: all, without indices.
    keys
        Form of their indices: "uint16" or "uint32", a mask in "bits", or "" for none.
    values
        Form of their values: "raw", "bf16" or "int8".
    key_bytes, value_bytes
        Length of both sections in the payload.
    packed_keys, packed_values
        Whether a section is compressed.
    cached
        Digest of the indices, if they are left out of the payload because the node has them.
    """

    entries: int
    keys: str
    values: str
    key_bytes: int
    value_bytes: int
    packed_keys: bool = False
    packed_values: bool = False
    cached: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function on a shard, with its result once it has run.

    Attributes
    ----------
    function
        The name under which it is registered.
    arguments
        Its arguments, packed (see `dps.core.functions`).
    pieces, values
        Indices of the shard's pieces that it changed, and a uint8 buffer of their new values; None:
        it changed nothing.
    result
        Its result, packed; None: it has not run yet.
    """

    function: str
    arguments: np.ndarray
    pieces: tuple[int, ...] = ()
    values: np.ndarray | None = None
    result: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of a shard.

    Attributes
    ----------
    kind
        "gradient", "apply" (run a function), or "join", "leave" and "tick", which only change the
        table of workers' clocks. A tick stands for an update that changes nothing on this shard.
    id
        Identity of the update. A join has seq 0, or the worker's last seq if the shard may have
        lost that; a leave has seq 0. An apply has the number of its caller's call; callers have
        names of their own, and no clocks.
    based_on, based_at
        Version, and time in seconds since the Unix epoch, of the weights that the gradient was
        computed from.
    pieces
        Indices of the shard's pieces that the gradient covers; empty: all.
    gradient
        uint8 buffer of those pieces, encoded as `codec` says; None for the other kinds, and if only
        rows are pushed.
    replayed
        Whether it was buffered during an outage.
    scale
        Factor on the learning rate, below 1 only by replay policies that reduce it.
    merged
        Further updates whose gradients are summed into this one: id, `based_on`, `based_at`.
    rows
        The gradient of rows of sparse tables, one entry for each table.
    codec
        How the gradient of each array is encoded; empty: not at all.
    base
        uint8 buffer of the weights that the gradient was computed from, never encoded; only if the
        update rule asks for them.
    call
        What an apply runs.
    """

    kind: Literal["gradient", "join", "leave", "tick", "apply"]
    id: UpdateId
    based_on: int = 0
    based_at: float = 0.0
    pieces: tuple[int, ...] = ()
    gradient: np.ndarray | None = None
    replayed: bool = False
    scale: float = 1.0
    merged: tuple[tuple[UpdateId, int, float], ...] = ()
    rows: tuple[Rows, ...] = ()
    codec: tuple[Encoding, ...] = ()
    base: np.ndarray | None = None
    call: Call | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient, and of the weights and rows that go with it."""
        dense = sum(b.nbytes for b in (self.gradient, self.base) if b is not None)
        return dense + sum(rows.nbytes for rows in self.rows)

    def copied(self) -> Operation:
        """Return the operation with a copy of the gradient, whose memory the caller may reuse."""
        dense = None if self.gradient is None else self.gradient.copy()
        return replace(self, gradient=dense, rows=owned(self.rows))
