"""How long recoveries take: the distribution over all outages of all trials, by strategy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flows.report.figures.dataset import Subject, Trial, end, titled
from flows.report.figures.figure import Drawing, Table
from flows.report.figures.style import (
    count_told,
    footnote,
    legend_above,
    panel,
    percent_axis,
    strategy_keys,
)

FEWEST_OUTAGES = 3
FEWEST_FOR_BAND = 10  # of fewer, bands are as wide as the axes, and hide one another
# Of the longest recovery over the shortest: from there on a scale with equal distances hides many.
WIDE = 20.0
SECONDS = "seconds from a fault to the next update"
SHARE = "share of outages over"


@dataclass(frozen=True)
class Times:
    """Recoveries of one strategy: the seconds of those that were over, and of those that last."""

    over: tuple[float, ...]
    lasting: tuple[float, ...]

    @property
    def count(self) -> int:
        """How many outages there were."""
        return len(self.over) + len(self.lasting)


@dataclass(frozen=True)
class Distribution:
    """A distribution: the share of outages over by some seconds, with the 95% interval of each."""

    seconds: np.ndarray
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


def recovery_times(subject: Subject, condition: str) -> Drawing | None:
    """Draw the distributions of recovery times under one condition; None of too few outages."""
    found = {
        name: times
        for name in subject.strategies
        if (times := outage_times(subject.under(condition, name))).over
    }
    if not found or max(times.count for times in found.values()) < FEWEST_OUTAGES:
        return None
    figure, axes = panel()
    shortest = min(min(times.over) for times in found.values())
    longest = max(max(times.over + times.lasting) for times in found.values())
    log = shortest > 0 and longest > WIDE * shortest
    first, last = (shortest / 1.5, longest * 1.5) if log else (0.0, 1.06 * longest)
    rows: list[tuple[Any, ...]] = []
    for place, (name, times) in enumerate(found.items()):
        steps, look = distribution(times), subject.looks[name]
        if banded := min(each.count for each in found.values()) >= FEWEST_FOR_BAND:
            axes.fill_between(
                [first, *steps.seconds],
                [0.0, *steps.low],
                [0.0, *steps.high],
                step="post",
                color=look.colour,
                alpha=0.12,
                linewidth=0,
            )
        axes.plot(
            [first, *steps.seconds, last],
            [0.0, *steps.share, steps.share[-1]],
            drawstyle="steps-post",
            color=look.colour,
            linestyle=look.dashes,
            # So that one which lies on others leaves them to be seen.
            linewidth=max(1.0, 2.4 - 0.45 * place),
        )
        middle = int(np.searchsorted(steps.share, 0.5))
        if middle < len(steps.share):
            at = steps.seconds[middle], steps.share[middle]
            axes.plot(*at, look.marker, color=look.colour, markersize=4, markeredgecolor="white")
        ends = np.interp(times.lasting, steps.seconds, steps.share, left=0.0)
        axes.plot(times.lasting, ends, "|", color=look.colour, markersize=5)
        rows += [(name, *map(float, row)) for row in zip(*vars(steps).values(), strict=True)]
        rows += [(name, lasted, "not over", None, None) for lasted in times.lasting]
    percent_axis(axes, SHARE)
    axes.set_xlabel(SECONDS)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xticks([], minor=True)
    axes.set_xlim(first, last)
    legend_above(figure, strategy_keys(list(found), subject.looks))
    footnote(figure, _told(subject, condition, found, banded))
    return Drawing(
        subject.name("recovery-distribution", condition),
        titled("Distribution of recovery times", condition),
        "All outages of all trials, several of one trial included: the share that is over by a "
        "time (Kaplan and Meier's estimate, so that outages that were not over when the training "
        "ended count for as long as they lasted); marker: the median. Intervals take outages as "
        f"independent, also those of one trial; they are drawn from {FEWEST_FOR_BAND} outages on.",
        figure,
        Table(("strategy", SECONDS, SHARE, "low", "high"), tuple(rows)),
    )


def outage_times(trials: Sequence[Trial]) -> Times:
    """Return how long every outage of some trials took, or has lasted until the training ended."""
    over, lasting = list[float](), list[float]()
    for record, outcome in trials:
        for fault in outcome.faults:
            if fault.shard is None:
                continue
            if fault.rto_seconds is not None:
                over.append(fault.rto_seconds)
            else:
                lasting.append(max(0.0, end(record) - fault.began))
    return Times(tuple(sorted(over)), tuple(sorted(lasting)))


def distribution(times: Times) -> Distribution:
    """Return Kaplan and Meier's estimate with pointwise 95% intervals (log-log)."""
    from scipy import stats

    data = stats.CensoredData(uncensored=list(times.over), right=list(times.lasting))
    found = stats.ecdf(data).cdf
    with warnings.catch_warnings():
        # Where all or none are over the interval is not defined; there the whole range is left.
        warnings.simplefilter("ignore", RuntimeWarning)
        bounds = found.confidence_interval(method="log-log")
    low = np.nan_to_num(bounds.low.probabilities, nan=0.0)
    high = np.nan_to_num(bounds.high.probabilities, nan=1.0)
    return Distribution(
        found.quantiles, found.probabilities, np.clip(low, 0, 1), np.clip(high, 0, 1)
    )


def _told(subject: Subject, condition: str, found: dict[str, Times], banded: bool) -> str:
    outages = count_told([times.count for times in found.values()], "outage")
    trials = count_told([len(subject.under(condition, name)) for name in found], "trial")
    lasting = "; tick: not over at the end" if any(t.lasting for t in found.values()) else ""
    band = "band: pointwise 95% interval" if banded else "no interval"
    return f"{outages} of {trials[4:]} each; {band}{lasting}"
