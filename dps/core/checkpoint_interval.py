"""The interval between checkpoints, chosen by the cost of writes and the rate of failures.

With M seconds between failures on average, and writes that delay training by C seconds each, the
loss is least if a write begins about √(2CM) seconds after the one before (Young 1974; Daly 2006 has
the further terms). Both numbers are estimated during training, from times that callers pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

JEFFREYS = 0.5  # failures that are counted in advance, over no time at all
MEMORY = 0.9  # the weight of an observation after the next one: about ten of them count
PAUSE = 0.25  # the least pause between two writes, as a share of the updates during a write


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """The failures of a group: `failures` restorations of shards in `exposure` shard-seconds."""

    failures: int = 0
    exposure: float = 0.0

    def mean_time_between(self, prior: float | None = None) -> float:
        """Estimate the mean time between two failures of one shard, in seconds."""
        # The inverse of the expected rate of a Poisson process with the prior of Jeffreys, Γ(½, 0),
        # or with the user's estimate as `prior`: one failure in that time, Γ(1, prior).
        if prior is None:
            return self.exposure / (JEFFREYS + self.failures)
        return (prior + self.exposure) / (1 + self.failures)


def daly(cost: float, mtbf: float) -> float:
    """Return Daly's interval between the end of a write and the begin of the next, in seconds."""
    # Within a percent of the optimum of his model.
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    young = math.sqrt(2 * cost * mtbf)
    return young * (1 + math.sqrt(part) / 3 + part / 9) - cost


@dataclass(frozen=True, slots=True)
class Estimate:
    """Means over a shard's last writes."""

    rate: float  # of commits without a write, per second
    # Delay by a write in seconds: its duration, less the time that its updates take without it.
    cost: float
    during: float  # number of updates during a write


class WriteCosts:
    """Measures the cost of writes by the arrival of states to be committed.

    Periods with and without a write last from one state to another. A period with a write ends with
    the first state after it, which has the updates that waited.
    """

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None  # arrival and version of the last state
        self._since: tuple[float, int] | None = None  # those at the begin of the period
        self._began: float | None = None  # when the write of the period began
        self._took: float | None = None  # its duration, once it has ended
        # Exponentially weighted sums: seconds without a write, and updates in them; delay by
        # writes, updates during them, and weights.
        self._free: tuple[float, ...] = (0.0, 0.0)
        self._writes: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def estimate(self) -> Estimate | None:
        """The estimate; None before the first write, and time without a write, were measured."""
        (seconds, updates), (cost, during, weight) = self._free, self._writes
        if not weight or not seconds:
            return None
        return Estimate(updates / seconds, cost / weight, during / weight)

    def came(self, now: float, version: int) -> bool:
        """Note the arrival of a state; return whether it completes the measurement of a write."""
        since, took = self._since, self._took
        self._last = now, version
        if took is not None:
            self._began = self._took = None
        if took is not None or since is None:
            self._since = now, version
        if took is None or since is None:
            return False
        seconds, updates = now - since[0], version - since[1]
        if self._free[1]:  # otherwise, the rate without a write is unknown
            without = updates * self._free[0] / self._free[1]
            # A pause of the workers themselves is no delay by the write.
            self._writes = _noted(self._writes, min(max(0.0, seconds - without), took), updates, 1)
        return True

    def begins(self, now: float) -> None:
        """Note the begin of a write."""
        if self._last is not None and self._since is not None and self._began is None:
            seconds, updates = self._last[0] - self._since[0], self._last[1] - self._since[1]
            if seconds > 0:
                self._free = _noted(self._free, seconds, updates)
        self._since = self._last
        self._began, self._took = now, None

    def ends(self, now: float) -> None:
        """Note the end of the write."""
        if self._began is not None:
            self._took = now - self._began

    def fails(self) -> None:
        """Note the failure of the write, whose cost is not measured."""
        self._began = self._took = self._since = None


def _noted(sums: tuple[float, ...], *new: float) -> tuple[float, ...]:
    return tuple(MEMORY * old + added for old, added in zip(sums, new, strict=True))


@dataclass(frozen=True, slots=True)
class AutoInterval:
    """Chooses an interval of `least` to `most` updates."""

    least: int
    most: int
    mtbf: float | None  # the user's estimate of the seconds between failures of a shard
    begins_early: bool  # whether a write begins after half of the interval

    def choose(self, known: Estimate, history: FailureHistory) -> tuple[int, float]:
        """Return the interval in updates, and the mean time between failures that it is for."""
        mtbf = history.mean_time_between(self.mtbf)
        # In a pause after each write, the rate is measured, and acks do not wait.
        apart = max(known.rate * daly(known.cost, mtbf), (1 + PAUSE) * known.during)
        every = (2 if self.begins_early else 1) * math.ceil(min(apart, self.most))
        return min(max(every, self.least), self.most), mtbf
