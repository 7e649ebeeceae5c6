"""Owns the numbers of a replica that are of interest while it serves, for whoever asks.

They are kept whether or not anybody records events, and cost an addition for each update.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dps.core.shard import AppliedUpdate

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Figures:
    """How it stands with one replica of a shard, since it came to its node.

    Attributes
    ----------
    updates, duplicates
        How many updates it has applied, and refused because it had them.
    staleness, staleness_sum
        How many of them were as stale as each of `STALENESS_BOUNDS` at most but more than the one
        before, and more than the last; and their sum.
    waiting
        Pushes that have come and are not acknowledged.
    uncommitted
        Operations that it has applied and that whoever comes after it (the rest of the chain, a
        store or files) has not acknowledged: how far replication is behind.
    """

    shard: int
    epoch: int
    head: bool
    version: int
    updates: int
    duplicates: int
    staleness: tuple[int, ...]
    staleness_sum: int
    waiting: int
    uncommitted: int


class Tally:
    """Counts what one replica applies and has to answer. All calls come from one event loop."""

    def __init__(self) -> None:
        self.updates = 0
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.staleness_sum = 0
        self.waiting = 0

    def add(self, updates: Iterable[AppliedUpdate]) -> None:
        """Count updates that were just applied."""
        for update in updates:
            self.updates += 1
            self.staleness[bisect_left(STALENESS_BOUNDS, update.staleness)] += 1
            self.staleness_sum += update.staleness

    @contextmanager
    def one_more_waits(self) -> Iterator[None]:
        """Count a push until it is answered."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
