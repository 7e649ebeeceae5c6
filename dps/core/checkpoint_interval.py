"""How often to write checkpoints: an interval that follows from costs and failures.

Rare checkpoints lose much at a failure, frequent ones hold training up. Between failures that come
M seconds apart on the average, with writes that hold it up for C seconds each, the least is lost if
a write begins about √(2CM) seconds after the one before (Young 1974; Daly 2006 has the further
terms). Both numbers are estimated while training goes on. No clock is read here: whoever asks says
when something happened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

JEFFREYS = 0.5  # failures that are counted before any has been seen, over no time at all

MEMORY = 0.9  # the weight of an observation after the next one: about ten of them count

PAUSE = 0.25  # of the updates that come during a write, how many more come before the next one


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """What a group has seen of failures.

    Attributes
    ----------
    failures
        How often a shard had to be restored.
    exposure
        For how many seconds shards were served, all of them together.
    """

    failures: int = 0
    exposure: float = 0.0

    def mean_time_between(self, prior: float | None = None) -> float:
        """Estimate the mean time between two failures of one shard, in seconds.

        It is the inverse of the rate that is to be expected next, if failures come at a constant
        rate of which nothing was known before (the prior of Jeffreys, Γ(½, 0)): so long as there
        was no failure, twice the time that has passed without.

        Parameters
        ----------
        prior
            What the user takes it for: counts as much as one failure in that time, Γ(1, prior).
        """
        if prior is None:
            return self.exposure / (JEFFREYS + self.failures)
        return (prior + self.exposure) / (1 + self.failures)


def daly(cost: float, mtbf: float) -> float:
    """Return Daly's interval between the end of a write and the begin of the next, in seconds.

    It is within a percent of the optimum of his model also where a write costs nearly as much as
    the time between two failures, and the latter itself where it costs twice that or more.

    Parameters
    ----------
    cost
        What a write takes away from training, in seconds, 0 or more.
    mtbf
        The mean time between failures, in seconds, 0 or more.
    """
    if cost >= 2 * mtbf:
        return mtbf
    part = cost / (2 * mtbf)
    young = math.sqrt(2 * cost * mtbf)
    return young * (1 + math.sqrt(part) / 3 + part / 9) - cost


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a shard's writes, as a mean of the last ones.

    Attributes
    ----------
    rate
        How many updates a second are committed while nothing is written.
    cost
        For how many seconds a write holds the shard up: what it takes, less the time in which as
        many updates would have come without it.
    during
        How many updates come during a write.
    """

    rate: float
    cost: float
    during: float


class WriteCosts:
    """Measures what writes hold up, from when states come to be committed.

    Time is divided into periods with a write and without, each from the arrival of one state to
    that of a later one. A period with a write lasts until the first state comes after it: this has
    the updates that had to wait. If none had, it comes a little later, with what came in between.
    """

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None  # when the last state came, and its version
        self._since: tuple[float, int] | None = None  # where the present period began
        self._began: float | None = None  # when the write began that belongs to it
        self._took: float | None = None  # and how long it took, when it has ended
        self._free = _Mean()  # seconds without a write, and updates in them
        self._writes = _Mean()  # seconds that writes held up, and updates during them

    @property
    def estimate(self) -> Estimate | None:
        """What is known so far; None: no write has been seen, or nothing between two."""
        if not self._writes.weight or not self._free.first:
            return None
        rate = self._free.second / self._free.first
        return Estimate(
            rate,
            self._writes.first / self._writes.weight,
            self._writes.second / self._writes.weight,
        )

    def came(self, now: float, version: int) -> bool:
        """Take note that a state came to be committed; return whether a write has been measured."""
        measured = self._took is not None and self._since is not None
        if self._took is not None:
            if self._since is not None:
                self._note_write(self._since, self._took, now, version)
            self._began = self._took = None
            self._since = now, version
        elif self._since is None:
            self._since = now, version
        self._last = now, version
        return measured

    def begins(self, now: float) -> None:
        """Take note that a write begins."""
        if self._last is not None and self._since is not None and self._began is None:
            seconds, updates = self._last[0] - self._since[0], self._last[1] - self._since[1]
            if seconds > 0:
                self._free.note(seconds, updates)
        self._since = self._last
        self._began, self._took = now, None

    def ends(self, now: float) -> None:
        """Take note that the write has ended."""
        if self._began is not None:
            self._took = now - self._began

    def fails(self) -> None:
        """Take note that the write has failed, which tells nothing of what one costs."""
        self._began = self._took = self._since = None

    def _note_write(self, since: tuple[float, int], took: float, now: float, version: int) -> None:
        seconds, updates = now - since[0], version - since[1]
        if not self._free.second:
            return  # it is not known how many would have come
        without = updates * self._free.first / self._free.second
        # Whoever had nothing to push meanwhile was not held up by it.
        self._writes.note(min(max(0.0, seconds - without), took), updates)


class _Mean:
    """Sums of two numbers, in which what is older counts less."""

    def __init__(self) -> None:
        self.first = self.second = self.weight = 0.0

    def note(self, first: float, second: float) -> None:
        self.first = MEMORY * self.first + first
        self.second = MEMORY * self.second + second
        self.weight = MEMORY * self.weight + 1


@dataclass(frozen=True, slots=True)
class Chosen:
    """An interval in updates, and what it was chosen by: see `AutoInterval.choose`."""

    every: int
    cost: float
    rate: float
    mtbf: float


@dataclass(frozen=True, slots=True)
class AutoInterval:
    """The choice of an interval, within bounds.

    Attributes
    ----------
    least, most
        The shortest and the longest interval, in updates.
    mtbf
        What the user takes the mean time between failures of a shard for, in seconds; None: it is
        not known.
    begins_early
        Whether a write begins when half of the interval is over.
    """

    least: int
    most: int
    mtbf: float | None
    begins_early: bool

    def choose(self, known: Estimate, history: FailureHistory) -> Chosen:
        """Choose at how many updates the next checkpoint must be complete.

        Never so few that the next write is due when one ends: what goes on between two of them
        could not be measured, and there is no pause in which acks do not wait.
        """
        mtbf = history.mean_time_between(self.mtbf)
        apart = max(known.rate * daly(known.cost, mtbf), (1 + PAUSE) * known.during)
        every = (2 if self.begins_early else 1) * math.ceil(min(apart, self.most))
        return Chosen(min(max(every, self.least), self.most), known.cost, known.rate, mtbf)
