"""Costs in time on virtual nodes: links and ports, event loops, disks, starts and detection.

Costs are constants or follow a distribution; the shipped profiles have measured ones. Computing is
no cost of nodes: a training function draws the duration of a gradient from `Gradient`, and sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated

from dps.core.ranges import Checked, NotNegative, Positive, number

Bandwidth = Annotated[float, number("a number above 0, or infinity", lambda x: x > 0)]
Probability = Annotated[float, number("0 to 1", lambda x: 0 <= x <= 1)]
Multiple = Annotated[float, number("a number, 1 or above", lambda x: 1 <= x < math.inf)]


@dataclass(frozen=True, slots=True)
class Gradient(Checked):
    """The duration of computing a gradient: a lognormal distribution, with stragglers."""

    seconds: NotNegative = 0.0  # the median
    spread: NotNegative = 0.0  # the standard deviation of the logarithm; 0: all take the same time
    straggling: Probability = 0.0  # of gradients that take `factor` times the time
    factor: Multiple = 1.0

    def draw(self, random: Random) -> Iterator[float]:
        """Yield the seconds of one gradient after the other, without end."""
        while True:
            seconds = self.seconds
            if self.spread:
                seconds *= math.exp(random.gauss(0, self.spread))
            yield seconds * self.factor if random.random() < self.straggling else seconds


@dataclass(frozen=True, slots=True)
class Link(Checked):
    """How messages travel between hosts."""

    latency: Positive  # mean seconds from one host to another; a message takes half of it or more
    # Bytes per second that leave a host, and that reach one. Messages in transit share it evenly:
    # each gets its share of the more crowded of its two ends.
    bandwidth: Bandwidth = math.inf


@dataclass(frozen=True, slots=True)
class Service(Checked):
    """How long the event loop of a process is busy with a message, while others wait."""

    message: NotNegative = 0.0  # seconds per message that arrives, request or reply
    byte: NotNegative = 0.0  # additional seconds per byte
    update: NotNegative = 0.0  # and per byte of a gradient that is applied, or sent down a chain


@dataclass(frozen=True, slots=True)
class Disk(Checked):
    """How long files take."""

    latency: NotNegative = 0.0  # seconds per piece of work that reads or writes
    bandwidth: Bandwidth = math.inf  # bytes per second

    def seconds(self, nbytes: int) -> float:
        """How long it takes to read or write some bytes."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True, slots=True)
class Profile(Checked):
    """Times of virtual nodes and links, in seconds."""

    name: str  # of the profile, which results carry
    link: Link
    service: Service = Service()
    disk: Disk = Disk()
    gradient: Gradient = Gradient()
    work: NotNegative = 0.002  # the longest duration of work in a thread, such as a large update
    start: NotNegative = 0.1  # until a node that is started has joined
    actor: NotNegative = 0.0  # from the creation of an actor until its creator learns of it
    detection: NotNegative = 0.02  # until the scheduler notices that a process is gone


# For tests of behaviour, which are quick: only latency costs time.
PLENTY = Profile("plenty", Link(0.0003))
