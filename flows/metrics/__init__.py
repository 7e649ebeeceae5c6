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

__all__ = ["BRIEF", "BY_KEY", "METRICS", "NOT_APPLICABLE", "SECTIONS", "TRACKED", "Metric"]

SECTIONS: dict[str, list[Metric]] = {
    "Trial": IDENTITY,
    "Effect of faults": EFFECTS,
    "Recovery": RECOVERY,
    "Score": ACCURACY,
    "Updates": UPDATES,
    "Resources": RESOURCES,
}
METRICS = tuple(metric for section in SECTIONS.values() for metric in section)
BY_KEY: dict[str, Metric] = {metric.key: metric for metric in METRICS}
# Metrics in the tables of trials, and their names in MLflow, which sorts metrics by name: the most
# important come first. `system/` would come before all others. `results.csv` has all metrics.
TRACKED = {
    "effect_time_mean": "accuracy/effect",
    "accuracy_final": "accuracy/final",
    "cost_usd": "cost/usd",
    "detect_seconds": "recovery/detect_seconds",
    "restore_seconds": "recovery/restore_seconds",
    "rto_seconds": "recovery/seconds",
    "downtime_seconds": "recovery/downtime_seconds",
    "updates_lost": "recovery/lost_updates",
    "updates_applied_twice": "recovery/repeated_updates",
    "staleness_p99": "staleness/p99",
    "target_seconds": "target/seconds",
    "target_gradients": "target/gradients",
    "training_seconds": "training/seconds",
    "effect_training_seconds": "training/extra_seconds",
    "faults": "training/faults",
    "outages": "training/outages",
    "gradients_per_second": "training/gradients_per_second",
    "goodput": "training/goodput",
    "idle_share": "training/idle_percent",
    "loss_final": "training/loss",
    "objective_excess": "training/objective_excess_percent",
    "cpu_seconds_all": "usage/cpu_seconds",
    "peak_bytes_all": "usage/peak_bytes",
    "sent_bytes_all": "usage/sent_bytes",
    "stored_bytes": "usage/stored_bytes",
}
# Metrics in the short tables.
BRIEF = (
    "effect_time_mean",
    "downtime_seconds",
    "accuracy_final",
    "updates_lost",
    "updates_applied_twice",
    "cost_usd",
)
