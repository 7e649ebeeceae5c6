"""A drawing: a figure with its name, words and table of what it shows, and its files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.files import write_whole
from flows.report.figures.style import (
    DOUBLE,
    SINGLE,
    fit,
    height_of,
    to_pdf,
    to_png,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Width = Literal["single", "double"]
WIDTHS: dict[Width, float] = {"single": SINGLE, "double": DOUBLE}
# Of what is not in rows, when it is two columns wide instead of one.
GROWTH = 1.3
# What pages and programs need, and what goes to print, which takes a second for every few figures.
SCREEN, PRINT = ("svg", "csv"), ("pdf", "png")


@dataclass(frozen=True)
class Table:
    """What a figure shows, as numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_csv(self) -> str:
        """Return it as CSV with a header; numbers with six digits, empty where there is none."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_cell(value) for value in row] for row in self.rows)
        return text.getvalue()


@dataclass(frozen=True)
class Drawing:
    """A figure as it is shown and kept.

    Attributes
    ----------
    name
        Of its files, without an ending; unique in an experiment.
    title, note
        What it shows, and how to read it.
    table
        The numbers that are drawn.
    strategy
        The one strategy that it is about; None if it is about several.
    width
        Of its files, unless another is asked for; on a page it is one column wide.
    rows
        Whether it is as high as its rows need, whatever its width.
    """

    name: str
    title: str
    note: str
    figure: Figure
    table: Table
    strategy: str | None = None
    width: Width = "single"
    rows: bool = False

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG file, one column wide."""
        return self.file("svg", "single").decode()

    def file(self, kind: str, width: Width) -> bytes:
        """Return the figure as a file of a kind: "svg", "pdf", "png", or "csv" for its table."""
        if kind == "csv":
            return self.csv.encode()
        if kind == "svg" and width == "single" and "svg" in vars(self):
            return self.svg.encode()
        fit(self.figure, WIDTHS[width], self._height * (1.0 if self._same(width) else GROWTH))
        if kind == "svg":
            return to_svg(self.figure, self.name).encode()
        return {"pdf": to_pdf, "png": to_png}[kind](self.figure)

    def _same(self, width: Width) -> bool:
        return self.rows or width == "single"

    @cached_property
    def _height(self) -> float:
        """In inches, besides legend and footnote: as it was drawn, one column wide."""
        return height_of(self.figure)

    @cached_property
    def csv(self) -> str:
        """The table as a CSV file."""
        return self.table.to_csv()


@dataclass(frozen=True)
class Chapter:
    """Drawings on one subject, which are read together.

    `opening` names the one that a page opens with which begins with this chapter; "": the first.
    """

    name: str
    title: str
    note: str
    drawings: tuple[Drawing, ...]
    opening: str = ""

    @property
    def first(self) -> Drawing:
        """The drawing that a page opens with."""
        named = (each for each in self.drawings if each.name == self.opening)
        return next(named, self.drawings[0])


def write_files(
    drawings: Iterable[Drawing],
    folder: Path,
    kinds: Sequence[str] = (*SCREEN, *PRINT),
    width: Width | None = None,
) -> None:
    """Write every drawing into `folder`.

    Parameters
    ----------
    kinds
        Which files: "svg", "pdf", "png" and "csv". Those of other kinds that an earlier call has
        left are removed, for they show what was recorded then.
    width
        Of all of them; None: each has the width that suits it.

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
    """
    for drawing in drawings:
        for kind in (*SCREEN, *PRINT):
            path = folder / f"{drawing.name}.{kind}"
            if kind in kinds:
                write_whole(path, drawing.file(kind, width or drawing.width), "a figure")
            else:
                path.unlink(missing_ok=True)


def slugs(names: Sequence[str]) -> dict[str, str]:
    """Return for each name a part of a file's name, different from those of the others."""
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^a-zA-Z0-9.]+", "-", name).strip("-.").lower()
        number = sum(taken == plain or taken.startswith(f"{plain}~") for taken in found.values())
        found[name] = f"{plain}~{number + 1}" if number else plain
    return found


def _cell(value: Any) -> Any:
    if value is None or value != value:  # NaN is a gap
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
