"""A training loop that computes while it sends: a bounded number of updates is under way at once.

The weights that a worker computes on then lack its own last updates. The consistency model bounds
how many gradients may be computed from the same weights; after these the loop waits for newer ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Self

from dps.cluster.node.worker import NOTHING, Handle, Worker, check_worker
from dps.core.blocks import Arrays, Destination
from dps.core.consistency import check_ahead
from dps.core.tables.key_routing import Gradients
from dps.errors import GroupClosed


class Closing(AbstractContextManager[Any]):
    """A context manager for updates that are under way: at the end of its block, it is closed."""

    @abstractmethod
    def close(self, wait: bool = True) -> Any:
        """Take no more updates, and wait for those that are under way."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close it, without waiting after an exception."""
        self.close(wait=kind is None)


class Pipeline(Closing):
    """Keeps at most `ahead` updates under way, in order, while the worker computes the next.

    With 0 it is `worker.push_pull` in a loop. Used in a `with` statement, it is closed at the end.
    Not thread-safe: for one training function, as its worker.

    Parameters
    ----------
    worker
        The worker. While the pipeline is open, push only through the pipeline.
    ahead
        How many of the worker's own last updates `weights` may lack.
    into
        Your own arrays to write weights into (see `Worker.push_pull_into`); None: new arrays.

    Attributes
    ----------
    weights
        The weights to compute the next gradients on: name → array.
    is_open
        Whether it takes gradients; false after `close` and after its `with` block.

    Raises
    ------
    ConfigurationError
        `ahead` is negative, no whole number, or more than the consistency model allows: 0 under
        BSP, tau under SSP.

    Examples
    --------
    >>> from dps.testing import VirtualCluster
    >>> def train(worker):
    ...     with Pipeline(worker, ahead=1) as pipeline:
    ...         for _ in range(10):
    ...             pipeline.push_pull({"w": np.ones(2)})
    ...     return worker.pull()["w"]
    >>> with VirtualCluster() as cluster:
    ...     with ParameterServer(cluster, {"w": np.zeros(2)}, optimizer=SGD(1.0)) as ps:
    ...         ps.run(train, workers=1)[0].result()
    array([-10., -10.])
    """

    def __init__(self, worker: Worker, ahead: int = 1, into: Destination | None = None) -> None:
        check_worker(worker)
        check_ahead(worker.consistency, ahead)
        self._worker = worker
        self._ahead = ahead
        self._into = into
        self._under_way: deque[Handle[Any]] = deque()
        self.is_open = True
        self.weights: Arrays = worker.pull()
        if into is not None:
            assert worker.read_point is not None
            into.fill(worker.read_point.buffers)
            self.weights = into

    def push_pull(self, gradients: Arrays = NOTHING, rows: Gradients = NOTHING) -> Arrays:
        """Send gradients that were computed on `weights`; return the weights for the next.

        Waits for the oldest update if more than `ahead` updates are under way. The gradients must
        not be changed before `ahead` further calls, or `drain`, have returned.

        Raises
        ------
        DpsError
            What `Worker.push_pull` raises, for this update or the first earlier one that failed.
        GroupClosed
            This pipeline was closed; nothing was sent.
        """
        self.require_open()
        if self._into is None:
            sent: Handle[Any] = self._worker.push_pull_async(gradients, rows)
        else:
            sent = self._worker.push_pull_into(self._into, gradients, rows)
        self._under_way.append(sent)
        while self._under_way and (len(self._under_way) > self._room or self._under_way[0].done()):
            self._take_oldest()
        return self.weights

    def drain(self) -> Arrays:
        """Wait for all updates under way; return the weights after them. Errors as `push_pull`."""
        while self._under_way:
            self._take_oldest()
        return self.weights

    def close(self, wait: bool = True) -> Arrays:
        """Take no more gradients, and `drain` if it is to wait."""
        self.is_open = False
        return self.drain() if wait else self.weights

    def require_open(self) -> None:
        """Raise `GroupClosed` unless it is open."""
        if not self.is_open:
            raise GroupClosed(
                "this pipeline was closed, by close() or the end of its `with` block; attach "
                "again, or create another Pipeline"
            )

    @property
    def _room(self) -> int:
        """How many updates the present weights may lack."""
        slack = self._worker.slack
        return self._ahead if slack is None else min(self._ahead, slack)

    def _take_oldest(self) -> None:
        try:
            weights = self._under_way.popleft().wait()
        except BaseException:
            self._under_way.clear()  # only the first error counts
            raise
        self.weights = self._into if self._into is not None else weights
