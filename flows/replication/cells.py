"""Figures of cells that two versions of a replication have both run, seed by seed.

Verdicts are about differences between strategies, on a choice of cells. Whether virtual time has
the times, prices and accuracies of real processes is asked here, of every cell that both have: as
virtual minus real of the same seed, where the real figures of the seeds were kept, and else as a
difference of means without an interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from flows.analysis.statistics import Interval
from flows.replication.claims import mean_of
from flows.replication.findings import Table
from flows.replication.verdicts import CellFigure

TITLE: Final = "Cells of real processes, on virtual time"
NEAR: Final = 0.05  # of the real figure, where there is no interval of it
# How a figure is told: its unit, and digits after the point.
FIGURES: Final[Mapping[str, tuple[str, int]]] = {
    "final accuracy": ("", 3),
    "gap": ("s", 2),
    "pace": ("per s", 1),
    "price": ("mUSD", 3),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure of real processes and the same of virtual time, over the same seeds.

    `difference` is virtual minus real, `paired` by seeds where the real figures of each were kept.
    The `real` interval is that of its mean.
    """

    figure: str
    real: Interval
    virtual: float
    difference: Interval
    paired: bool

    @property
    def within(self) -> bool | None:
        """Whether virtual time is within the interval of real processes; None without one."""
        if self.real.low is None or self.real.high is None:
            return None
        return self.real.low <= self.virtual <= self.real.high

    @property
    def near(self) -> bool:
        """Whether the two are within 5% of each other."""
        return abs(self.difference.mean) <= NEAR * abs(self.real.mean)

    def tell(self) -> str:
        """Return both and the difference, as in "1.24, 1.45: +0.21 [+0.19, +0.23]"."""
        digits = FIGURES[self.figure][1]
        low, high = self.difference.low, self.difference.high
        bounds = ""
        if low is not None and high is not None:
            bounds = f" [{_signed(low, digits)}, {_signed(high, digits)}]"
        told = f"{number(self.real.mean, digits)}, {number(self.virtual, digits)}"
        return f"{told}: {_signed(self.difference.mean, digits)}{bounds}"


def cells_compared(
    real: Sequence[CellFigure], virtual: Sequence[CellFigure]
) -> tuple[list[str], list[Table]]:
    """Return what is to be said of the cells that both have, and a row for each of them."""
    mine = {(each.cell, each.figure): each for each in virtual}
    found: dict[tuple[str, str, str], list[Pair]] = {}
    seeds: dict[tuple[str, str, str], int] = {}
    for each in real:
        other = mine.get((each.cell, each.figure))
        pair = None if other is None else _pair(each, other)
        if pair is not None:
            found.setdefault(each.cell, []).append(pair)
            seeds[each.cell] = pair.difference.n
    if not found:
        return [], []
    headings = ["configuration", "condition", "seeds"]
    headings += [f"{name}{f', {unit}' if unit else ''}" for name, (unit, _) in FIGURES.items()]
    rows = []
    for cell, pairs in found.items():
        told = {pair.figure: pair.tell() for pair in pairs}
        rows.append(
            [f"{cell[0]}: {cell[1]}", cell[2] or "–", str(seeds[cell])]
            + [told.get(name, "–") for name in FIGURES]
        )
    said = _told([pair for pairs in found.values() for pair in pairs], len(found))
    return [said], [Table(TITLE, headings, rows)]


# -- parts -------------------------------------------------------------------------------------


def number(value: float, digits: int) -> str:
    """Return a number with a real minus, and without one before zeros."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def _signed(value: float, digits: int) -> str:
    """A number with its sign, and without one before zeros."""
    text = number(value, digits)
    return f"+{text}" if value > 0 and float(text) != 0 else text


def _pair(real: CellFigure, virtual: CellFigure) -> Pair | None:
    """Both over the seeds that they share; None where there are none, or a mean is of others."""
    theirs, mine = real.by_seed, virtual.by_seed
    shared = [seed for seed in real.seeds if seed in mine]
    if not shared or (not theirs and len(shared) < len(real.seeds)):
        return None
    virtually = fmean(mine[seed] for seed in shared)
    if not theirs:
        n = len(shared)
        less = Interval(virtually - real.mean, None, None, n)
        return Pair(real.figure, Interval(real.mean, None, None, n), virtually, less, paired=False)
    really = mean_of([theirs[seed] for seed in shared])
    less = mean_of([mine[seed] - theirs[seed] for seed in shared])
    return Pair(real.figure, really, virtually, less, paired=True)


def _told(pairs: Sequence[Pair], cells: int) -> str:
    bounded = [pair for pair in pairs if pair.within is not None]
    near = sum(pair.near for pair in pairs)
    said = (
        f"Of {len(pairs)} figures of {cells} cells that both have run (real, virtual: virtual "
        f"minus real, over the same seeds), {near} are within {NEAR:.0%} of each other"
    )
    if not any(pair.paired for pair in pairs):
        return (
            f"{said}. The difference is one of means and not paired: of this run of real processes "
            "the figures of single seeds were not kept, so there is no interval of it."
        )
    inside = sum(bool(pair.within) for pair in bounded)
    return (
        f"{said}; {inside} of the {len(bounded)} with an interval of 95% of real processes lie "
        "within it. Differences are paired by seeds, with intervals of 95%."
    )
