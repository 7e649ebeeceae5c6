"""A drawing: a figure with its name, words and table of what it shows, and its files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dps.errors import StoreUnavailable
from flows.report.figures.style import to_png, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """

    name: str
    title: str
    note: str
    figure: Figure
    table: Table
    strategy: str | None = None

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG file."""
        return to_svg(self.figure, self.name)

    @cached_property
    def csv(self) -> str:
        """The table as a CSV file."""
        return self.table.to_csv()


@dataclass(frozen=True)
class Chapter:
    """Drawings on one subject, which are read together."""

    name: str
    title: str
    note: str
    drawings: tuple[Drawing, ...]


def write_files(drawings: Iterable[Drawing], folder: Path) -> None:
    """Write every drawing as SVG, PNG and CSV into `folder`.

    Raises
    ------
    StoreUnavailable
        The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in drawings:
            (folder / f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")
            (folder / f"{drawing.name}.csv").write_text(drawing.csv, encoding="utf-8")
            (folder / f"{drawing.name}.png").write_bytes(to_png(drawing.figure))
    except OSError as error:
        raise StoreUnavailable(
            f"the figures cannot be written to {folder}: {error.strerror or error}"
        ) from error


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
