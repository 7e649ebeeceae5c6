"""Owns published claims and what came of them: holds, does not hold, or not resolved.

A claim is judged by an interval alone. It holds where all of the 95% interval of the effect is on
its side of a bound, and does not hold where all of it is on the other side. Fewer than three seeds
resolve nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flows.statistics import FEWEST_SEEDS, Interval

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


def judge(effect: Interval, least: float = -math.inf, most: float = math.inf) -> Verdict:
    """Say whether an effect is more than `least` and less than `most`, as its interval shows."""
    if effect.low is None or effect.high is None or effect.n < FEWEST_SEEDS:
        return "not resolved"
    if least < effect.low and effect.high < most:
        return "holds"
    if effect.high <= least or most <= effect.low:
        return "does not hold"
    return "not resolved"


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
