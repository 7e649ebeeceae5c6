"""The metrics of a trial: each declared once, with how it is computed from the trial's record.

To add one, write a function in the module of its subject, under the decorator of its section: see
`flows.metrics.metric`.
"""

from __future__ import annotations

from flows.metrics.effects import EFFECTS
from flows.metrics.learning import ACCURACY
from flows.metrics.metric import NOT_APPLICABLE, Metric
from flows.metrics.recovery import RECOVERY
from flows.metrics.resources import RESOURCES
from flows.metrics.trial import IDENTITY
from flows.metrics.updates import UPDATES

__all__ = ["BRIEF", "BY_KEY", "METRICS", "NOT_APPLICABLE", "TRACKED", "Metric"]

METRICS: tuple[Metric, ...] = (
    *IDENTITY,
    *EFFECTS,
    *RECOVERY,
    *ACCURACY,
    *UPDATES,
    *RESOURCES,
)
BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}
# Metrics in MLflow and the tables of trials, most important first; `results.csv` has all metrics.
TRACKED = tuple(m.key for level in (2, 1) for m in METRICS if m.level == level)
# Metrics in the short tables.
BRIEF = tuple(m.key for m in METRICS if m.level == 2)
