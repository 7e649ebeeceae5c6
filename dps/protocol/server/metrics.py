"""What a replica counts: the numbers of its metrics, and the events of what it applied."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dps.core.shard import AppliedUpdate
from dps.events import Applied, Sink
from dps.protocol.transport import Clock

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
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
    def pending_push(self) -> Iterator[None]:
        """Count a push until it is answered."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


Row = tuple[float, AppliedUpdate]


class Ledger:
    """Collects what one replica applies, in columns. All calls come from one event loop.

    Parameters
    ----------
    recorded
        Whether anybody listens to events; without, updates are counted only.

    Attributes
    ----------
    tally
        The counts.
    """

    def __init__(self, node: str, shard: int, clock: Clock, emit: Sink, recorded: bool) -> None:
        self.tally = Tally()
        self._recorded = recorded
        self._node = node
        self._shard = shard
        self._clock = clock
        self._emit = emit
        self._rows: dict[tuple[int, bool], list[Row]] = {}

    def add(self, epoch: int, head: bool, updates: Collection[AppliedUpdate]) -> None:
        """Note updates that were just applied."""
        self.tally.add(updates)
        if not self._recorded:
            return
        now = self._clock.now()
        self._rows.setdefault((epoch, head), []).extend((now, update) for update in updates)

    def flush(self) -> None:
        """Emit what was noted since the last flush."""
        rows_by_epoch, self._rows = self._rows, {}
        for (epoch, head), rows in rows_by_epoch.items():
            if rows:
                self._emit(self._event(epoch, head, rows))

    def _event(self, epoch: int, head: bool, rows: list[Row]) -> Applied:
        return Applied(
            self._clock.now(),
            self._node,
            self._shard,
            epoch,
            head,
            times=tuple(t for t, _ in rows),
            workers=tuple(u.id.worker for _, u in rows),
            incarnations=tuple(u.id.incarnation for _, u in rows),
            seqs=tuple(u.id.seq for _, u in rows),
            versions=tuple(u.version for _, u in rows),
            staleness=tuple(u.staleness for _, u in rows),
            staleness_seconds=tuple(t - u.based_at if u.based_at else 0.0 for t, u in rows),
            replayed=tuple(u.replayed for _, u in rows),
        )
