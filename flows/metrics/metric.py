"""What is known of one figure of `Outcome.row()`, and how its values are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["", "%", "points", "point-seconds", "s", "MB", "USD", "count", "per second"]
Better = Literal["higher", "lower"]

# When a gradient was applied, seen from a fault; and what bytes are sent for.
Period = Literal["before", "during", "after"]
LINKS = ("train", "replicate", "store", "control")

NOT_APPLICABLE = "–"
# Units of shares and of differences of shares, which are written in per cent.
SHARES = ("%", "points", "point-seconds")
# Units of what is counted or measured from 0 on.
FROM_ZERO = ("count", "s", "MB", "USD", "per second")


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure.

    Attributes
    ----------
    key
        Its name in `Outcome.row()`.
    label
        Its heading in tables.
    unit
        How its value is written; rows hold plain numbers (shares in [0, 1], seconds, bytes, USD).
    definition
        What it is, in a sentence for the reader of a table.
    metric
        Its name among the metrics of a tracked run; None for what is not a number.
    better
        Whether a higher or a lower value is better; None where neither is.
    signed
        Whether it is a difference, which may be negative whatever its unit is.
    of_score
        Whether it is a value of what the model is scored by, or a difference of two. Unit and
        `better` are those of a share then; `Score.of` returns it as it is for another score.
    whole
        Whether it takes a record of the whole training: a trial that was resumed has no value.
    of_faults
        Whether a trial without faults never has a value.
    """

    key: str
    label: str
    unit: Unit
    definition: str
    metric: str | None = None
    better: Better | None = None
    signed: bool = False
    of_score: bool = False
    whole: bool = True
    of_faults: bool = False

    @property
    def shown_unit(self) -> str:
        """The unit as it follows the label; nothing where the label says it, or there is none."""
        told = self.unit in ("", "count") or self.label.endswith(self.unit)
        return "" if told else self.unit

    def cut(self, bound: float) -> float:
        """Return the bound of an interval of a mean, cut at 0 where the figure cannot be less."""
        never_less = not self.signed and (self.of_score or self.unit in FROM_ZERO)
        return max(0.0, bound) if never_less else bound

    def text(self, value: Any, finer: bool = False) -> str:
        """Return a value of this column as a reader wants to see it.

        `finer` writes a share or its difference with two decimals instead of one.
        """
        if value is None or value == "":
            return NOT_APPLICABLE
        if isinstance(value, str):
            return value
        text = _number(float(value), self.unit, 2 if finer else 1)
        return (text if text.strip("-0.") else text.lstrip("-")).replace("-", "−")


def _number(value: float, unit: Unit, decimals: int) -> str:
    if value == 0:
        return "0"
    if unit in SHARES:
        return f"{100 * value:.{decimals}f}"
    if unit in ("count", "") and value == int(value):
        return f"{value:,.0f}"
    if unit == "count":
        return f"{value:,.1f}"
    if unit == "MB":
        return _three_digits(value / 1e6)
    if unit == "USD":
        return _money(value)
    if unit == "s" and abs(value) < 1:
        return f"{value:.3f}"
    if not unit and abs(value) < 1:
        return f"{value:.3g}"
    return _three_digits(value)


def _money(value: float) -> str:
    if abs(value) >= 0.1:
        return f"{value:,.2f}"
    return "<0.000001" if 0 < value < 1e-6 else f"{value:.6f}"


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
