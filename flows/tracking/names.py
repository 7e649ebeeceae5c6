"""The names of metrics in MLflow: those to compare trials by come first, all others last.

MLflow's charts have a section for each prefix, in alphabetical order: `compare`, then the series
(`eval`, `server`, `staleness`, `train`), then `trial`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flows.metrics.metric import Metric

COMPARE, REST = "compare/", "trial/"
# By their names in tables and configurations.
COMPARED = (
    "accuracy_final",
    "accuracy_drop",
    "loss_final",
    "effect_time_mean",
    "effect_time_end",
    "effect_training_seconds",
    "gradients_deficit",
    "outages",
    "downtime_seconds",
    "detect_seconds",
    "restore_seconds",
    "rto_seconds",
    "target_seconds",
    "training_seconds",
    "gradients_per_second",
    "staleness_median",
    "staleness_p99",
    "idle_share",
    "updates_lost",
    "updates_replayed",
    "sent_bytes_all",
)
MICRO_USD = f"{COMPARE}cost_micro_usd"  # MLflow's bars show two decimals, and a trial costs less


def named(columns: Iterable[Metric], row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the figures of a trial that are numbers, under their names in MLflow."""
    for column in columns:
        value = row[column.key]
        if column.metric is None or value is None:
            continue
        compared = column.key in COMPARED
        yield (f"{COMPARE}{column.key}" if compared else f"{REST}{column.metric}"), float(value)
        if column.key == "cost_usd":
            yield MICRO_USD, 1e6 * value
