"""The reads of a client: its read point, and the cache of filtered pulls.

A worker that computes while it sends receives newer weights before it pushes the gradients of older
ones. The read point of the older weights goes with that push, so that the staleness of the gradient
is right, and the gradient is dropped if an earlier incarnation of the worker read them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.updates import Operation, UpdateId
from dps.protocol.compression import updated, with_lists
from dps.protocol.executor import offload
from dps.protocol.messages import CopyId, Weights


class ShardRead(NamedTuple):
    """The last read of one shard; None: there was no read yet."""

    weights: Weights | None = None
    incarnation: int | None = None  # of the worker that read the weights
    number: int = 0  # of the worker's last update that was sent before the weights were read
    seen: tuple[int, float] | None = None  # version and time of the last read of weights or rows


class ReadPoint(NamedTuple):
    """The last read of each shard at some moment: opaque to training code, and passed with a push.

    It keeps these weights in memory. Thread-safe, because it never changes.
    """

    shards: tuple[ShardRead, ...]

    @property
    def buffers(self) -> dict[int, np.ndarray]:
        """The weights as a uint8 buffer for each shard that was read."""
        read = {shard: read.weights for shard, read in enumerate(self.shards)}
        return {shard: weights.values for shard, weights in read.items() if weights is not None}

    @property
    def updates(self) -> int:
        """How many updates every shard had applied when it was read; 0 before the first read."""
        return min((0 if r.weights is None else r.weights.version for r in self.shards), default=0)

    @property
    def version(self) -> int | None:
        """Mean version of the shards at their last read of weights or rows."""
        seen = [read.seen[0] for read in self.shards if read.seen is not None]
        return round(sum(seen) / len(seen)) if seen else None

    @property
    def slack(self) -> int | None:
        """How many gradients after the next one these weights allow; None: any number."""
        bounds = [read.weights.slack for read in self.shards if read.weights is not None]
        return min((bound for bound in bounds if bound >= 0), default=None)

    def lacks(self, number: int) -> int:
        """How many of the worker's updates, up to this number, the weights lack."""
        numbers = (read.number for read in self.shards if read.weights is not None)
        return max(0, number - min(numbers, default=number))

    def with_rows(self, later: ReadPoint) -> ReadPoint:
        """Return these weights with the rows that were read by the time of `later`."""
        pairs = zip(self.shards, later.shards, strict=True)
        return ReadPoint(tuple(own._replace(seen=other.seen) for own, other in pairs))


class Copy:
    """Cache of one shard's weights on a worker, updated by filtered pulls. For one event loop.

    Each read names the cached weights. The reply holds the changes since then, or all weights.
    Arrays that were returned never change: each read makes a new buffer.
    """

    def __init__(self, layout: ShardLayout) -> None:
        self._layout = layout
        self._weights: Weights | None = None
        self._lists: dict[str, np.ndarray] = {}  # of indices, of the last reply, by digest

    @property
    def has(self) -> CopyId | None:
        """The name of the cached weights; None: there are none, or pulls are not filtered."""
        return self._weights.copy if self._weights is not None else None

    async def whole(self, weights: Weights) -> Weights | None:
        """Return all weights after a reply; None if it updates another copy: read again."""
        cached, self._weights = self._weights, None
        if weights.since is None:
            self._lists = {}
        elif cached is None or cached.copy != weights.since:
            return None
        else:
            work = partial(self._updated, cached.values, weights)
            values, self._lists = await offload(work, cached.values.nbytes)
            weights = replace(weights, values=values, since=None, codec=())
        self._weights = weights if weights.copy is not None else None
        return weights

    def _updated(
        self, values: np.ndarray, reply: Weights
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        number = UpdateId("", 0, reply.copy.number if reply.copy is not None else 0)
        sent = Operation("gradient", number, gradient=reply.values, codec=reply.codec)
        op, lists = with_lists(sent, self._lists)
        return updated(self._layout, values, op), lists
