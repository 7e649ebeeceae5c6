"""Owns the common step of a trial's series: how many gradients its workers have pushed so far.

Runs of different speed align on it. It counts work that was done, so it never goes back: updates
that a failure undid stay counted.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from dps.events import Acked, TrialResumed
from flows.record import Record


class Steps:
    """Tells the gradients pushed up to a moment.

    A trial that was resumed goes on from what its checkpoints held.
    """

    def __init__(self, record: Record) -> None:
        self._times = _pushed_times(record)
        resumed = record.of(TrialResumed)
        self._before = resumed[0].updates if resumed else 0

    def at(self, t: float) -> int:
        """Return how many gradients workers knew to be safe at `t`, in seconds since the epoch."""
        return self._before + bisect_right(self._times, t)


def _pushed_times(record: Record) -> list[float]:
    first: dict[tuple[str, int, int], float] = {}
    for batch in record.of(Acked):
        for t, seq in zip(batch.times, batch.seqs, strict=True):
            key = (batch.worker, batch.incarnation, seq)
            first[key] = min(t, first.get(key, math.inf))
    return sorted(first.values())
