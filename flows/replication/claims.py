"""Published claims and what came of them: holds, does not hold, or not resolved.

The claims of a paper are judged together, by the rule for those of an experiment
(`flows.analysis.statistics.decisions`): one holds where the effect is shown to be on its side of a
bound, and does not hold where it is shown to be on the other side, each corrected by Holm's method.
Shown are intervals at the level at which the claim was judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flows.analysis.statistics import CONFIDENCE, Difference, Interval, difference, interval
from flows.analysis.statistics.decisions import Decision, Verdict, between, decide

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
    effect
        What was found, in numbers; None: nothing to judge by.
    turn
        The bound on whose one side the effect is claimed to be; of two bounds, the lower.
    """

    claim: str
    published: str
    found: str
    verdict: Verdict
    effect: Interval | None = None
    turn: float = 0.0

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
    effects = [_effect(measured) for measured in measurements]
    regions = [between(measured.least, measured.most) for measured in measurements]
    return [
        Claim(
            measured.claim,
            measured.published,
            _found(measured, effect, decision),
            "does not hold" if measured.refuted else decision.verdict,
            _shown(effect, decision),
            measured.least if math.isfinite(measured.least) else measured.most,
        )
        for measured, effect, decision in zip(
            measurements, effects, decide(list(zip(effects, regions, strict=True))), strict=True
        )
    ]


def mean_of(values: Sequence[float], level: float = CONFIDENCE) -> Interval:
    """Return the mean with its interval, always the same for the same values."""
    return interval(values, np.random.default_rng(0), level)


def told(
    effect: Interval,
    unit: str,
    digits: int = 2,
    over: str = "seeds",
    level: float = CONFIDENCE,
) -> str:
    """Say an effect with its interval, as in "0.83 × (95% interval 0.80 to 0.86; 5 seeds)"."""

    def number(value: float) -> str:
        return f"{value:.{digits}f}".replace("-", "−")

    if effect.low is None or effect.high is None:
        few = f"{effect.n} {over}" if effect.n > 1 else f"one {over.removesuffix('s')}"
        return f"{number(effect.mean)}{unit} ({few})"
    bounds = f"{number(effect.low)} to {number(effect.high)}"
    return f"{number(effect.mean)}{unit} ({100 * level:.3g}% interval {bounds}; {effect.n} {over})"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; a bar within a cell does not end it."""
    lines = [headings, ["---"] * len(headings), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


# -- parts -------------------------------------------------------------------------------------


def _effect(measured: Measurement) -> Difference | None:
    if not measured.values:
        return None
    return difference(measured.values, np.random.default_rng(0))


def _shown(effect: Difference | None, decision: Decision) -> Interval | None:
    """The effect with its interval at the level at which its claim was judged."""
    if effect is None:
        return None
    low, high = effect.bounds(decision.confidence) or (None, None)
    return Interval(effect.mean, low, high, effect.n)


def _found(measured: Measurement, effect: Difference | None, decision: Decision) -> str:
    shown = _shown(effect, decision)
    if shown is None:
        return "nothing to judge by"
    level = decision.confidence
    return told(shown, measured.unit, measured.digits, measured.over, level) + measured.note
