"""How figures look: told apart in grey and by the colour-blind, whatever is beside it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from matplotlib.colors import to_rgb

from dps.recovery.strategy import PRESETS
from flows.report import style

# Linear RGB to XYZ (IEC 61966-2-1); and what is left of linear RGB without one kind of cones
# (Machado, Oliveira and Fernandes, 2009, severity 1).
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(axis=1)
SEEN = (
    [[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.969]],
    [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0993], [-0.0039, -0.0481, 1.052]],
    [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
)


def linear(colour: str) -> np.ndarray:
    rgb = np.array(to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE Lab: lightness from 0 to 100, and two axes of hue."""
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_the_presets_are_told_apart_in_grey_and_by_the_colour_blind() -> None:
    colours = [linear(look.colour) for look in style.looks(list(PRESETS)).values()]
    for one, other in combinations(colours, 2):
        assert abs(lab(one)[0] - lab(other)[0]) >= 9
        for kind in SEEN:
            seen = lab(np.array(kind) @ one) - lab(np.array(kind) @ other)
            assert np.linalg.norm(seen) >= 15


def test_strategies_differ_in_marker_besides() -> None:
    looks = list(style.looks([f"strategy {i}" for i in range(7)]).values())
    for one, other in combinations(looks, 2):
        assert one.colour != other.colour
        assert one.marker != other.marker


def test_names_of_files_differ_even_where_labels_hardly_do() -> None:
    assert list(style.slugs(["no fault", "no-fault", "kill", ""]).values()) == [
        "no-fault",
        "no-fault~2",
        "kill",
        "",
    ]
