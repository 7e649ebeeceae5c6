"""Owns the common step of a trial's series: how many gradients its shards have applied so far.

Runs of different speed align on it. It counts work that was done, so it never goes back: updates
that a failure undid stay counted.
"""

from __future__ import annotations

import bisect

from dps.events import TrainingStarted, TrialResumed
from flows.lineage import applied_rows
from flows.record import Record


class Steps:
    """Tells the gradients applied up to a moment, the mean over shards.

    A trial that was resumed goes on from what its checkpoints held.
    """

    def __init__(self, record: Record) -> None:
        self._times = sorted(row.t for row in applied_rows(record) if row.head)
        started, resumed = record.of(TrainingStarted), record.of(TrialResumed)
        self._shards = max(1, started[0].shards) if started else 1
        self._before = resumed[0].updates if resumed else 0

    def at(self, t: float) -> float:
        """Return how many gradients were applied until `t`, in seconds since the Unix epoch."""
        return self._before + bisect.bisect_right(self._times, t) / self._shards

    @property
    def moments(self) -> list[float]:
        """When each update of each shard was applied, in order."""
        return self._times
