"""Schedules: the learning rate as a function of a shard's version.

The version is part of the shard's state, which is replicated, saved and restored. So a schedule
needs no state of its own: after a recovery it goes on where the weights are, and updates that were
lost are taken at their rates again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from dps.core import ranges
from dps.core.rules.rule import OfAnother, factor_at


class Schedule(Protocol):
    """How the learning rate depends on the version of the shard."""

    def factor(self, version: int) -> float:
        """Return the factor on the learning rate, 0 or above.

        Parameters
        ----------
        version
            How many updates the shard had applied before this step, from 0.
        """
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """The learning rate as it is."""

    def factor(self, version: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class StepDecay:
    """The learning rate is multiplied by the same number again and again: ``StepLR`` of torch.

    Parameters
    ----------
    every
        After how many updates of the shard, at least 1.
    by
        By what, in (0, 1] as a rule; above 0.
    """

    every: int
    by: float = 0.1

    def __post_init__(self) -> None:
        ranges.count(self, "every", 1, "updates")
        ranges.positive(self, "by")

    def factor(self, version: int) -> float:
        """Return `by` to the power of how often it was time."""
        return float(self.by ** (version // self.every))


@dataclass(frozen=True, slots=True)
class Cosine:
    """The learning rate falls along half a cosine, and stays at its end.

    least + (1 − least)·(1 + cos(π·v / updates)) / 2 for a version v up to `updates`, as of
    ``CosineAnnealingLR`` of torch; that one rises again afterwards.

    Parameters
    ----------
    updates
        After how many updates of the shard it is at its end, at least 1.
    least
        Which part of the learning rate is left then, in [0, 1).
    """

    updates: int
    least: float = 0.0

    def __post_init__(self) -> None:
        ranges.count(self, "updates", 1, "updates")
        ranges.fraction(self, "least")

    def factor(self, version: int) -> float:
        """Return the factor at this version."""
        done = min(version / self.updates, 1.0)
        return self.least + (1 - self.least) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The learning rate rises evenly to its full size; another schedule follows.

    `SequentialLR` of torch, with `LinearLR` first.

    Parameters
    ----------
    updates
        After how many updates of the shard it has its full size, at least 1.
    then
        What follows; it counts from there on.
    start
        With which part of the learning rate it begins, in [0, 1).
    """

    updates: int
    then: Schedule = Constant()
    start: float = 0.0

    def __post_init__(self) -> None:
        ranges.count(self, "updates", 1, "updates")
        ranges.fraction(self, "start")
        _require_schedule(self, "then", self.then)

    def factor(self, version: int) -> float:
        """Return the factor at this version."""
        if version >= self.updates:
            return self.then.factor(version - self.updates)
        return self.start + (1 - self.start) * version / self.updates


@dataclass(frozen=True, slots=True)
class Scheduled(OfAnother):
    """Another rule, with a learning rate that follows a schedule.

    Parameters
    ----------
    rule
        Any update rule; the schedule's factor is one on its learning rate.
    schedule
        `Constant`, `StepDecay`, `Cosine`, `WarmUp`, or one of your own.

    Notes
    -----
    Time is the version of the shard: how many updates it has applied, of all workers together. An
    update that touches some of the shards only is one for these. Gradients that are summed into one
    step, as after an outage, are one step at the rate of the first, and count as many.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        _require_schedule(self, "schedule", self.schedule)

    def factor_at(self, version: int) -> float:
        """The schedule's factor; one of the rule's own comes on top."""
        return self.schedule.factor(version) * factor_at(self.rule, version)


def _require_schedule(owner: object, field: str, schedule: object) -> None:
    if isinstance(schedule, type) or not hasattr(schedule, "factor") or hasattr(schedule, "step"):
        raise ranges.refused(
            f"{type(owner).__name__}: {field}",
            schedule,
            "a schedule such as Cosine(1000)",
        )
