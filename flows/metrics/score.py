"""What a model is scored by: the share that stands in all figures that speak of accuracy.

Whatever it is, more of it is better, and 1 is all that there is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flows.metrics.metric import Metric

_WORD = re.compile(r"\baccuracy\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Score:
    """A score.

    Attributes
    ----------
    key
        Its name in a configuration, and among the metrics of a tracked run.
    name
        What texts call it.
    definition
        What it is, as it follows its name.
    """

    key: str
    name: str
    definition: str

    def said(self, text: str) -> str:
        """Return a text of dps that speaks of accuracy, with the name of this score instead."""
        return text if self.key == "accuracy" else _WORD.sub(self.name, text)

    def tracked(self, metric: str) -> str:
        """Return what a metric of a tracked run that has accuracy in its name is called."""
        return metric.replace("accuracy", self.key)

    def of(self, metric: Metric) -> Metric:
        """Return a figure whose label and definition have the name of this score."""
        if self.key == "accuracy":
            return metric
        label, definition = self.said(metric.label), self.said(metric.definition)
        return replace(metric, label=label, definition=definition)

    @property
    def told(self) -> str:
        """A sentence on what stands where others say accuracy; empty for accuracy itself."""
        if self.key == "accuracy":
            return ""
        return f"Where it says accuracy, {self.name} is meant: {self.definition}."


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
    )
}


def score_of(config: Mapping[str, Any]) -> Score:
    """Return what a trial is scored by, from its configuration as it is recorded."""
    evaluation, dataset = config.get("evaluation") or {}, config.get("dataset") or {}
    named = evaluation.get("metric")
    if named is None and dataset.get("task") == "regression":
        named = "r2"
    return SCORES[named or "accuracy"]
