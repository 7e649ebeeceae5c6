"""Owns the rows of applied updates until they are sent on as `Applied` events."""

from __future__ import annotations

from collections.abc import Collection

from dps.core.shard import AppliedUpdate
from dps.events import Applied, Sink
from dps.protocol.figures import Tally
from dps.protocol.transport import Clock

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
