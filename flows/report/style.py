"""How figures look, and their files: sizes, colours, legends, SVG, PDF and PNG.

Figures are drawn for print: one or two columns of a page wide, no type below 7 points. Strategies
differ in colour, marker and dashes, as colour-blind readers need. `for_page` turns the
colours into CSS variables, which a page redefines for a dark screen.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dps.recovery.strategy import PRESETS

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, BAD = "#1c2127", "#5d6773", "#e3e7ec", "#c0362c"
STRATEGY_COLOURS = ("#cc5500", "#10306b", "#22a688", "#93205f", "#9a8500", "#4a94cf", "#4a4a4a")
STRATEGY_MARKERS = ("X", "s", "o", "D", "^", "v", "P", "<", "*", ">", "p")
STRATEGY_DASHES = ("--", "-.", "-", ":")
PART_COLOURS = ("#2f3e50", "#cfd6de", "#7d92a8", "#d8a545")
CSS_COLOURS = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    BAD: "bad",
    **{colour: f"strategy-{i}" for i, colour in enumerate(STRATEGY_COLOURS)},
    **{colour: f"part-{i}" for i, colour in enumerate(PART_COLOURS)},
}

SINGLE, DOUBLE = 3.3, 7.0  # inches: one column of a page, and two
HEIGHT = 2.05  # inches, of a panel
LETTERS = 21  # of the smallest type, for each inch
KEYS = 1.25  # entries of a legend for each inch, of short names

STYLE = Path(__file__).with_name("report.mplstyle")


@dataclass(frozen=True, slots=True)
class Look:
    """How one strategy looks in every figure."""

    colour: str
    marker: str = ""
    dashes: Any = "-"


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Return a look per strategy; presets have the same one in every experiment."""
    fixed = PRESETS if any(name in PRESETS for name in names) else ()
    kinds = (STRATEGY_COLOURS, STRATEGY_MARKERS, STRATEGY_DASHES)
    return {
        name: Look(*(kind[place % len(kind)] for kind in kinds))
        for place, name in enumerate(dict.fromkeys([*fixed, *names]))
        if name in names
    }


def panels(
    rows: int = 1, columns: int = 1, height: float = HEIGHT, shared: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return an empty figure with axes in rows and columns, each of a height in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SINGLE if columns == 1 else DOUBLE, rows * height))
    axes = figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared)
    return figure, list(axes.flat)


def row_axis(axes: Axes, names: Sequence[str], colours: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a figure from the top down."""
    axes.set_yticks(range(len(names)), names)
    for tick, colour in zip(axes.get_yticklabels(), colours, strict=True):
        tick.set_color(colour)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def key(name: str, look: Look, hollow: bool = False) -> Artist:
    """Return a legend's entry for a line; without a line where its dashes are "none"."""
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=look.colour,
        marker=look.marker,
        linestyle=look.dashes,
        fillstyle="none" if hollow else "full",
        label=name,
    )


def area_key(name: str, colour: str, alpha: float = 1.0) -> Artist:
    """Return a legend's entry for an area."""
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, linewidth=0, alpha=alpha, label=name)


def explain(figure: Figure, keys: Sequence[Artist], note: str = "") -> None:
    """Put a legend above a figure, and a note beneath: how many, which interval."""
    width = figure.get_figwidth()
    longest = max((len(str(key.get_label())) for key in keys), default=0)
    columns = max(1, int(width * KEYS * 14 / max(14, longest + 4)))
    if keys:
        figure.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)
    text = textwrap.fill(note, int(width * LETTERS))
    figure.text(0, 0, text, va="top", fontsize=7, color=MUTED)


def count_text(counts: Iterable[int], of: str = "seed") -> str:
    """Return a number of seeds, as in "n = 5 seeds" or "n = 3 to 5 seeds"."""
    found = sorted({*counts})
    number = f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"
    return f"n = {number} {of}" + "s" * (found[-1] != 1)


# -- files -------------------------------------------------------------------------------------


def slugs(names: Sequence[str]) -> dict[str, str]:
    """Return for each name a part of a file's name, different from those of the others."""
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^a-zA-Z0-9.]+", "-", name).strip("-.").lower()
        number = sum(taken == plain or taken.startswith(f"{plain}~") for taken in found.values())
        found[name] = f"{plain}~{number + 1}" if number else plain
    return found


def to_file(figure: Figure, form: str) -> bytes:
    """Return a figure as "svg", "pdf" or "png"; equal figures are equal files."""
    import matplotlib

    out = io.BytesIO()
    undated = {"svg": "Date", "pdf": "CreationDate", "png": "Software"}
    colour = "white" if form == "png" else "none"
    with matplotlib.rc_context(fname=STYLE):
        figure.savefig(out, format=form, facecolor=colour, metadata={undated[form]: None})
    return out.getvalue()


def for_page(figure: Figure, name: str) -> str:
    """Return a figure as SVG for use inside a page, whose width, font and colours it takes."""
    text = to_file(figure, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[^"]*pt"', "", text, count=2)
    text = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", text)
    # Ids of markers and clips, which other figures on the page have as well.
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", text)
    # Hundredths of a point are finer than any screen, and make half of the page.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    for colour, variable in CSS_COLOURS.items():
        text = text.replace(colour, f"var(--{variable}, {colour})")
    return text
