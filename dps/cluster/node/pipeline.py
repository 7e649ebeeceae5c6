"""A loop that computes while it sends: at most so many updates of a worker are under way at once.

What a worker computes on then lacks its own last updates. The consistency model bounds how many:
weights say how many more gradients may be computed from them, and the loop waits for newer ones
before it would compute more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from types import TracebackType
from typing import Any, Self

from dps.cluster.node.worker import NOTHING, Handle, Worker, check_worker
from dps.core.blocks import Arrays
from dps.core.consistency import check_ahead
from dps.core.flat import FlatArrays
from dps.core.tables.key_routing import Gradients
from dps.errors import GroupClosed


class Closing(ABC):
    """Something of a training loop that has updates under way."""

    @abstractmethod
    def close(self) -> Any:
        """Take no more updates, and wait for all that is under way."""

    @abstractmethod
    def abandon(self) -> None:
        """Take no more updates, and wait for nothing."""

    def __enter__(self) -> Self:
        """Return this object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; if something has failed, without waiting for what is under way."""
        if kind is None:
            self.close()
        else:
            self.abandon()


class Pipeline(Closing):
    """Keeps at most `ahead` updates under way, in order, while the worker computes the next.

    With 0 it is `worker.push_pull` in a loop. Used in a `with` statement, it is closed at the end.
    Not thread-safe: for one training function, as its worker.

    Parameters
    ----------
    worker
        Whose updates; nobody else pushes them meanwhile.
    ahead
        How many of its own last updates the weights may lack on which it computes.

    into
        Arrays that the weights are written into, which are then the same ones all the time; see
        `Worker.pull_into`.

    Attributes
    ----------
    weights
        Those to compute the next gradients on: name → array, read-only if not the caller's own.

    Raises
    ------
    ConfigurationError
        `ahead` is negative, no whole number, or more than the consistency model allows: 0 under
        BSP, tau under SSP.
    """

    def __init__(self, worker: Worker, ahead: int = 1, into: FlatArrays | None = None) -> None:
        check_worker(worker)
        check_ahead(worker.consistency, ahead)
        self._worker = worker
        self._ahead = ahead
        self._into = into
        self._under_way: deque[Handle[Any]] = deque()
        self._open = True
        self.weights: Arrays = into if into is not None else worker.pull()
        if into is not None:
            worker.pull_into(into)

    def push_pull(self, gradients: Arrays = NOTHING, rows: Gradients = NOTHING) -> Arrays:
        """Send gradients that were computed on `weights`; return those for the next.

        Returns at once if no more than `ahead` updates are under way, else once the oldest is
        acknowledged. The gradients must not be changed before `ahead` further calls, or `drain`,
        have returned.

        Raises
        ------
        DpsError
            What `Worker.push_pull` raises, of this update or of the first that failed before.
        GroupClosed
            This pipeline was closed; nothing was sent.
        """
        self.require_open()
        self._under_way.append(self._sent(gradients, rows))
        while self._under_way and (len(self._under_way) > self._room or self._under_way[0].done()):
            self._take_oldest()
        return self.weights

    def drain(self) -> Arrays:
        """Wait for all that is under way; return the weights after it. Errors as `push_pull`."""
        while self._under_way:
            self._take_oldest()
        return self.weights

    def close(self) -> Arrays:
        """Take no more gradients, and `drain`."""
        self._open = False
        return self.drain()

    def abandon(self) -> None:
        """Take no more gradients, and wait for nothing."""
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether it was neither closed nor its `with` block left."""
        return self._open

    def require_open(self) -> None:
        """Raise `GroupClosed` unless it is open."""
        if not self._open:
            raise GroupClosed(
                "nothing is sent after close() or the end of the `with` block; attach again, or "
                "make another Pipeline"
            )

    @property
    def _room(self) -> int:
        """How many updates the present weights may lack."""
        slack = self._worker.slack
        return self._ahead if slack is None else min(self._ahead, slack)

    def _sent(self, gradients: Arrays, rows: Gradients) -> Handle[Any]:
        if self._into is None:
            return self._worker.push_pull_async(gradients, rows)
        return self._worker.push_pull_into(self._into, gradients, rows)

    def _take_oldest(self) -> None:
        try:
            found = self._under_way.popleft().wait()
            self.weights = self._into if self._into is not None else found
        except BaseException:
            self._under_way.clear()  # the first error is the one that counts
            raise
