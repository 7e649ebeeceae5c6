"""Messages that change a shard: pushes of operations and their acknowledgement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dps.core.updates import Operation, UpdateId
from dps.protocol.messages.pull import CopyId, Weights
from dps.protocol.wire import message

# -- to a shard's head; a pull to the replica that serves reads ----------------------------------


@message
@dataclass(frozen=True, slots=True)
class Push:
    """Apply an operation; if `pull`, return the weights that the worker may read next.

    `has` is as in `Pull`.

    If the consistency model makes it wait for more than `patience` seconds, the reply is `Waiting`.
    """

    shard: int
    epoch: int
    operation: Operation
    pull: bool
    patience: float
    has: CopyId | None = None


@message
@dataclass(frozen=True, slots=True)
class Pushed:
    """The update is durable to the strategy's promise; `outcome` is "applied" or "duplicate".

    `clock` is the worker's clock on this shard, `result` the packed result of a call, `applied` how
    many updates of the worker, or caller, are in the state.
    """

    outcome: str
    version: int
    clock: int
    weights: Weights | None
    result: np.ndarray | None = None
    applied: int = 0


@message
@dataclass(frozen=True, slots=True)
class ReplayBuffered:
    """Apply gradients that a worker buffered while the shard was down, oldest first."""

    shard: int
    epoch: int
    operations: tuple[Operation, ...]


@message
@dataclass(frozen=True, slots=True)
class Evict:
    """Workers are gone: take those out of the clock table that are in it. Reply: Durable."""

    shard: int
    epoch: int
    workers: tuple[UpdateId, ...]
