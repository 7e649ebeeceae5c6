"""What curves over several seeds say together: their mean, and how sure that is.

The band is the 95% interval of the mean (Student's t) from three seeds on, the range of two, and
nothing for one. It is given only where every seed has a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flows.analysis.statistics import FEWEST_SEEDS, student_reach
from flows.report.figures.style import count_told

POINTS = 61
NOTE = (
    "Thick: mean over seeds; band: 95% interval of the mean (with two seeds: their range); thin: "
    "each seed."
)

Floats = np.ndarray


def told_of(counts: Sequence[int]) -> str:
    """Say of how many seeds each curve is, and what its band is."""
    if max(counts) == 1:
        return "n = 1 seed: no interval"
    said = count_told(counts)
    if max(counts) < FEWEST_SEEDS:
        return f"{said}; line: mean, band: range"
    rest = " (of two seeds: range)" if 2 in counts else ""
    return f"{said}; line: mean, band: 95% t interval of the mean{rest}"


@dataclass(frozen=True)
class Curve:
    """One trial's values; x never goes back, and a value that is NaN is a gap."""

    strategy: str
    seed: int | None
    x: Floats
    y: Floats

    def at(self, x: Floats) -> Floats:
        """Return its values at some x, between its points by straight lines, NaN beyond them."""
        if len(self.x) == 0:
            return np.full(len(x), np.nan)
        return np.asarray(np.interp(x, self.x, self.y, left=np.nan, right=np.nan))

    def thinned(self) -> Curve:
        """Return the curve with no more points than a reader can see."""
        if len(self.x) <= 2 * POINTS:
            return self
        x = np.linspace(self.x[0], self.x[-1], POINTS)
        return Curve(self.strategy, self.seed, x, self.at(x))


@dataclass(frozen=True)
class Band:
    """Mean of several curves at some x, and the bounds of the band around it."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def band(
    curves: Sequence[Curve], lowest: float = -math.inf, highest: float = math.inf
) -> Band | None:
    """Return the band of curves of one strategy; None where they have nothing in common.

    Its bounds are cut at `lowest` and `highest`, beyond which no value can be.
    """
    drawn = [curve for curve in curves if len(curve.x)]
    if not drawn:
        return None
    first, last = max(c.x[0] for c in drawn), min(c.x[-1] for c in drawn)
    if last <= first:
        return None
    x = np.linspace(first, last, POINTS)
    values = np.vstack([curve.at(x) for curve in drawn])
    mean = values.mean(axis=0)
    low, high = bounds(values, mean)
    return Band(x, mean, np.maximum(low, lowest), np.minimum(high, highest))


def bounds(values: Floats, mean: Floats) -> tuple[Floats, Floats]:
    """Return the bounds of the band around the mean of each column; a row is a seed."""
    if len(values) < FEWEST_SEEDS:
        return values.min(axis=0), values.max(axis=0)
    reach = student_reach(values)
    return mean - reach, mean + reach
