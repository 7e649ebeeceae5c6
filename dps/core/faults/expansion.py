"""How what is drawn or recurs becomes a plan of single faults: ranges, processes, flapping, traces.

The plan that comes out is plain data and depends on nothing but what was written and the seed. What
is drawn follows from the seed and the place of its entry alone: moments are the same for all
strategies of a seed, however long each of them takes to recover.
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
    Among,
    AtSeconds,
    AtUpdates,
    Corrupt,
    Fault,
    FaultPlan,
    InChain,
    Kill,
    Seat,
    told,
)
from dps.errors import ConfigurationError

MOST_FAULTS = 1000
# Below, the gaps between failures are beyond what a float can hold.
LEAST_SHAPE = 0.01
MOST_LOG_DEVIATION = 10.0

Distribution = Literal["exponential", "weibull", "lognormal"]
Unit = Literal["seconds", "updates"]


@dataclass(frozen=True, slots=True)
class Between:
    """A moment drawn uniformly: from `low` up to, and not including, `high`.

    A range whose length is a multiple of the period of something, such as checkpoints, has every
    phase of it with the same chance.

    Parameters
    ----------
    low, high
        In seconds from the start of the training, or in updates, which are whole numbers.
    unit
        Which of them.
    """

    low: float
    high: float
    unit: Unit = "seconds"

    def __post_init__(self) -> None:
        least = 1 if self.unit == "updates" else 0
        if not least <= self.low < self.high < math.inf:
            raise ConfigurationError(
                f"between {self.low:g} and {self.high:g} {self.unit}: expected two numbers from "
                f"{least}, the smaller first"
            )
        if self.unit == "updates" and not (self.low % 1 == self.high % 1 == 0):
            raise ConfigurationError(
                f"between {self.low:g} and {self.high:g} updates: expected whole numbers"
            )

    def draw(self, rng: random.Random) -> AtSeconds | AtUpdates:
        """Draw a moment."""
        if self.unit == "updates":
            return AtUpdates(rng.randrange(int(self.low), int(self.high)))
        return AtSeconds(self.low + (self.high - self.low) * rng.random())


@dataclass(frozen=True, slots=True)
class Process:
    """A renewal process of failures: the gaps between their moments are independent draws.

    A gap is from the begin of one fault (or from the start of the training) to the begin of the
    next, so that the moments do not depend on how long a fault, or a recovery, lasts.

    Parameters
    ----------
    mtbf
        Mean time between failures: the mean of the gaps, in seconds or in updates.
    until
        No fault begins later than this, counted from the start of the training.
    distribution
        Of the gaps.
    shape
        Of the Weibull distribution, 0.01 or more; below 1, failures come in bursts. Of the
        lognormal one, the standard deviation of the logarithm of a gap, 0.01 to 10.
    unit
        What gaps are counted in.
    """

    mtbf: float
    until: float
    distribution: Distribution = "exponential"
    shape: float = 1.0
    unit: Unit = "seconds"

    def __post_init__(self) -> None:
        for name in ("mtbf", "until", "shape"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name}={value}, expected more than 0")
        if self.shape < LEAST_SHAPE:
            raise ConfigurationError(f"shape={self.shape}, expected {LEAST_SHAPE} or more")
        if self.distribution == "lognormal" and self.shape > MOST_LOG_DEVIATION:
            raise ConfigurationError(
                f"shape={self.shape} of a lognormal distribution, expected {MOST_LOG_DEVIATION:g} "
                "at most"
            )
        if self.distribution not in get_args(Distribution):
            raise ConfigurationError(f"distribution={self.distribution!r} is unknown")

    def gap(self, rng: random.Random) -> float:
        """Draw the gap from the begin of one fault to that of the next."""
        match self.distribution:
            case "exponential":
                return rng.expovariate(1 / self.mtbf)
            case "weibull":
                scale = self.mtbf / math.gamma(1 + 1 / self.shape)
                return rng.weibullvariate(scale, self.shape)
            case "lognormal":
                return rng.lognormvariate(math.log(self.mtbf) - self.shape**2 / 2, self.shape)

    def moment(self, at: float) -> AtSeconds | AtUpdates:
        """Return a moment of the process: seconds as they are, updates as the next whole number."""
        if self.unit == "updates":
            return AtUpdates(max(1, math.ceil(at)), optional=True)
        return AtSeconds(at, optional=True)


@dataclass(frozen=True, slots=True)
class Recurring:
    """A fault that comes again and again at random; its own moment does not count."""

    fault: Fault
    process: Process


@dataclass(frozen=True, slots=True)
class Each:
    """Faults of several nodes, which recur at random and independently; their moments do not count.

    When a node fails follows from its name, and not from which others there are: strategies that
    have different nodes meet the same moments at those that they have in common.
    """

    faults: FaultPlan
    process: Process


@dataclass(frozen=True, slots=True)
class Flapping:
    """A fault that comes `times` times, each `up_seconds` after the end of the one before."""

    fault: Fault
    times: int
    up_seconds: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A fault, or what flaps, whose moment is drawn from a range; its own moment does not count."""

    entry: Fault | Flapping
    moment: Between


@dataclass(frozen=True, slots=True)
class Recorded:
    """The faults of a recorded trace."""

    faults: FaultPlan


# What is written as one entry. An `After` in it counts entries, in a plan it counts faults.
Entry = Fault | Recurring | Each | Flapping | Drawn | Recorded


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
        case Each(faults, process):
            of_all = rng.getrandbits(64)
            for fault in faults:
                own = random.Random(f"{of_all}, {told(fault.target)}")
                yield from _recurrences(fault, process, own)
        case Flapping(fault, times, up_seconds):
            fault = _whoever_has_the_place(fault)
            again = After(0, _down(fault) + up_seconds)
            yield fault
            yield from (replace(fault, when=again) for _ in range(times - 1))
        case Drawn(drawn, moment):
            when = moment.draw(rng)
            if isinstance(drawn, Flapping):
                yield from _faults(replace(drawn, fault=replace(drawn.fault, when=when)), rng)
            else:
                yield replace(drawn, when=when)
        case Recorded(faults):
            yield from map(_whoever_has_the_place, faults)
        case _:
            yield entry


def _recurrences(fault: Fault, process: Process, rng: random.Random) -> Iterator[Fault]:
    fault, free = _whoever_has_the_place(fault), 0.0
    lasts = _down(fault) if process.unit == "seconds" and _hits_the_same(fault) else 0.0
    now = process.gap(rng)
    for _ in range(MOST_FAULTS):
        if now > process.until:
            return
        if now >= free:  # what is down already cannot fail
            yield replace(fault, when=process.moment(now))
            free = now + lasts
        now += process.gap(rng)
    if now <= process.until:
        unit = "s" if process.unit == "seconds" else process.unit
        raise ConfigurationError(
            f"{fault.kind} of {told(fault.target)}: more than {MOST_FAULTS} faults within "
            f"{process.until:g} {unit}; expected a larger mtbf than {process.mtbf:g} {unit}"
        )


def _hits_the_same(fault: Fault) -> bool:
    """Whether a fault that recurs could hit a node again that it has not let go yet."""
    return not (isinstance(fault, Kill) and isinstance(fault.target, Among | InChain))


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
