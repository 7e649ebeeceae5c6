"""Owns the common step of a trial's series: how many gradients its workers have pushed so far.

Runs of different speed align on it. It counts work that was done, so it never goes back: updates
that a failure undid stay counted.
"""

from __future__ import annotations

from bisect import bisect_right

from dps.events import TrialResumed
from flows.learning import pushed_times
from flows.record import Record


class Steps:
    """Tells the gradients pushed up to a moment.

    A trial that was resumed goes on from what its checkpoints held.
    """

    def __init__(self, record: Record) -> None:
        self._times = pushed_times(record)
        resumed = record.of(TrialResumed)
        self._before = resumed[0].updates if resumed else 0

    def at(self, t: float) -> int:
        """Return how many gradients workers knew to be safe at `t`, in seconds since the epoch."""
        return self._before + bisect_right(self._times, t)
