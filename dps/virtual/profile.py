"""What costs time on virtual nodes: links and ports, event loops, disks, starts and detection.

Costs are constants or follow a distribution; the shipped profiles have measured ones. Computing is
no cost of nodes: a training function draws the duration of a gradient from `Gradient`, and sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import ClassVar

from dps.errors import ConfigurationError

Bounds = Mapping[str, tuple[float, float]]  # by field; others are 0 or more
_TINY = (1e-12, math.inf)


class _Costs:
    """Checks that costs are within their bounds."""

    __slots__ = ()
    _BOUNDS: ClassVar[Bounds] = {}

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            least, most = self._BOUNDS.get(field.name, (0.0, math.inf))
            if isinstance(value, float | int) and not least <= value <= most:
                expected = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
                raise ConfigurationError(f"{field.name}={value}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Gradient(_Costs):
    """The duration of computing a gradient: a lognormal distribution, with stragglers."""

    _BOUNDS: ClassVar[Bounds] = {"straggling": (0.0, 1.0), "factor": (1.0, math.inf)}
    seconds: float = 0.0  # the median
    spread: float = 0.0  # the standard deviation of the logarithm; 0: all take the same time
    straggling: float = 0.0  # the fraction of gradients that take `factor` times as long
    factor: float = 1.0

    def draw(self, random: Random) -> Iterator[float]:
        """Yield the seconds of one gradient after the other, without end."""
        while True:
            seconds = self.seconds
            if self.spread:
                seconds *= math.exp(random.gauss(0, self.spread))
            yield seconds * self.factor if random.random() < self.straggling else seconds


@dataclass(frozen=True, slots=True)
class Link(_Costs):
    """How messages travel between hosts.

    Messages in transit share the bandwidth evenly: each gets its share of the more crowded of its
    two ends.
    """

    _BOUNDS: ClassVar[Bounds] = {"latency": _TINY, "bandwidth": _TINY}
    latency: float  # mean seconds from one host to another; a message takes half of it or more
    bandwidth: float = math.inf  # bytes per second that leave a host, and that reach one


@dataclass(frozen=True, slots=True)
class Service(_Costs):
    """How long the event loop of a process is busy with a message, while others wait."""

    message: float = 0.0  # seconds per message that arrives, request or reply
    byte: float = 0.0  # additional seconds per byte
    update: float = 0.0  # and per byte of a gradient that a server applies, or passes down a chain


@dataclass(frozen=True, slots=True)
class Disk(_Costs):
    """How long files take."""

    _BOUNDS: ClassVar[Bounds] = {"bandwidth": _TINY}
    latency: float = 0.0  # seconds per piece of work that reads or writes
    bandwidth: float = math.inf  # bytes per second

    def seconds(self, nbytes: int) -> float:
        """How long it takes to read or write some bytes."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Profile(_Costs):
    """What costs time, in seconds; see `docs/virtual-time.md` for what is not modelled."""

    name: str  # of the profile, which results carry
    link: Link
    service: Service = Service()
    disk: Disk = Disk()
    gradient: Gradient = Gradient()
    work: float = 0.002  # the longest duration of work in a thread, such as a large update
    start: float = 0.1  # until a node that is started has joined
    actor: float = 0.0  # from the creation of an actor until its creator learns of it
    detection: float = 0.02  # until the scheduler notices that a process is gone


# For tests of behaviour, which are quick: only latency costs time.
PLENTY = Profile("plenty", Link(0.0003))
