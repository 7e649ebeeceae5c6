"""The list of all figures of `Outcome.row()`, in the order of a row's reader."""

from __future__ import annotations

from flows.metrics.effects import EFFECTS
from flows.metrics.learning import ACCURACY
from flows.metrics.metric import NOT_APPLICABLE, Metric
from flows.metrics.recovery import OUTAGES, RECOVERY
from flows.metrics.resources import COST, FILTERS, USAGE
from flows.metrics.updates import SPEED, STALENESS, UPDATES

__all__ = ["BY_KEY", "COLUMNS", "NOT_APPLICABLE", "Metric", "needs_fault"]

IDENTITY = (
    Metric("experiment", "experiment", "", "Name of the experiment."),
    Metric("trial", "trial", "", "Name of the trial, and of its folder."),
    Metric("strategy", "strategy", "", "Recovery strategy: the trial's label on that axis."),
    Metric("condition", "condition", "", "The trial's labels on the other axes."),
    Metric("seed", "seed", "", "Seed of initial values, batch order and data order."),
    Metric("digest", "digest", "", "Short hash of the trial's whole configuration."),
    Metric(
        "score",
        "score",
        "",
        "What the model is scored by, as `evaluation.metric` names it: all that says accuracy is "
        "of it. More is better of “accuracy”, “auc” and “r2”, less of “rmse” and “loss”.",
    ),
    Metric(
        "status",
        "status",
        "",
        "“valid”; “invalid” when a planned fault did not happen (one of a random process or a "
        "trace may be skipped), or a node was given up that no fault had struck; “failed” when the "
        "trial ended in an error, lost a process by itself, or has no end. Only valid trials enter "
        "statistics.",
    ),
    Metric("reason", "reason", "", "Why a trial is invalid or failed."),
    Metric(
        "failed_before",
        "failed before",
        "count",
        "Attempts at the trial that failed before this one, after which `dps run` tried it again; "
        "their records are kept in `earlier`.",
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

_OF_FAULTS = ("effect_", "recovery_", "staleness_during_", "staleness_after_")
_OF_A_FAULT = {
    *("accuracy_before", "accuracy_before_mean", "accuracy_after", "accuracy_drop"),
    *("accuracy_lowest_after", "regain_seconds", "gradients_deficit", "updates_lost_per_fault"),
    *("fault_updates", "detect_seconds", "wait_capacity_seconds", "restore_seconds"),
    *("first_applied_seconds", "rto_seconds"),
}


def needs_fault(key: str) -> bool:
    """Whether a figure has no value in a trial without faults, ever."""
    return key in _OF_A_FAULT or key.startswith(_OF_FAULTS)
