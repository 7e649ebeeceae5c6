"""How every figure looks, and its files: widths, type, colours, axes, legends, SVG, PDF and PNG.

Figures are drawn for print: one column of a page wide or two, no type under 7 points. Strategies
differ in colour, marker and dashes. The colours are told apart by readers with colour-blindness,
and those of the presets in grey as well. Figures are drawn in the colours of a light page;
`for_page` turns these into CSS variables, so that a page can redefine them for a dark one.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from dps.protocol.durabilities.presets import PRESETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D

INK, MUTED, GRID, REFERENCE = "#1c2127", "#5d6773", "#e3e7ec", "#98a2ad"
BAD = "#c0362c"
STRATEGY_COLOURS = ("#cc5500", "#10306b", "#22a688", "#93205f", "#9a8500", "#4a94cf", "#4a4a4a")
STRATEGY_MARKERS = ("X", "s", "o", "D", "^", "v", "P", "<", "*", ">", "p")
STRATEGY_DASHES: tuple[Any, ...] = (
    (0, (3.2, 1.2)),
    (0, (6, 1.2, 1.2, 1.2)),
    "-",
    (0, (1.2, 1)),
    (0, (8, 1.5)),
    (0, (4, 1, 1.2, 1, 1.2, 1)),
    (0, (2, 2)),
)
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

SINGLE, DOUBLE = 3.3, 7.0  # inches: one column of a page, and two
HEIGHT = 2.05  # inches, besides legend and footnote
LABEL_LETTERS = 26  # that fit beside a panel of this height, in one line of a label
TYPE, SMALL = 8.0, 7.0  # points: labels of axes; ticks, legends and all else
LEGEND_ENTRY, LETTER = 0.35, 0.049  # inches: what an entry takes besides its name; a small letter
LEGEND_LINE, NOTE_LINE = 0.145, 0.125  # inches, that a figure grows by with each
PNG_DOTS = 300  # per inch
# From this share of the highest value on, the lowest leaves most of an axis from 0 on empty.
NEAR = 0.5

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": TYPE,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": TYPE,
    "figure.constrained_layout.use": True,
    "font.size": TYPE,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "path.simplify_threshold": 0.3,
    "pdf.fonttype": 42,  # as TrueType, which publishers ask for
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelsize": SMALL,
    "xtick.major.size": 2.5,
    "ytick.color": MUTED,
    "ytick.labelsize": SMALL,
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
    """Return a look per strategy: presets have fixed ones, and others those that come next."""
    fixed = PRESETS if any(name in PRESETS for name in names) else ()
    order = list(dict.fromkeys([*fixed, *names]))
    return {name: look(order.index(name)) for name in names}


def look(place: int) -> Look:
    """Return the look in a place of the order.

    A marker comes again after 11 places, and colour and marker together after 77.
    """
    again, index = divmod(place, len(STRATEGY_COLOURS))
    marker = STRATEGY_MARKERS[place % len(STRATEGY_MARKERS)]
    return Look(
        STRATEGY_COLOURS[index], marker, STRATEGY_DASHES[(index + again) % len(STRATEGY_DASHES)]
    )


# -- panels and axes ---------------------------------------------------------------------------


def panel(height: float = HEIGHT, width: float = SINGLE) -> tuple[Figure, Axes]:
    """Return an empty figure with one set of axes, one column wide if not said otherwise."""
    figure, ((axes,),) = panels(1, 1, height=height, width=width)
    return figure, axes


def panels(
    rows: int, columns: int, height: float, width: float = SINGLE, sharey: Any = False
) -> tuple[Figure, list[list[Axes]]]:
    """Return an empty figure with sets of axes in rows and columns; sizes are in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), facecolor="none")
        axes = figure.subplots(
            rows, columns, squeeze=False, sharey=sharey, subplot_kw={"facecolor": "none"}
        )
    for each in axes.flat:
        # How many ticks there are depends on it, also of axes that are drawn in another style.
        each.tick_params(labelsize=SMALL)
    return figure, axes.tolist()


def height_of(figure: Figure) -> float:
    """Return how high a figure is without legend and footnote, in inches."""
    return float(figure.get_figheight()) - sum(_lines(figure))


def fit(figure: Figure, width: float, height: float) -> None:
    """Give a figure another size, in inches, to which legend and footnote are added."""
    if math.isclose(figure.get_figwidth(), width):
        return
    told = figure.get_supxlabel()
    figure.supxlabel("")
    figure.set_size_inches(width, height)
    figure.set_layout_engine("constrained")
    for legend in list(figure.legends):
        keys = [Key(*pair) for pair in zip(_names(legend), legend.legend_handles, strict=True)]
        legend.remove()
        legend_above(figure, keys)
    if told:
        footnote(figure, told)


def _lines(figure: Figure) -> tuple[float, float]:
    """How high the legends and the footnote of a figure are, in inches."""
    rows = sum(_legend_lines(_names(each), figure) for each in figure.legends)
    told = figure.get_supxlabel()
    return LEGEND_LINE * rows, NOTE_LINE * (told.count("\n") + 1) if told else 0.0


def footnote(figure: Figure, told: str) -> None:
    """Say at the foot of a figure what every reader must know: how many, which interval."""
    letters = int((figure.get_figwidth() - 0.1) / LETTER)
    text = textwrap.fill(" ".join(told.split()), letters)
    left = 0.04 / figure.get_figwidth()
    figure.supxlabel(text, x=left, ha="left", fontsize=SMALL, color=MUTED, linespacing=1.15)
    figure.set_figheight(figure.get_figheight() + _lines(figure)[1])


def percent_axis(axes: Axes, label: str, lowest: float = 0.0) -> None:
    """Have the vertical axis show shares from `lowest` to 1 in per cent."""
    percent_ticks(axes)
    axes.set_ylim(lowest, 1.0 + 0.02 * (1.0 - lowest))
    value_label(axes, label)


def value_label(axes: Axes, text: str, letters: int = LABEL_LETTERS) -> None:
    """Say what the vertical axis shows, in lines that are no longer than it is high."""
    axes.set_ylabel(textwrap.fill(text, letters, break_long_words=False))


def percent_ticks(axes: Axes) -> None:
    """Write the vertical axis in per cent, with as many digits as its ticks need and no more."""
    from matplotlib.ticker import FuncFormatter

    def text(value: float, _: int) -> str:
        return percent(value, axes.yaxis.get_majorticklocs())

    axes.yaxis.set_major_formatter(FuncFormatter(text))


def percent(share: float, beside: Iterable[float]) -> str:
    """Write a share in per cent, with the digits that it and those `beside` it need."""
    ticks = [100 * tick for tick in (*beside, share)]
    digits = next(
        (d for d in range(4) if all(abs(round(tick, d) - tick) < 1e-6 for tick in ticks)), 4
    )
    return f"{100 * share:.{digits}f}%".replace("-", "−")


def value_axis(
    axes: Axes,
    values: Iterable[float],
    lowest: float = 0.0,
    highest: float = math.inf,
    near: bool = False,
) -> None:
    """Have the vertical axis begin at `lowest`, or near the values where it would be mostly empty.

    It goes no further than from `lowest` to `highest`, but for a margin in which markers are whole.
    Near the values (`near`) it begins for what is read for its differences; proportions need the 0.
    """
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    close = near and low > NEAR * high
    margin = 0.06 * (high - (low if close else lowest)) or 0.05 * abs(high) or 1.0
    bottom = max(lowest, low - margin) if close else lowest
    rest = 0.02 * (min(high, highest) - bottom)  # in which a marker at the end is whole
    axes.set_ylim(bottom, min(high + margin, highest + rest))


def row_axis(axes: Axes, names: Sequence[str], colours: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a figure from the top down."""
    axes.set_yticks(range(len(names)), names)
    for tick, colour in zip(axes.get_yticklabels(), colours, strict=True):
        tick.set_color(colour)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def alone(y: Sequence[float]) -> list[int]:
    """Return the places of values between gaps, which no line shows."""
    around = [math.nan, *y, math.nan]
    return [
        i
        for i, value in enumerate(y)
        if not math.isnan(value) and math.isnan(around[i]) and math.isnan(around[i + 2])
    ]


def draw_line(axes: Axes, x: Any, y: Any, look: Look, place: int = 0, width: float = 1.3) -> None:
    """Draw a strategy's line: in its dashes, with some markers, and more where it is in pieces.

    `place` is the strategy's among those drawn: markers of one lie between those of another.
    """
    points = len(x)
    every = max(1, points // 5)
    marks = {(place * every // 3) % every + i * every for i in range(6)} | set(alone(list(y)))
    axes.plot(
        x,
        y,
        color=look.colour,
        linestyle=look.dashes,
        linewidth=width,
        marker=look.marker,
        markersize=3.6,
        markeredgewidth=0.4,
        markeredgecolor="white",
        markevery=sorted(mark for mark in marks if mark < points),
    )


def draw_seed(axes: Axes, x: Any, y: Any, colour: str) -> None:
    """Draw one seed of several: thin, with dots where it is in pieces."""
    axes.plot(
        x,
        y,
        color=colour,
        linewidth=0.5,
        alpha=0.45,
        marker="o",
        markersize=1.6,
        markeredgewidth=0,
        markevery=alone(list(y)),
    )


def legend_above(figure: Figure, keys: Sequence[Key]) -> None:
    """Put a legend above all axes, in as many lines as it takes."""
    figure.legend(
        [key.handle for key in keys],
        [key.name for key in keys],
        loc="outside upper left",
        ncols=_legend_columns([key.name for key in keys], figure),
        handlelength=2.1,
        handleheight=1,
        handletextpad=0.4,
        columnspacing=1.0,
        labelspacing=0.3,
        borderaxespad=0.1,
        borderpad=0.2,
        frameon=False,
        fontsize=SMALL,
        labelcolor=INK,
    )
    figure.set_figheight(figure.get_figheight() + _lines(figure)[0])


def _names(legend: Legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def _legend_lines(names: Sequence[str], figure: Figure) -> int:
    return math.ceil(len(names) / _legend_columns(names, figure))


def _legend_columns(names: Sequence[str], figure: Figure) -> int:
    """How many entries fit beside one another; columns are as wide as their longest entry."""
    width = figure.get_figwidth() - 0.1
    for columns in range(len(names), 1, -1):
        rows, longer = divmod(len(names), columns)
        sizes = [rows + (column < longer) for column in range(columns)]
        ends = list(accumulate(sizes))
        longest = [max(map(len, names[e - n : e])) for n, e in zip(sizes, ends, strict=True)]
        if sum(LEGEND_ENTRY + LETTER * length for length in longest) <= width:
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
        [], [], color=colour, marker=marker, markersize=4, linewidth=1.3, linestyle=dashes
    )


def count_told(counts: Sequence[int], of: str = "seed") -> str:
    """Say how many there are of something: "n = 5 seeds", or "n = 3 to 5 seeds"."""
    fewest, most = min(counts), max(counts)
    number = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"n = {number} {of}" + ("" if most == 1 else "s")


# -- files -------------------------------------------------------------------------------------


def to_svg(figure: Figure, name: str) -> str:
    """Return a figure as SVG, text as text; `name` keeps its ids apart from other figures'."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    figure.set_facecolor("none")
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        # As `savefig` does, but without its first drawing, which is for other kinds of layout.
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    # Other kinds of files have the same layout, and finding it is half of the work.
    figure.set_layout_engine("none")
    # Hundredths of a point are finer than any screen; as they are, paths fill most of the file.
    # Only in tags: what is between them is what a reader sees.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), out.getvalue())
    return re.sub(r" \n([LMCQz])", r" \1", text)


def to_pdf(figure: Figure) -> bytes:
    """Return a figure as PDF, without the time when it was made."""
    import matplotlib
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    out = io.BytesIO()
    figure.set_facecolor("none")
    with matplotlib.rc_context(_STYLE):
        nothing = {"CreationDate": None, "Creator": None, "Producer": None}
        FigureCanvasPdf(figure).print_pdf(out, metadata=nothing)  # type: ignore[no-untyped-call]
    figure.set_layout_engine("none")
    return out.getvalue()


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG, on white."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    figure.set_dpi(PNG_DOTS)
    figure.set_facecolor("white")
    with matplotlib.rc_context(_STYLE):
        FigureCanvasAgg(figure).print_png(out, metadata={"Software": None})  # type: ignore[no-untyped-call]
    figure.set_layout_engine("none")
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
