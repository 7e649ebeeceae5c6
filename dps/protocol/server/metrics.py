"""The metrics of a replica, and the events of the updates that it applied."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import TYPE_CHECKING

from dps.core.shard import AppliedUpdate
from dps.events import Applied

if TYPE_CHECKING:
    from dps.protocol.server.replica import Replica

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class Ledger:
    """Counts the updates that one replica applies, and records them if anything listens.

    `staleness` is their histogram: updates up to each of `STALENESS_BOUNDS`, and above the last.
    `waiting` are pushes that are not acknowledged, `duplicates` those that were applied before.
    """

    def __init__(self, replica: Replica) -> None:
        self.updates = 0
        self.duplicates = 0
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.staleness_sum = 0
        self.waiting = 0
        self._replica = replica
        self._rows: list[tuple[float, AppliedUpdate]] = []

    def add(self, updates: Collection[AppliedUpdate]) -> None:
        """Record updates that were just applied."""
        for update in updates:
            self.updates += 1
            self.staleness[bisect_left(STALENESS_BOUNDS, update.staleness)] += 1
            self.staleness_sum += update.staleness
        node = self._replica.node
        if node.group.recorded:
            now = node.clock.now()
            self._rows.extend((now, update) for update in updates)

    def flush(self) -> None:
        """Emit the updates that were recorded since the last flush, all of one epoch."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        replica, node = self._replica, self._replica.node
        event = Applied(
            node.clock.now(),
            node.name,
            replica.shard,
            replica.epoch,
            replica.is_head,
            times=tuple(t for t, _ in rows),
            workers=tuple(u.id.worker for _, u in rows),
            incarnations=tuple(u.id.incarnation for _, u in rows),
            seqs=tuple(u.id.seq for _, u in rows),
            versions=tuple(u.version for _, u in rows),
            staleness=tuple(u.staleness for _, u in rows),
            staleness_seconds=tuple(t - u.based_at if u.based_at else 0.0 for t, u in rows),
            replayed=tuple(u.replayed for _, u in rows),
        )
        node.emit(event)
