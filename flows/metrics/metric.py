"""Metrics of a trial: how each is declared, and how its values are written.

A metric is a function of a `flows.metrics.trial.Trial`, under the decorator of a section. Its name
is the key, its docstring the definition that reports show::

    @UPDATES.metric("gradients per second", "per second", "higher")
    def gradients_per_second(trial: Trial) -> float | None:
        '''Gradients divided by the time of the training.'''
        return len(trial.pushed) / trial.seconds if trial.seconds else None

The metric is then available in `--json`, CSV, claims, and the tables of all metrics of the report
and the documentation. `flows.metrics.TRACKED` lists those in MLflow and the tables of trials.
Metrics that are attributes of one object, or differ only in a word (per role or link), are
generated as `Metric` objects and added to the section. `flows.metrics.METRICS` lists the sections
in order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Unit = Literal["", "%", "points", "s", "MB", "USD", "count", "per second"]
Better = Literal["higher", "lower"]
Value = str | int | float | None
C = TypeVar("C", bound=Callable[[Any], Value])

LINKS = ("train", "replicate", "store", "control")  # what bytes are sent for

NOT_APPLICABLE = "–"
# Units of shares and of differences of shares, which are written in per cent.
SHARES = ("%", "points")
# Units of what is counted or measured from 0 on.
FROM_ZERO = ("count", "s", "MB", "USD", "per second")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, declared once.

    Attributes
    ----------
    key
        Its name in `Outcome.row()`, in `--json`, in CSV and in claims.
    label
        Its heading in tables.
    unit
        How its value is written; rows hold plain numbers (shares in [0, 1], seconds, bytes, USD).
    better
        Whether a higher or a lower value is better; None where neither is.
    text
        What it is, in a sentence for the reader of a table.
    compute
        Returns its value for a `flows.metrics.trial.Trial`; of an effect of the faults, for the
        `flows.metrics.effects.Effects` of the trial against its control (`of_effects`).
    number
        Whether it is a number that statistics and claims may be about.
    signed
        Whether it is a difference, which may be negative in any unit.
    of_score
        Whether it is a value of the model's score, or a difference of two. Its unit and `better`
        are those of a share; `Score.of` adapts them to another score.
    whole
        Whether it takes a record of the whole training: a trial that was resumed has no value.
    """

    key: str
    label: str
    unit: Unit
    better: Better | None
    text: str
    compute: Callable[[Any], Value]
    number: bool = True
    signed: bool = False
    of_score: bool = False
    whole: bool = True
    of_effects: bool = False

    @property
    def shown_unit(self) -> str:
        """The unit as it follows the label; nothing where the label has it, or there is none."""
        return "" if self.unit == "count" or self.label.endswith(self.unit) else self.unit

    @property
    def plain_unit(self) -> str:
        """The unit in files, which have fractions instead of percentages, and bytes."""
        return {"%": "fraction", "points": "fraction", "MB": "bytes"}.get(self.unit, self.unit)

    def cut(self, bound: float) -> float:
        """Return the bound of an interval of a mean, cut at 0 where the metric cannot be less."""
        never_less = not self.signed and (self.of_score or self.unit in FROM_ZERO)
        return max(0.0, bound) if never_less else bound

    def format(self, value: Any, finer: bool = False) -> str:
        """Return a value as a reader wants to see it.

        `finer` writes a share or its difference with two decimals instead of one.
        """
        if value is None or value == "":
            return NOT_APPLICABLE
        if isinstance(value, str):
            return value
        text = _number(float(value), self.unit, 2 if finer else 1)
        return (text if text.strip("-0.") else text.lstrip("-")).replace("-", "−")


class Section(list[Metric]):
    """The metrics of one subject, in the order in which tables and documents list them."""

    def metric(
        self, label: str, unit: Unit = "", better: Better | None = None, **flags: Any
    ) -> Callable[[C], C]:
        """Declare the metric that a function computes; see `Metric` for the parameters."""

        def declared(compute: C) -> C:
            text = " ".join((inspect.getdoc(compute) or "").split())
            self.append(Metric(compute.__name__, label, unit, better, text, compute, **flags))
            return compute

        return declared


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
    if unit == "USD" and abs(value) < 0.1:
        return "<0.000001" if 0 < value < 1e-6 else f"{value:.6f}"
    if unit == "USD":
        return f"{value:,.2f}"
    if unit == "s" and abs(value) < 1:
        return f"{value:.3f}"
    if not unit and abs(value) < 1:
        return f"{value:.3g}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
