"""How figures look: told apart in grey and by the colour-blind, legible in print, exact ticks."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from dps.protocol.durabilities.presets import PRESETS
from flows.report.figures import style
from flows.report.figures.cost import EFFECT

# Linear RGB to XYZ (IEC 61966-2-1); and what is left of linear RGB without one kind of cones
# (Machado, Oliveira and Fernandes, 2009, severity 1).
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(axis=1)
SEEN = {
    "deuteranopia": [[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.969]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0993], [-0.0039, -0.0481, 1.052]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def linear(colour: str) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE Lab: lightness from 0 to 100, and two axes of hue."""
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(colour: str) -> float:
    """Contrast with white as WCAG defines it."""
    return float(1.05 / ((TO_XYZ @ linear(colour))[1] + 0.05))


def test_the_presets_are_told_apart_in_grey() -> None:
    grey = [lab(linear(look.colour))[0] for look in style.looks(list(PRESETS)).values()]
    assert len(grey) == 4
    assert min(abs(a - b) for a, b in combinations(grey, 2)) >= 9


@pytest.mark.parametrize("kind", SEEN)
def test_the_presets_are_told_apart_by_the_colour_blind(kind: str) -> None:
    looks = style.looks(list(PRESETS)).values()
    seen = [lab(np.array(SEEN[kind]) @ linear(look.colour)) for look in looks]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) >= 15


def test_lines_stand_out_from_the_paper() -> None:
    assert min(map(contrast, (*style.STRATEGY_COLOURS, style.BAD, style.INK, style.MUTED))) >= 3
    assert contrast(style.MUTED) >= 4.5  # text


@pytest.mark.parametrize(
    "label", [EFFECT.y, "seconds to the objective", "a label that is far longer than any panel is"]
)
def test_the_label_of_an_axis_keeps_clear_of_a_legend_in_many_rows(label: str) -> None:
    figure, axes = style.panel()
    axes.plot([-0.12, 0.0])
    style.value_label(axes, label)
    style.legend_above(
        figure, [style.line_key(f"the strategy number {i}", style.INK) for i in range(8)]
    )
    style.footnote(figure, "n = 12 seeds; mean with its 95% interval on both axes")
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    [legend] = figure.legends
    text = axes.yaxis.label.get_window_extent()
    assert not text.overlaps(legend.get_window_extent())
    assert figure.bbox.y0 <= text.y0 < text.y1 <= figure.bbox.y1
    assert figure.bbox.x0 <= text.x0


def test_strategies_differ_in_marker_and_dashes_besides() -> None:
    looks = list(style.looks([f"strategy {i}" for i in range(7)]).values())
    for one, other in combinations(looks, 2):
        assert one.colour != other.colour
        assert one.marker != other.marker
        assert one.dashes != other.dashes
    many = [style.look(place) for place in range(77)]
    assert len({(look.colour, look.marker) for look in many}) == 77
    assert len({look.marker for look in many[:11]}) == 11


def test_a_strategy_looks_the_same_whatever_is_beside_it() -> None:
    assert style.looks(["chain"]) == {"chain": style.looks(list(PRESETS))["chain"]}
    assert style.looks(["chain", "mine"])["mine"] not in style.looks(list(PRESETS)).values()
    assert style.looks(["mine"])["mine"] == style.look(0)


@pytest.mark.parametrize(
    ("share", "beside", "text"),
    [
        (0.9, [0.8, 1.0], "90%"),
        (0.825, [0.85, 0.875], "82.5%"),
        (0.85, [0.825], "85.0%"),
        (-0.05, [], "−5%"),
        (0.9975, [], "99.75%"),
    ],
)
def test_ticks_are_not_misrounded(share: float, beside: list[float], text: str) -> None:
    assert style.percent(share, beside) == text


def test_numbers_in_text_are_whole_in_the_file() -> None:
    figure, axes = style.panel()
    axes.set_yticks([0.825, 0.875])
    axes.plot([0, 1], [0.825, 0.875])
    shown = re.findall(r">([\d.]+)</text>", style.to_svg(figure, "x"))
    assert {"0.825", "0.875"} <= set(shown)


def test_an_axis_begins_near_its_values_only_where_it_would_be_empty() -> None:
    _, axes = style.panel()
    style.value_axis(axes, [0.93, 0.96, float("nan")], highest=1.0, near=True)
    low, high = axes.get_ylim()
    assert 0.9 < low < 0.93
    assert 0.96 < high < 1.0
    style.value_axis(axes, [0.1, 1.0], highest=1.0, near=True)
    low, high = axes.get_ylim()
    assert low == 0
    assert 1.0 < high < 1.05
    style.value_axis(axes, [93.0, 96.0])
    assert axes.get_ylim()[0] == 0


def test_a_wider_figure_keeps_legend_and_footnote() -> None:
    figure, axes = style.panel()
    names = ["none", "checkpoint", "chain", "stateless", "one with a long name", "another"]
    style.legend_above(figure, style.strategy_keys(names, style.looks(names)))
    told = "n = 3 seeds; line: mean, band: 95% t interval of the mean; and much more besides this"
    style.footnote(figure, told)
    height = style.height_of(figure)
    assert height == pytest.approx(style.HEIGHT)
    assert "\n" in figure.get_supxlabel()
    style.fit(figure, style.DOUBLE, height)
    assert tuple(figure.get_size_inches()) == pytest.approx((style.DOUBLE, figure.get_figheight()))
    assert style.height_of(figure) == pytest.approx(height)
    assert figure.get_supxlabel() == told
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    style.fit(figure, style.SINGLE, height)
    assert " ".join(figure.get_supxlabel().split()) == told
    del axes


def test_counts_are_told() -> None:
    assert style.count_told([3, 3]) == "n = 3 seeds"
    assert style.count_told([1]) == "n = 1 seed"
    assert style.count_told([2, 5], "trial") == "n = 2 to 5 trials"
