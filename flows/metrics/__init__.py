"""The list of all figures of `Outcome.row()`, in the order of a row's reader."""

from __future__ import annotations

from flows.metrics.effects import EFFECTS
from flows.metrics.learning import ACCURACY
from flows.metrics.metric import NOT_APPLICABLE, Metric
from flows.metrics.recovery import OUTAGES, RECOVERY
from flows.metrics.resources import COST, FILTERS, USAGE
from flows.metrics.updates import SPEED, STALENESS, UPDATES

__all__ = ["BY_KEY", "COLUMNS", "NOT_APPLICABLE", "Metric"]

IDENTITY = (
    Metric("experiment", "experiment", "", "Name of the experiment.", whole=False),
    Metric("trial", "trial", "", "Name of the trial, and of its folder.", whole=False),
    Metric(
        "strategy",
        "strategy",
        "",
        "Recovery strategy: the trial's label on that axis.",
        whole=False,
    ),
    Metric("condition", "condition", "", "The trial's labels on the other axes.", whole=False),
    Metric("seed", "seed", "", "Seed of initial values, batch order and data order.", whole=False),
    Metric("digest", "digest", "", "Short hash of the trial's whole configuration.", whole=False),
    Metric(
        "score",
        "score",
        "",
        "What the model is scored by, as `evaluation.metric` names it: all that says accuracy is "
        "of it. More is better of “accuracy”, “auc” and “r2”, less of “rmse” and “loss”.",
        whole=False,
    ),
    Metric(
        "status",
        "status",
        "",
        "“valid”; “invalid” when a planned fault did not happen (one of a random process or a "
        "trace may be skipped), or a node was given up that no fault had struck; “failed” when the "
        "trial ended in an error, lost a process by itself, or has no end. Only valid trials enter "
        "statistics.",
        whole=False,
    ),
    Metric("reason", "reason", "", "Why a trial is invalid or failed.", whole=False),
    Metric(
        "failed_before",
        "failed before",
        "count",
        "Attempts at the trial that failed before this one, after which `dps run` tried it again; "
        "their records are kept in `earlier`.",
        whole=False,
    ),
)

COLUMNS: tuple[Metric, ...] = (
    *IDENTITY,
    *EFFECTS,
    *OUTAGES,
    *ACCURACY,
    *RECOVERY,
    *UPDATES,
    *STALENESS,
    *SPEED,
    *FILTERS,
    *USAGE,
    *COST,
)

BY_KEY: dict[str, Metric] = {column.key: column for column in COLUMNS}
