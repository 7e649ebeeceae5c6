"""Owns the list of all figures of `Outcome.row()`, in the order of a row's reader."""

from __future__ import annotations

from flows.metrics.learning import ACCURACY
from flows.metrics.metric import NOT_APPLICABLE, Column
from flows.metrics.recovery import RECOVERY
from flows.metrics.resources import COST, FILTERS, USAGE
from flows.metrics.updates import SPEED, STALENESS, UPDATES

__all__ = ["BY_KEY", "COLUMNS", "NOT_APPLICABLE", "Column"]

IDENTITY = (
    Column("experiment", "experiment", "", "Name of the experiment."),
    Column("trial", "trial", "", "Name of the trial, and of its folder."),
    Column("strategy", "strategy", "", "Recovery strategy: the trial's label on that axis."),
    Column("condition", "condition", "", "The trial's labels on the other axes."),
    Column("seed", "seed", "", "Seed of initial values, batch order and data order."),
    Column("digest", "digest", "", "Short hash of the trial's whole configuration."),
    Column(
        "status",
        "status",
        "",
        "“valid”; “invalid” when a planned fault did not happen, or a node was given up that no "
        "fault had struck; “failed” when the trial ended in an error, lost a process by itself, or "
        "has no end. Only valid trials enter statistics.",
    ),
    Column("reason", "reason", "", "Why a trial is invalid or failed."),
    Column(
        "failed_before",
        "failed before",
        "count",
        "Attempts at the trial that failed before this one, after which `dps run` tried it again; "
        "their records are kept in `earlier`.",
    ),
)

COLUMNS: tuple[Column, ...] = (
    *IDENTITY,
    *ACCURACY,
    *RECOVERY,
    *UPDATES,
    *STALENESS,
    *SPEED,
    *FILTERS,
    *USAGE,
    *COST,
)

BY_KEY: dict[str, Column] = {column.key: column for column in COLUMNS}
