"""What costs time on virtual nodes: links and ports, event loops, disks, starts and detection.

All costs are constants or drawn from a distribution; which they are is measured elsewhere, and
written down in a profile with where it comes from. Computing is none of the nodes' concern: whoever
trains draws what a gradient takes from `Gradient`, and sleeps for as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from random import Random

from dps.errors import ConfigurationError


def _no_less_than_zero(costs: object) -> None:
    for field in fields(costs):  # type: ignore[arg-type]
        value = getattr(costs, field.name)
        if isinstance(value, float | int) and not value >= 0:
            raise ConfigurationError(f"{field.name}={value}, expected 0 or more")


@dataclass(frozen=True, slots=True)
class Gradient:
    """What the computing of a gradient takes: a lognormal distribution, with stragglers.

    Attributes
    ----------
    seconds
        Half of the gradients take less.
    spread
        The standard deviation of the logarithm; 0: all take the same.
    straggling, factor
        Which fraction of them takes so many times as long.
    """

    seconds: float = 0.0
    spread: float = 0.0
    straggling: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        _no_less_than_zero(self)
        if self.straggling > 1:
            raise ConfigurationError(f"straggling={self.straggling}, expected a fraction")
        if self.factor < 1:
            raise ConfigurationError(f"factor={self.factor}, expected 1 or more")

    def draw(self, random: Random) -> Iterator[float]:
        """Yield how long one gradient after the other takes, without end."""
        while True:
            seconds = self.seconds
            if self.spread:
                seconds *= math.exp(random.gauss(0, self.spread))
            yield seconds * self.factor if random.random() < self.straggling else seconds


@dataclass(frozen=True, slots=True)
class Link:
    """How messages travel between hosts.

    Attributes
    ----------
    latency
        Mean seconds from one host to another; a message takes half of it or more.
    bandwidth
        Bytes a second that leave a host, and that reach one. Messages under way at once share it
        evenly: each has its share of the more crowded of its two ends.
    """

    latency: float
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _no_less_than_zero(self)
        for name in ("latency", "bandwidth"):
            if not getattr(self, name):
                raise ConfigurationError(f"{name}=0, expected more than 0")


@dataclass(frozen=True, slots=True)
class Service:
    """How long the event loop of a process is busy with a message, during which others wait.

    Attributes
    ----------
    message
        Seconds of each message that comes in, request or reply.
    byte
        Further seconds of each byte of it.
    update
        Further seconds of each byte of a gradient that a server applies, or passes down a chain.
    """

    message: float = 0.0
    byte: float = 0.0
    update: float = 0.0

    def __post_init__(self) -> None:
        _no_less_than_zero(self)


@dataclass(frozen=True, slots=True)
class Disk:
    """How long files take.

    Attributes
    ----------
    latency
        Seconds of each piece of work that reads or writes.
    bandwidth
        Bytes a second.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _no_less_than_zero(self)
        if not self.bandwidth:
            raise ConfigurationError("bandwidth=0, expected more than 0")

    def seconds(self, nbytes: int) -> float:
        """How long it takes to move so many bytes."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What costs time, in seconds; see `docs/virtual-time.md` for what is not modelled.

    Attributes
    ----------
    name
        What results are marked with.
    work
        The longest time of a piece of work that is given to a thread, such as a large update.
    start
        Until a node that is started is there.
    actor
        From when an actor is there until whoever asked for it has been told.
    detection
        Until the scheduler has noticed that a process is gone.
    """

    name: str
    link: Link
    service: Service = Service()
    disk: Disk = Disk()
    gradient: Gradient = Gradient()
    work: float = 0.002
    start: float = 0.1
    actor: float = 0.0
    detection: float = 0.02

    def __post_init__(self) -> None:
        _no_less_than_zero(self)


# For tests of behaviour, which are to be quick: nothing is scarce.
PLENTY = Profile("plenty", Link(0.0003))
