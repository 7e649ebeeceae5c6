"""How figures look: one colour and marker per strategy, panels, axes, legends, and their SVG.

Figures are drawn in the colours of a light page. `for_page` turns these into CSS variables, so that
a page can redefine them for a dark one. Colours come from Okabe and Ito's palette, which readers
with colour-blindness can tell apart; every strategy has a marker of its own besides.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from dps.protocol.durabilities.presets import PRESETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INK, MUTED, GRID, REFERENCE = "#1c2127", "#5d6773", "#e3e7ec", "#a9b2bd"
BAD = "#c0362c"
STRATEGY_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#b4558d", "#c78a00", "#3a94cf", "#7a6a53")
STRATEGY_MARKERS = ("X", "s", "o", "D", "^", "v", "P")
STRATEGY_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))
PART_COLOURS = ("#2f3e50", "#cfd6de", "#7d92a8", "#d8a545")
CSS_COLOURS = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    REFERENCE: "reference",
    BAD: "bad",
    **{colour: f"strategy-{i}" for i, colour in enumerate(STRATEGY_COLOURS)},
    **{colour: f"part-{i}" for i, colour in enumerate(PART_COLOURS)},
}

WIDTH, HEIGHT = 5.4, 3.2  # inches; narrow enough for text of 10 points to be read on a telephone
LEGEND_WIDTH, LEGEND_ENTRY, LEGEND_LETTER = 4.3, 0.36, 0.068  # inches

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "path.simplify_threshold": 0.3,
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
}


@dataclass(frozen=True, slots=True)
class Look:
    """How one strategy looks in every figure."""

    colour: str
    marker: str
    dashes: Any = "-"


class Key(NamedTuple):
    """An entry of a legend."""

    name: str
    handle: Any


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Return a look per strategy: presets have fixed ones, others take what is left in order."""
    order = list(dict.fromkeys([*PRESETS, *names]))
    return {name: _look(order.index(name)) for name in names}


def _look(place: int) -> Look:
    again, index = divmod(place, len(STRATEGY_COLOURS))
    dashes = STRATEGY_DASHES[again % len(STRATEGY_DASHES)]
    return Look(STRATEGY_COLOURS[index], STRATEGY_MARKERS[index], dashes)


# -- panels and axes ---------------------------------------------------------------------------


def panel(height: float = HEIGHT) -> tuple[Figure, Axes]:
    """Return an empty figure with one set of axes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), facecolor="none")
        return figure, figure.add_subplot(facecolor="none")


def percent_axis(axes: Axes, label: str, lowest: float = 0.0) -> None:
    """Have the vertical axis show shares from `lowest` to 1 in per cent."""
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(lowest, 1.0 + 0.02 * (1.0 - lowest))
    axes.set_ylabel(label)


def row_axis(axes: Axes, names: Sequence[str], colours: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a figure from the top down."""
    axes.set_yticks(range(len(names)), names)
    for tick, colour in zip(axes.get_yticklabels(), colours, strict=True):
        tick.set_color(colour)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def legend_above(axes: Axes, keys: Sequence[Key]) -> None:
    """Put a legend above the axes, in as many lines as it takes."""
    axes.legend(
        [key.handle for key in keys],
        [key.name for key in keys],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=_legend_columns([key.name for key in keys]),
        handlelength=1.4,
        handleheight=1,
        handletextpad=0.4,
        columnspacing=1.2,
        borderaxespad=0.2,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def _legend_columns(names: Sequence[str]) -> int:
    """How many entries fit beside one another; columns are as wide as their longest entry."""
    for columns in range(len(names), 1, -1):
        rows, longer = divmod(len(names), columns)
        sizes = [rows + (column < longer) for column in range(columns)]
        ends = list(accumulate(sizes))
        longest = [max(map(len, names[e - n : e])) for n, e in zip(sizes, ends, strict=True)]
        if sum(LEGEND_ENTRY + LEGEND_LETTER * length for length in longest) <= LEGEND_WIDTH:
            return columns
    return 1


def line_key(name: str, colour: str, marker: str = "", dashes: Any = "-") -> Key:
    """Return the legend's entry for a line, or for a marker alone where `dashes` is "none"."""
    return Key(name, _line(colour, marker, dashes))


def strategy_keys(shown: Sequence[str], by_name: dict[str, Look]) -> list[Key]:
    """Return the legend's entries for strategies."""
    return [line_key(n, by_name[n].colour, by_name[n].marker, by_name[n].dashes) for n in shown]


def patch_key(name: str, colour: str, alpha: float = 1.0) -> Key:
    """Return the legend's entry for an area."""
    from matplotlib.patches import Patch

    return Key(name, Patch(facecolor=colour, linewidth=0, alpha=alpha))


def hollow_key(name: str, colour: str, marker: str) -> Key:
    """Return the legend's entry for a hollow marker."""
    line = _line(colour, marker, "none")
    line.set_fillstyle("none")
    return Key(name, line)


def _line(colour: str, marker: str, dashes: Any) -> Line2D:
    from matplotlib.lines import Line2D

    return Line2D(
        [], [], color=colour, marker=marker, markersize=5, linewidth=1.4, linestyle=dashes
    )


# -- files -------------------------------------------------------------------------------------


def to_svg(figure: Figure, name: str) -> str:
    """Return a figure as SVG, text as text; `name` keeps its ids apart from other figures'."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        # As `savefig` does, but without its first drawing, which is for other kinds of layout.
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    # Other kinds of files have the same layout, and finding it is half of the work.
    figure.set_layout_engine("none")
    # Hundredths of a point are finer than any screen; as they are, paths fill most of the file.
    text = re.sub(r"(\.\d\d)\d+", r"\1", out.getvalue())
    return re.sub(r" \n([LMCQz])", r" \1", text)


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG on white, and leave it so: its SVG, without ground, comes first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    figure.set_dpi(200)
    figure.set_facecolor("white")
    FigureCanvasAgg(figure).print_png(out, metadata={"Software": None})  # type: ignore[no-untyped-call]
    return out.getvalue()


def for_page(svg: str) -> str:
    """Return a figure's SVG for use inside a page, whose width, font and colours it takes."""
    text = svg[svg.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", text)
    for colour, variable in CSS_COLOURS.items():
        text = text.replace(colour, f"var(--{variable}, {colour})")
    return text
