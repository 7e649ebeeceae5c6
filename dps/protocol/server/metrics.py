"""The metrics of a replica, and the events of the updates that it applied."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from dps.core.shard import AppliedUpdate
from dps.events import Applied
from dps.protocol.server.node import ServerNode

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class Ledger:
    """Counts the updates that one replica applies, and records them if anything listens.

    `staleness` is their histogram: updates up to each of `STALENESS_BOUNDS`, and above the last.
    `waiting` are pushes that are not acknowledged, `duplicates` those that were applied before.
    """

    def __init__(self, node: ServerNode, shard: int) -> None:
        self.updates = 0
        self.duplicates = 0
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.staleness_sum = 0
        self.waiting = 0
        self._node = node
        self._shard = shard
        self._rows: dict[tuple[int, bool], list[tuple[float, AppliedUpdate]]] = {}

    def add(self, epoch: int, head: bool, updates: Collection[AppliedUpdate]) -> None:
        """Record updates that were just applied."""
        for update in updates:
            self.updates += 1
            self.staleness[bisect_left(STALENESS_BOUNDS, update.staleness)] += 1
            self.staleness_sum += update.staleness
        if self._node.group.recorded:
            now = self._node.clock.now()
            self._rows.setdefault((epoch, head), []).extend((now, update) for update in updates)

    def flush(self) -> None:
        """Emit the updates that were recorded since the last flush."""
        rows_by_epoch, self._rows = self._rows, {}
        for (epoch, head), rows in rows_by_epoch.items():
            if rows:
                self._node.emit(self._event(epoch, head, rows))

    def _event(self, epoch: int, head: bool, rows: list[tuple[float, AppliedUpdate]]) -> Applied:
        return Applied(
            self._node.clock.now(),
            self._node.name,
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
