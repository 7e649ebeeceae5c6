"""Published claims and what came of them: holds, does not hold, or not resolved.

A claim is judged by an interval alone. It holds where all of the interval of the effect is on its
side of a bound, and does not hold where all of it is on the other side. Fewer than three seeds
resolve nothing. The claims of a paper are judged together, by intervals that are so wide that all
of them cover what is true with a probability of 95% (Bonferroni); shown are those of 95% each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flows.analysis.statistics import (
    CONFIDENCE,
    FEWEST_SEEDS,
    SIGNIFICANCE,
    Interval,
    interval,
    p_of_equal,
)

Verdict = Literal["holds", "does not hold", "not resolved"]
HEADINGS = ("claim", "published", "found", "verdict")


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper claims, and what was found.

    Attributes
    ----------
    claim
        In words.
    published
        The published figure, or a dash.
    found
        Effect and interval, in words.
    verdict
        Whether it holds.
    """

    claim: str
    published: str
    found: str
    verdict: Verdict

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The claim as a row under `HEADINGS`."""
        return self.claim, self.published, self.found, self.verdict


@dataclass(frozen=True, slots=True)
class Measurement:
    """A claim with what was measured for it, to be judged once all claims are known.

    Attributes
    ----------
    claim, published
        As of `Claim`.
    values
        The effect, one value for each seed.
    least, most
        What the effect is claimed to be between.
    unit, digits, over
        How the effect is told.
    note
        What else was found.
    refuted
        Whether that alone is against the claim.
    """

    claim: str
    published: str
    values: Sequence[float]
    least: float = -math.inf
    most: float = math.inf
    unit: str = ""
    digits: int = 2
    over: str = "seeds"
    note: str = ""
    refuted: bool = False


def judged(measurements: Sequence[Measurement]) -> list[Claim]:
    """Judge all claims of a paper together."""
    level = confidence(len(measurements))
    return [Claim(m.claim, m.published, _found(m), _verdict(m, level)) for m in measurements]


def confidence(claims: int) -> float:
    """Return the level of each interval at which so many cover all true effects in 95%."""
    return 1 - SIGNIFICANCE / claims


def judge(effect: Interval, least: float = -math.inf, most: float = math.inf) -> Verdict:
    """Say whether an effect is more than `least` and less than `most`, as its interval shows."""
    if effect.low is None or effect.high is None or effect.n < FEWEST_SEEDS:
        return "not resolved"
    if least < effect.low and effect.high < most:
        return "holds"
    if effect.high <= least or most <= effect.low:
        return "does not hold"
    return "not resolved"


def mean_of(values: Sequence[float], level: float = CONFIDENCE) -> Interval:
    """Return the mean with its interval, always the same for the same values."""
    return interval(values, np.random.default_rng(0), level)


def told(effect: Interval, unit: str, digits: int = 2, over: str = "seeds") -> str:
    """Say an effect with its interval, as in "0.83 × (95% interval 0.80 to 0.86; 5 seeds)"."""

    def number(value: float) -> str:
        return f"{value:.{digits}f}".replace("-", "−")

    if effect.low is None or effect.high is None:
        return f"{number(effect.mean)}{unit} (one {over.removesuffix('s')})"
    bounds = f"{number(effect.low)} to {number(effect.high)}"
    return f"{number(effect.mean)}{unit} (95% interval {bounds}; {effect.n} {over})"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; a bar within a cell does not end it."""
    lines = [headings, ["---"] * len(headings), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


# -- parts -------------------------------------------------------------------------------------


def _found(measured: Measurement) -> str:
    if not measured.values:
        return "nothing to judge by"
    effect = mean_of(measured.values)
    return told(effect, measured.unit, measured.digits, measured.over) + measured.note


def _verdict(measured: Measurement, level: float) -> Verdict:
    if measured.refuted:
        return "does not hold"
    if not measured.values:
        return "not resolved"
    effect = mean_of(measured.values, level)
    if effect.low == effect.high and p_of_equal(effect.n) > 1 - level:
        # Too few equal values say nothing of how much others would vary.
        effect = replace(effect, low=None, high=None)
    return judge(effect, measured.least, measured.most)
