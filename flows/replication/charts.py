"""The plain charts of the replications: lines with bands, each as SVG and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.report.figures.style import for_page, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

from flows.files import write_whole

SIZE = (7.2, 3.6)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}


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
    dashed
        Lines that are drawn dashed: published ones, or what is compared to.
    logarithmic
        Whether the horizontal axis is.
    """

    name: str
    caption: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[Dot]]
    dashed: frozenset[str] = field(default_factory=frozenset)
    logarithmic: bool = False

    def write(self, folder: Path) -> None:
        """Write `<name>.svg` and `<name>.csv`.

        Raises
        ------
        StoreUnavailable
            The folder cannot be written.
        """
        write_whole(folder / f"{self.name}.svg", self.svg(), "a figure")
        write_whole(folder / f"{self.name}.csv", self.csv(), "the points of a figure")

    def for_page(self) -> str:
        """Return the figure for use inside a page."""
        return for_page(self.svg())

    def csv(self) -> str:
        """Return every point, one line each; empty where there is no band."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["line", self.x_label, self.y_label, "low", "high"])
        for name, dots in self.lines.items():
            writer.writerows([name, *dot] for dot in dots)
        return text.getvalue()

    def svg(self) -> str:
        """Return the figure as a file of its own."""
        return to_svg(self._drawn(), self.name)

    def _drawn(self) -> Figure:
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=SIZE, layout="constrained")
            axes = figure.add_subplot()
            for number, (name, dots) in enumerate(self.lines.items()):
                colour = COLOURS[number % len(COLOURS)]
                x, y = [dot.x for dot in dots], [dot.y for dot in dots]
                marker = "o" if len(dots) <= 20 else ""
                dashes = "--" if name in self.dashed else "-"
                axes.plot(x, y, dashes, marker=marker, color=colour, markersize=4, label=name)
                low = [dot.y if dot.low is None else dot.low for dot in dots]
                high = [dot.y if dot.high is None else dot.high for dot in dots]
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            if self.logarithmic:
                axes.set_xscale("log")
                axes.set_xticks(sorted({dot.x for dots in self.lines.values() for dot in dots}))
                axes.set_xticks([], minor=True)
                axes.xaxis.set_major_formatter("{x:g}")
            axes.set_xlabel(self.x_label)
            axes.set_ylabel(self.y_label)
            axes.legend(frameon=False, fontsize=8.5)
        return figure
