"""Owns the identity of updates and the operations that change a shard.

An operation is what travels from a worker to a shard, down a chain and into a mailbox. A shard is
a state machine over operations: replicas that apply the same ones in the same order are bitwise
equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np


class UpdateId(NamedTuple):
    """Names one pushed update: worker, the worker's incarnation, and its number.

    Numbers count up by one. The number of a worker's last update is its clock, the same on all
    shards whatever these have lost, so a worker that joins goes on from the clocks of the others.
    """

    worker: str
    incarnation: int
    seq: int


@dataclass(frozen=True, slots=True)
class Call:
    """A function that is to be run on a shard, and what came of it once it was.

    Attributes
    ----------
    function
        The name that it is registered by.
    arguments
        What it is called with, packed (see `dps.core.functions`).
    pieces, values
        Indices of the shard's pieces that it changed, and a uint8 buffer of their new values; None:
        it changed nothing.
    result
        Its result, packed; None: it was not run yet.
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
        "gradient", or "join", "leave" and "tick", which only change the table of workers' clocks.
        A tick stands for an update that changes nothing on this shard. "apply" runs a function.
    id
        Identity of the update. A join has seq 0, or the worker's last seq where its shard may not
        know that any more; a leave has seq 0. An apply has the number of its caller's call; callers
        have names that are no workers', and no clocks.
    based_on, based_at
        Version, and time in seconds since the Unix epoch, of the weights that the gradient was
        computed from.
    pieces
        Indices of the shard's pieces that the gradient covers; empty: all.
    gradient
        uint8 buffer of those pieces; None for the other kinds.
    replayed
        Whether it comes out of a buffer after an outage.
    scale
        Factor on the learning rate, 1 but for replay policies that reduce it.
    merged
        Further updates whose gradients are summed into this one (replay after an outage).
    call
        What an apply is to run.
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
    call: Call | None = None
