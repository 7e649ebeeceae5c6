"""How what recurs becomes a plan of single faults: random processes, flapping and traces.

The plan that comes out is plain data and depends on nothing but what was written and the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

from dps.core.faults.plan import (
    After,
    AtSeconds,
    Corrupt,
    Fault,
    FaultPlan,
    Kill,
    Seat,
    told,
)
from dps.errors import ConfigurationError

MOST_FAULTS = 1000
# Below, the gaps between failures are beyond what a float can hold.
LEAST_SHAPE = 0.01

Distribution = Literal["exponential", "weibull"]


@dataclass(frozen=True, slots=True)
class Process:
    """A random process of failures and repairs.

    Parameters
    ----------
    mtbf
        Mean time between failures: the mean of the time from the end of one fault (or from the
        start of the training) to the next fault, in seconds.
    until
        No fault begins later than this, in seconds from the start of the training.
    distribution
        Of those gaps.
    shape
        Of the Weibull distribution, 0.01 or more; below 1, failures come in bursts.
    """

    mtbf: float
    until: float
    distribution: Distribution = "exponential"
    shape: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mtbf", "until", "shape"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name}={value}, expected more than 0")
        if self.shape < LEAST_SHAPE:
            raise ConfigurationError(f"shape={self.shape}, expected {LEAST_SHAPE} or more")
        if self.distribution not in get_args(Distribution):
            raise ConfigurationError(f"distribution={self.distribution!r} is unknown")

    def gap(self, rng: random.Random) -> float:
        """Draw the time from the end of one fault to the next."""
        if self.distribution == "exponential":
            return rng.expovariate(1 / self.mtbf)
        return rng.weibullvariate(self.mtbf / math.gamma(1 + 1 / self.shape), self.shape)


@dataclass(frozen=True, slots=True)
class Recurring:
    """A fault that comes again and again at random; its own moment does not count."""

    fault: Fault
    process: Process


@dataclass(frozen=True, slots=True)
class Flapping:
    """A fault that comes `times` times, each `up_seconds` after the end of the one before."""

    fault: Fault
    times: int
    up_seconds: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """The faults of a recorded trace."""

    faults: FaultPlan


# What is written as one entry. An `After` in it counts entries, in a plan it counts faults.
Entry = Fault | Recurring | Flapping | Recorded


@dataclass(frozen=True, slots=True)
class Expanded:
    """A plan, and for each of its faults the number of the entry that it is from."""

    plan: FaultPlan
    origins: tuple[int, ...]


def expand(entries: Sequence[Entry], seed: int) -> Expanded:
    """Return the plan that entries stand for; equal seeds give equal plans.

    A fault after an entry that stands for several comes after the first of them.

    Raises
    ------
    ConfigurationError
        It would bring more than 1,000 faults.
    """
    parts = [
        tuple(_faults(entry, random.Random(f"seed {seed}, entry {number} of the faults")))
        for number, entry in enumerate(entries)
    ]
    first = [0, *accumulate(map(len, parts))]
    if first[-1] > MOST_FAULTS:
        raise ConfigurationError(
            f"there are {first[-1]:,} faults in all, with all that recur; expected {MOST_FAULTS:,} "
            "at most"
        )
    plan = [
        _renumbered(fault, first, number, position)
        for number, part in enumerate(parts)
        for position, fault in enumerate(part)
    ]
    origins = [number for number, part in enumerate(parts) for _ in part]
    return Expanded(tuple(plan), tuple(origins))


def _faults(entry: Entry, rng: random.Random) -> Iterator[Fault]:
    match entry:
        case Recurring(fault, process):
            yield from _recurrences(fault, process, rng)
        case Flapping(fault, times, up_seconds):
            fault = _whoever_has_the_place(fault)
            again = After(0, _down(fault) + up_seconds)
            yield fault
            yield from (replace(fault, when=again) for _ in range(times - 1))
        case Recorded(faults):
            yield from map(_whoever_has_the_place, faults)
        case _:
            yield entry


def _recurrences(fault: Fault, process: Process, rng: random.Random) -> Iterator[Fault]:
    fault, count = _whoever_has_the_place(fault), 0
    now = process.gap(rng)
    while now <= process.until:
        if count == MOST_FAULTS:
            raise ConfigurationError(
                f"{fault.kind} of {told(fault.target)}: more than {MOST_FAULTS} faults within "
                f"{process.until:g} s; expected a larger mtbf than {process.mtbf:g} s"
            )
        yield replace(fault, when=AtSeconds(now, optional=True))
        count += 1
        now += _down(fault) + process.gap(rng)


def _whoever_has_the_place(fault: Fault) -> Fault:
    """What recurs hits the replacement too, which has another name."""
    if isinstance(fault, Corrupt) or not isinstance(fault.target, str):
        return fault
    return replace(fault, target=Seat(fault.target))


def _down(fault: Fault) -> float:
    """For how long a fault lasts, in seconds."""
    if isinstance(fault, Corrupt):
        return 0.0
    return (fault.back_after or 0.0) if isinstance(fault, Kill) else fault.seconds


def _renumbered(fault: Fault, first: Sequence[int], number: int, position: int) -> Fault:
    """Have an `After` count faults instead of entries, or repeats within the entry."""
    if not isinstance(fault.when, After):
        return fault
    other = first[fault.when.fault] if position == 0 else first[number] + position - 1
    return replace(fault, when=replace(fault.when, fault=other))
