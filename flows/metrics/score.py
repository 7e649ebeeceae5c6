"""The score of a model: the figure that replaces accuracy in all texts, tables and figures.

Most scores are shares: higher is better, and 1 is the maximum. For the others lower is better, and
they have their own units. Only this module knows the difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flows.metrics.metric import Better, Metric
from flows.quoting import quoted
from flows.records.record import RecordDamaged

_WORD = re.compile(r"\baccuracy\b", re.IGNORECASE)
_OPPOSITE: Mapping[Better | None, Better | None] = {
    "higher": "lower",
    "lower": "higher",
    None: None,
}


@dataclass(frozen=True, slots=True)
class Score:
    """A score of models.

    Attributes
    ----------
    key
        Its name in a configuration, and among the metrics of a tracked run.
    definition
        Its definition, as it follows its `name` in texts.
    share
        Whether it is a share, in [0, 1]: written in per cent, and its differences in points.
    same_as
        A metric of `Outcome.row()` that equals this score; it is not shown in addition to it.
    """

    key: str
    name: str
    definition: str
    better: Better = "higher"
    share: bool = True
    same_as: str = ""

    @property
    def highest(self) -> float:
        """Upper bound of the values; none is below 0."""
        return 1.0 if self.share else math.inf

    def reaches(self, value: float, wanted: float) -> bool:
        """Whether a value is as good as another, or better."""
        return value >= wanted if self.better == "higher" else value <= wanted

    def best(self, values: Iterable[float]) -> float | None:
        """Return the best of the values that are finite; None where there is none."""
        pick = max if self.better == "higher" else min
        return pick(filter(math.isfinite, values), default=None)

    def format(self, value: float) -> str:
        """Return a value as it follows the name."""
        return f"{value:.1%}" if self.share else f"{value:.4g}"

    def reworded(self, text: str) -> str:
        """Return a text of dps with "accuracy" replaced by the name of this score."""
        return text if self.key == "accuracy" else _WORD.sub(self._in_place_of, text)

    def tracked(self, metric: str) -> str:
        """Return the name of a metric of a tracked run, with "accuracy" replaced by this score."""
        return metric.replace("accuracy", self.key)

    def of(self, metric: Metric) -> Metric:
        """Return a metric with the name of this score and, if it is a value of it, its unit."""
        if self.key == "accuracy":
            return metric
        label, text = self.reworded(metric.label), self.reworded(metric.text)
        found = replace(metric, label=label, text=text)
        if not metric.of_score:
            return found
        better = metric.better if self.better == "higher" else _OPPOSITE[metric.better]
        return replace(found, better=better, unit=metric.unit if self.share else "")

    @property
    def note(self) -> str:
        """Its definition, in a sentence or two; empty for accuracy, which needs none."""
        if self.key == "accuracy":
            return ""
        less = "" if self.better == "higher" else ". Less of it is better"
        return f"{self.name[:1].upper()}{self.name[1:]} is {self.definition}{less}."

    def _in_place_of(self, found: re.Match[str]) -> str:
        return self.name[:1].upper() + self.name[1:] if found[0][0].isupper() else self.name


ACCURACY = Score("accuracy", "accuracy", "the share of the examples that are right")
SCORES = {
    score.key: score
    for score in (
        ACCURACY,
        Score(
            "auc",
            "AUC",
            "the area under the ROC curve, which is the probability that of two examples, one of "
            "each class, the one of the second class has the higher score",
        ),
        Score(
            "r2",
            "R²",
            "the share of the variance of the target that predictions explain; 0 where they are "
            "worse than its mean",
        ),
        Score(
            "rmse",
            "RMSE",
            "the root of the mean squared error, in the units that the target has in its file",
            better="lower",
            share=False,
        ),
        Score(
            "loss",
            "loss",
            "the mean loss over the examples that are scored, as the workload defines it",
            better="lower",
            share=False,
            same_as="loss_final",
        ),
    )
}


def score_of(config: Mapping[str, Any]) -> Score:
    """Return the score of a trial, from its recorded configuration.

    Raises `RecordDamaged` if there is no such score.
    """
    evaluation, dataset = config.get("evaluation") or {}, config.get("dataset") or {}
    named = evaluation.get("metric")
    if named is None and dataset.get("task") == "regression":
        named = "r2"
    if named not in (None, *SCORES):
        raise RecordDamaged(
            f"evaluation.metric is {quoted(named)}, expected one of {', '.join(SCORES)}"
        )
    return SCORES[named or "accuracy"]
