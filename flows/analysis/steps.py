"""The count of gradients that workers have pushed: the common step of a trial's series.

Runs of different speed align on it. It counts work that was done, so it never goes back: updates
that a failure undid stay counted.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from dps.events import Acked, TrialResumed
from flows.records.record import Record


class Steps:
    """Tells the gradients pushed up to a moment.

    A trial that was resumed goes on from what its checkpoints held.

    Attributes
    ----------
    first, last
        The count where the record begins, and where it ends.
    """

    def __init__(self, record: Record) -> None:
        self._times = pushed_times(record)
        resumed = record.of(TrialResumed)
        self.first = resumed[0].updates if resumed else 0
        self.last = self.first + len(self._times)

    def at(self, t: float) -> int:
        """Return how many gradients workers knew to be safe at `t`, in seconds since the epoch."""
        return self.first + bisect_right(self._times, t)


def pushed_times(record: Record) -> list[float]:
    """Return when each different gradient was first acknowledged on some shard, in order."""
    return sorted(pushed(record).values())


def pushed(record: Record) -> dict[tuple[str, int, int], float]:
    """Return the same by worker, incarnation and sequence number."""
    first: dict[tuple[str, int, int], float] = {}
    for batch in record.of(Acked):
        for t, seq, outcome in zip(batch.times, batch.seqs, batch.outcomes, strict=True):
            key = (batch.worker, batch.incarnation, seq)
            if outcome != "dropped":
                first[key] = min(t, first.get(key, math.inf))
    return first
