"""The identity of updates and the operations that change a shard.

Replicas that apply the same operations in the same order are bitwise equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dps.core.tables.table import Rows


class UpdateId(NamedTuple):
    """Identity of a pushed update: worker, the worker's incarnation, and its number, from 1."""

    worker: str
    incarnation: int
    # The number of a worker's last update is its clock. It is the same on all shards, even after
    # losses, so a worker that joins continues from the clocks of the others.
    seq: int


class Batch(NamedTuple):
    """Identity of a batch of leased data (see `dps.core.leases`): its epoch, and its number."""

    epoch: str  # of which pass over which data, too
    number: int  # from 0


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the gradient of one array on one shard is encoded (see `dps.core.filters.encoding`)."""

    entries: int  # that are sent; -1: all, without indices
    keys: str  # form of their indices: "uint16", "uint32", a mask in "bits", or "" for none
    values: str  # form of their values: "raw", "bf16" or "int8"
    key_bytes: int  # length of both sections in the payload
    value_bytes: int
    packed_keys: bool = False  # whether a section is compressed
    packed_values: bool = False
    cached: str = ""  # digest of the indices, if the payload lacks them because the node has them


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function, whose arguments and result are packed (see `dps.core.functions`)."""

    function: str  # the name under which it is registered
    arguments: np.ndarray
    pieces: tuple[int, ...] = ()  # indices of the shard's pieces that it changed
    values: np.ndarray | None = None  # their new values, as uint8; None: it changed nothing
    result: np.ndarray | None = None  # None: it has not run yet


class Operation(NamedTuple):
    """One change of a shard.

    A "gradient" is an update, an "apply" runs the function of `call`. The other kinds only change
    the table of workers' clocks; a "tick" stands for an update that changes nothing on this shard.
    A join has the number 0, or the worker's last one if the shard may have lost that; a leave has
    0. A join with incarnation 0 keeps a place for a worker that is not active here, but will join
    as the incarnation that is its number.
    An apply has the number of its caller's call; callers have their own names, and no clocks.
    """

    kind: Literal["gradient", "join", "leave", "tick", "apply"]
    id: UpdateId
    based_on: int = 0  # version of the weights that the gradient was computed from
    based_at: float = 0.0  # their time, in seconds since the Unix epoch
    pieces: tuple[int, ...] = ()  # indices of the pieces that the gradient covers; empty: all
    # uint8 buffer of them, encoded as in `codec`, if any; or (see `as_halves`) uint16.
    gradient: np.ndarray | None = None
    replayed: bool = False  # whether it was buffered during an outage
    scale: float = 1.0  # factor on the learning rate; only replay policies reduce it
    # Further updates whose gradients are summed into this one: id, `based_on`, `based_at`, `batch`.
    merged: tuple[tuple[UpdateId, int, float, Batch | None], ...] = ()
    rows: tuple[Rows, ...] = ()  # the gradient of rows of sparse tables, one entry for each
    codec: tuple[Encoding, ...] = ()  # how the gradient of each array is encoded; empty: not at all
    # uint8 buffer of the weights of `based_on`, never encoded; only if the rule needs them.
    base: np.ndarray | None = None
    call: Call | None = None
    batch: Batch | None = None  # of leased data, whose update this is

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient, and of the weights and rows that go with it."""
        dense = sum(b.nbytes for b in (self.gradient, self.base) if b is not None)
        return dense + sum(rows.nbytes for rows in self.rows)

    def copied(self) -> Operation:
        """Return the operation with a copy of the gradient, whose memory the caller may reuse."""
        dense = None if self.gradient is None else self.gradient.copy()
        rows = tuple(Rows(r.table, r.keys.copy(), r.gradient.copy()) for r in self.rows)
        return self._replace(gradient=dense, rows=rows)
