"""The plain charts of the replications: lines with bands, as SVG, PDF, PNG and CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flows.report.figures.figure import Drawing, Table, Width, write_files
from flows.report.figures.style import (
    Key,
    Look,
    footnote,
    for_page,
    legend_above,
    line_key,
    look,
    panel,
    percent_ticks,
    value_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What is drawn first is the thickest, so that lines which lie on others leave these to be seen.
THICKEST, THINNEST, THINNER = 2.0, 0.9, 0.25
HOLLOW_DASHES = (0, (1.5, 1.5))
FEW = 20  # points, of which each has a marker
SIDESTEP = 1.09  # by which factor the points of one line lie beside those of the next


class Dot(NamedTuple):
    """A point of a line, with the band around it if there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """Lines by name over one pair of axes.

    Attributes
    ----------
    name
        Of its files.
    caption
        What it shows, in one sentence.
    told
        What stands at the foot of the figure: of how many seeds it is, and which interval.
    dashed
        Lines that are drawn dashed and with hollow markers: published ones, or what is compared to.
        Each has the colour of the solid line in the same place.
    logarithmic
        Whether the horizontal axis is.
    share
        Whether values are shares: they are in per cent, and no band goes beyond 0 and 1.
    lowest
        Where the vertical axis begins at least, of values that are no share.
    beside
        Whether the points of lines that lie on others are drawn beside each other, on a logarithmic
        axis, with bars in the place of bands.
    width
        Of its files.
    """

    name: str
    caption: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[Dot]]
    told: str = ""
    dashed: frozenset[str] = field(default_factory=frozenset)
    logarithmic: bool = False
    share: bool = False
    lowest: float = 0.0
    beside: bool = False
    width: Width = "single"

    def write(self, folder: Path) -> None:
        """Write `<name>.svg`, `.pdf`, `.png` and `.csv`.

        Raises
        ------
        StoreUnavailable
            The folder cannot be written.
        """
        write_files([self.drawing], folder)

    def for_page(self) -> str:
        """Return the figure for use inside a page."""
        return for_page(self.drawing.svg)

    def csv(self) -> str:
        """Return every point, one line each; empty where there is no band."""
        return self.drawing.csv

    @cached_property
    def drawing(self) -> Drawing:
        """The chart as it is drawn, with its points."""
        rows = [
            (name, dot.x, dot.y, *self._band(dot))
            for name, dots in self.lines.items()
            for dot in dots
        ]
        table = Table(("line", self.x_label, self.y_label, "low", "high"), tuple(rows))
        return Drawing(self.name, self.caption, "", self._drawn(), table, width=self.width)

    def _drawn(self) -> Figure:
        figure, axes = panel()
        keys: list[Key] = []
        looks = self._looks()
        for place, (name, dots) in enumerate(self.lines.items()):
            keys.append(self._draw(axes, name, dots, looks[name], place))
        if self.logarithmic:
            axes.set_xscale("log")
            axes.set_xticks(sorted({dot.x for dots in self.lines.values() for dot in dots}))
            axes.set_xticks([], minor=True)
            axes.xaxis.set_major_formatter("{x:g}")
        value_axis(
            axes,
            [bound for dots in self.lines.values() for dot in dots for bound in self._reach(dot)],
            lowest=self.lowest,
            highest=1.0 if self.share else math.inf,
            near=self.share,
        )
        if self.share:
            percent_ticks(axes)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        legend_above(figure, keys)
        if self.told:
            footnote(figure, self.told)
        return figure

    def _looks(self) -> dict[str, Look]:
        solid = [name for name in self.lines if name not in self.dashed]
        dashed = [name for name in self.lines if name in self.dashed]
        return {name: look(i) for names in (solid, dashed) for i, name in enumerate(names)}

    def _draw(self, axes: Axes, name: str, dots: Sequence[Dot], own: Look, place: int) -> Key:
        hollow = name in self.dashed
        dashes = HOLLOW_DASHES if hollow else own.dashes
        marker = own.marker if len(dots) <= FEW else ""
        aside = SIDESTEP ** (place - (len(self.lines) - 1) / 2) if self.beside else 1.0
        x, y = [dot.x * aside for dot in dots], [dot.y for dot in dots]
        axes.plot(
            x,
            y,
            color=own.colour,
            linestyle=dashes,
            linewidth=max(THINNEST, THICKEST - THINNER * place),
            marker=marker,
            markersize=4,
            markeredgewidth=0.8,
            fillstyle="none" if hollow else "full",
        )
        low, high = zip(*map(self._reach, dots), strict=True) if dots else ((), ())
        if self.beside:
            axes.vlines(x, low, high, color=own.colour, linewidth=1)
        else:
            axes.fill_between(x, low, high, color=own.colour, alpha=0.14, linewidth=0)
        key = line_key(name, own.colour, marker, dashes)
        if hollow:
            key.handle.set_fillstyle("none")
        return key

    def _reach(self, dot: Dot) -> tuple[float, float]:
        low, high = self._band(dot)
        return (dot.y if low is None else low), (dot.y if high is None else high)

    def _band(self, dot: Dot) -> tuple[float | None, float | None]:
        """The bounds of a dot's band, within what the values can be."""
        low, high = dot.low, dot.high
        if not self.share:
            return low, high
        return (None if low is None else max(0.0, low)), (None if high is None else min(1.0, high))
