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
    """The duration of computing a gradient: a lognormal distribution, with stragglers.

    Attributes
    ----------
    seconds
        The median.
    spread
        The standard deviation of the logarithm; 0: all take the same time.
    straggling, factor
        The fraction of gradients that take `factor` times as long.
    """

    _BOUNDS: ClassVar[Bounds] = {"straggling": (0.0, 1.0), "factor": (1.0, math.inf)}
    seconds: float = 0.0
    spread: float = 0.0
    straggling: float = 0.0
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

    Attributes
    ----------
    latency
        Mean seconds from one host to another; a message takes half of it or more.
    bandwidth
        Bytes per second that leave a host, and that reach one. Messages in transit share it evenly:
        each gets its share of the more crowded of its two ends.
    """

    _BOUNDS: ClassVar[Bounds] = {"latency": _TINY, "bandwidth": _TINY}
    latency: float
    bandwidth: float = math.inf


@dataclass(frozen=True, slots=True)
class Service(_Costs):
    """How long the event loop of a process is busy with a message, while others wait.

    Attributes
    ----------
    message
        Seconds per message that arrives, request or reply.
    byte
        Additional seconds per byte.
    update
        Additional seconds per byte of a gradient that a server applies, or passes down a chain.
    """

    message: float = 0.0
    byte: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True)
class Disk(_Costs):
    """How long files take: seconds per piece of work that reads or writes, and bytes per second."""

    _BOUNDS: ClassVar[Bounds] = {"bandwidth": _TINY}
    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, nbytes: int) -> float:
        """How long it takes to read or write some bytes."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Profile(_Costs):
    """What costs time, in seconds; see `docs/virtual-time.md` for what is not modelled.

    Attributes
    ----------
    name
        The mark of results.
    work
        The longest duration of work in a thread, such as a large update.
    start
        Until a node that is started has joined.
    actor
        From the creation of an actor until its creator learns of it.
    detection
        Until the scheduler notices that a process is gone.
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


# For tests of behaviour, which are quick: only latency costs time.
PLENTY = Profile("plenty", Link(0.0003))
