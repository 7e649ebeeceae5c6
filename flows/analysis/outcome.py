"""The outcome of a trial: everything that the tables show, computed from its events alone.

The parts are computed next door (`learning` accuracy and loss, `staleness`, `ledger` the updates,
`throughput` the pace, `faults` their moments and `outages` what these add up to, `resources` use
and money); `flows.metrics` says what each figure means to a reader. The effect of the faults takes
a second record, that of the control (`effects`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from dps.core.names import ROLES
from dps.events import Evaluated, EvaluationMissed, FaultMissed, FaultSkipped, TrialResumed
from flows.analysis.effects.difference import UNKNOWN, Effect, Effects
from flows.analysis.effects.outages import Downtime, downtime
from flows.analysis.faults import FaultTimes, fault_times, training_span
from flows.analysis.learning import (
    Accuracy,
    Loss,
    Objective,
    Target,
    accuracy,
    loss,
    objective,
    rmse,
    target,
)
from flows.analysis.ledger import Ledger, applied_rows, ledger
from flows.analysis.prices import Prices
from flows.analysis.resources import (
    Cost,
    Filtering,
    Spending,
    Storage,
    Usage,
    cost,
    filtering,
    is_overloaded,
    load_average,
    sent_by_link,
    storage,
    total_usage,
    usage_by_role,
)
from flows.analysis.staleness import Staleness, by_period, staleness
from flows.analysis.throughput import Pace, pace
from flows.analysis.transports import transports
from flows.analysis.unplanned import evaluator_lost, first_unplanned
from flows.analysis.virtual_time import profile
from flows.metrics import BY_KEY
from flows.metrics.metric import LINKS, Period
from flows.metrics.resources import OF_LINKS, OF_ROLES
from flows.metrics.score import ACCURACY, Score, score_of
from flows.records.record import Record

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


def labels_told(labels: Mapping[str, str]) -> str:
    """Return labels as they are shown beside one another; a number with the name of its axis."""
    return " · ".join(
        f"{axis.rpartition('.')[2]} {label}" if _NUMBER.fullmatch(label) else label
        for axis, label in labels.items()
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """Which trial it is.

    `labels` are its values on the experiment's axes; `rank` is the place of its strategy in the
    order of the configuration, None where that was not noted beside the records.
    """

    trial: str
    experiment: str
    labels: dict[str, str]
    seed: int | None
    digest: str
    rank: int | None = None

    @property
    def strategy(self) -> str:
        """The label that colours and rows go by: that of the recovery axis, else of the first."""
        if "recovery" in self.labels:
            return self.labels["recovery"]
        return next(iter(self.labels.values()), self.experiment)

    @property
    def condition(self) -> str:
        """The labels on the other axes, such as "kill" or "no fault"; a number with its axis."""
        axis = "recovery" if "recovery" in self.labels else next(iter(self.labels), None)
        return labels_told({key: label for key, label in self.labels.items() if key != axis})


@dataclass(frozen=True)
class Outcome:
    """One trial in figures.

    Attributes
    ----------
    status, reason
        "valid", "invalid" (a planned fault did not happen, or a node was given up that none had
        struck) or "failed", and why.
    failed_before
        How many attempts at the trial failed before this one.
    faults, faults_skipped
        The moments of each fault; and how many there would have been, had anybody been there.
    downtime
        The outages that these brought about, summed up.
    effects
        What they did, against the trial's control; that is known only beside other trials, see
        `flows.analysis.finished.with_effects`.
    accuracy, loss, objective, target
        What it did to the model; `accuracy` is the `score` of the trial, whatever that is.
    rmse
        Root of the mean squared error at the end, where numbers are predicted.
    target_usd
        Money spent until the target was reached; None: it was not, or there is none.
    staleness, staleness_in
        How old the weights were that gradients came from: over all of the trial, and before,
        during and after the faults.
    ledger
        What it did to the updates.
    pace
        How fast it went.
    usage, sent_by_link, storage, cost
        What it took, per role of node and per kind of link, and what that would cost.
    transports
        By what its nodes sent each other arrays, and how many pairs of them.
    virtual
        The profile that its time went by; "": it ran on real nodes.
    filtering
        What filters did to the gradients.
    evaluations, evaluations_missed
        How often the evaluator read a snapshot, or could not because a shard was down.
    whole
        Whether the record is of the whole training; False for a trial that was resumed after an
        interruption, whose record begins there.
    load_average, overloaded
        Of the machine that drove it, and whether that was more than its cores and processes.
    circumstances
        What its results do not depend on: how many trials ran at once, how many seeds were planned,
        which claims were fixed when it began.
    """

    identity: Identity
    status: str
    reason: str
    failed_before: int
    faults: tuple[FaultTimes, ...]
    downtime: Downtime
    accuracy: Accuracy
    loss: Loss
    objective: Objective
    target: Target
    staleness: Staleness
    staleness_in: dict[Period, Staleness]
    ledger: Ledger
    pace: Pace
    usage: dict[str, Usage]
    sent_by_link: dict[str, int]
    storage: Storage
    cost: Cost
    transports: dict[str, int]
    virtual: str
    filtering: Filtering
    evaluations: int
    evaluations_missed: int
    whole: bool
    effects: Effects = UNKNOWN
    target_usd: float | None = None
    score: Score = ACCURACY
    rmse: float | None = None
    circumstances: Mapping[str, int] = field(default_factory=dict)
    faults_skipped: int = 0
    load_average: float | None = None
    overloaded: bool = False

    @property
    def valid(self) -> bool:
        """Whether the trial may enter statistics."""
        return self.status == "valid"

    @property
    def cost_per_point(self) -> float | None:
        """Money on demand for each percentage point of the final score; None if it is no share."""
        final = self.accuracy.final if self.score.share else None
        return self.cost.total / (100 * final) if final else None

    @property
    def first_loss(self) -> FaultTimes | None:
        """The first fault by which a shard was not served for a time, else the first of all."""
        return _first_loss(self.faults)

    def row(self) -> Mapping[str, Any]:
        """Return every figure under a flat name, JSON-ready, with the same names for all trials.

        Recovery times and accuracy before and after are those of `first_loss`. `flows.metrics`
        defines each name. For a trial that was resumed, whose record begins in the middle, figures
        of the whole training are None.
        """
        return self._row

    @cached_property
    def _row(self) -> dict[str, Any]:
        row = {
            "experiment": self.identity.experiment,
            "trial": self.identity.trial,
            "strategy": self.identity.strategy,
            "condition": self.identity.condition,
            "seed": self.identity.seed,
            "digest": self.identity.digest,
            "score": self.score.key,
            "status": self.status,
            "reason": self.reason,
            "failed_before": self.failed_before,
            **self._effects_row(),
            **self._downtime_row(),
            **self._accuracy_row(),
            **self._recovery_row(),
            **{f"updates_{name}": count for name, count in asdict(self.ledger).items()},
            **self._staleness_row(),
            **self._pace_row(),
            **{f"filter_{name}": value for name, value in asdict(self.filtering).items()},
            **self._usage_row(),
            **self._cost_row(),
        }
        if self.whole:
            return row
        return {key: None if BY_KEY[key].whole else value for key, value in row.items()}

    def _effects_row(self) -> dict[str, Any]:
        found = self.effects
        row: dict[str, Any] = {"control": found.control}
        for over in ("time", "gradients", "money"):
            each: Effect | None = getattr(found, over)
            row[f"effect_{over}_mean"] = each.mean if each else None
            row[f"effect_{over}_end"] = each.end if each else None
        row["effect_time_area"] = found.time.area if found.time else None
        row["effect_time_span"] = found.time.span if found.time else None
        row["gradients_deficit"] = found.deficit
        row["effect_training_seconds"] = found.seconds
        row["effect_cost_usd"] = found.cost
        return row

    def _downtime_row(self) -> dict[str, Any]:
        found = self.downtime
        return {
            "faults": len(self.faults),
            "faults_skipped": self.faults_skipped,
            "outages": found.outages,
            "outages_unrecovered": found.unrecovered,
            "downtime_seconds": found.seconds,
            "downtime_shard_seconds": found.shard_seconds,
            "recovery_median_seconds": found.recovery_median,
            "recovery_max_seconds": found.recovery_max,
        }

    def _accuracy_row(self) -> dict[str, Any]:
        return {
            "accuracy_final": self.accuracy.final,
            "accuracy_best": self.accuracy.best,
            "accuracy_before": self.accuracy.before,
            "accuracy_before_mean": self.accuracy.before_mean,
            "accuracy_after": self.accuracy.after,
            "accuracy_drop": self.accuracy.drop,
            "accuracy_lowest_after": self.accuracy.lowest_after,
            "regain_seconds": self.accuracy.regain_seconds,
            "accuracy_area_time": self.accuracy.area_time,
            "accuracy_area_gradients": self.accuracy.area_gradients,
            "target_accuracy": self.target.accuracy,
            "rmse_final": self.rmse,
            "target_seconds": self.target.seconds,
            "target_gradients": self.target.gradients,
            "target_usd": self.target_usd,
            "loss_final": self.loss.final,
            "loss_lowest": self.loss.lowest,
            "objective_final": self.objective.final,
            "objective_lowest": self.objective.lowest,
            "objective_excess": self.objective.excess,
            "objective_target_seconds": self.objective.seconds,
            "objective_target_gradients": self.objective.gradients,
            "stationarity_final": self.objective.stationarity,
            "stationarity_lowest": self.objective.stationarity_lowest,
            "evaluations": self.evaluations,
            "evaluations_missed": self.evaluations_missed,
        }

    def _recovery_row(self) -> dict[str, Any]:
        first = self.first_loss
        return {
            "fault_kind": first.kind if first else None,
            "fault_node": first.node if first else None,
            "fault_updates": first.updates if first else None,
            "detected_by": first.by if first else None,
            "recovered_from": first.source if first else None,
            "detect_seconds": first.detect_seconds if first else None,
            "wait_capacity_seconds": first.wait_capacity_seconds if first else None,
            "restore_seconds": first.restore_seconds if first else None,
            "first_applied_seconds": first.first_applied_seconds if first else None,
            "rto_seconds": first.rto_seconds if first else None,
        }

    def _staleness_row(self) -> dict[str, Any]:
        parts = {"": self.staleness, **{f"{k}_": v for k, v in self.staleness_in.items()}}
        return {
            f"staleness_{prefix}{name}": value
            for prefix, part in parts.items()
            for name, value in asdict(part).items()
        }

    def _pace_row(self) -> dict[str, Any]:
        return {
            "training_seconds": self.pace.seconds,
            "gradients_pushed": self.pace.pushed,
            "gradients_per_second": self.pace.gradients_per_second,
            "gradients_together": self.pace.together,
            "gradients_steady": self.pace.steady,
            "goodput": self.pace.goodput,
            "idle_share": self.pace.idle_share,
            "load_average": self.load_average,
        }

    def _cost_row(self) -> dict[str, Any]:
        return {
            "cost_nodes_usd": self.cost.nodes,
            "cost_moved_usd": self.cost.moved,
            "cost_stored_usd": self.cost.stored,
            "cost_usd": self.cost.total,
            "cost_spot_usd": self.cost.total_spot,
            "cost_fixed_usd": self.cost.total_fixed,
            "cost_per_point_usd": self.cost_per_point,
        }

    def _usage_row(self) -> dict[str, Any]:
        total = total_usage(self.usage)
        row: dict[str, Any] = {}
        for role, usage in [("all", total), *((role, self.usage[role]) for role in ROLES)]:
            for name in OF_ROLES:
                row[f"{name}_{role}"] = getattr(usage, name)
        for link in LINKS:
            row[f"sent_bytes_link_{link}"] = self.sent_by_link.get(link, 0)
            for role in OF_LINKS:
                row[f"sent_bytes_{role}_{link}"] = self.usage[role].sent_by_link.get(link, 0)
        return {**row, **asdict(self.storage), "stored_bytes": self.storage.stored_bytes}


def outcome(record: Record, prices: Prices) -> Outcome:
    """Return the figures of one trial, from its events and the price table alone."""
    faults = fault_times(record)
    judged, reason = status(record)
    heads = [row for row in applied_rows(record) if row.head]
    counts, wanted = ledger(record), target(record)
    return Outcome(
        identity=identity(record),
        status=judged,
        reason=reason,
        failed_before=record.failed_before,
        faults=faults,
        downtime=downtime(record, faults),
        accuracy=accuracy(record, _first_loss(faults)),
        loss=loss(record),
        objective=objective(record),
        target=wanted,
        staleness=staleness(heads),
        staleness_in={k: staleness(rows) for k, rows in by_period(heads, faults).items()},
        ledger=counts,
        pace=pace(record, counts, faults),
        usage=usage_by_role(record),
        sent_by_link=sent_by_link(record),
        storage=storage(record),
        cost=cost(record, prices),
        transports=transports(record),
        virtual=profile(record),
        filtering=filtering(record),
        evaluations=len(record.of(Evaluated)),
        evaluations_missed=len(record.of(EvaluationMissed)),
        whole=not record.of(TrialResumed),
        circumstances=record.circumstances,
        faults_skipped=len(record.of(FaultSkipped)),
        target_usd=_spent_until(record, prices, wanted.seconds),
        score=score_of(record.config),
        rmse=rmse(record),
        load_average=load_average(record),
        overloaded=is_overloaded(record),
    )


def identity(record: Record) -> Identity:
    """Return which trial a record is of; a record without a start has empty names."""
    settings = record.started.settings if record.started else {}
    return Identity(
        trial=settings.get("trial", record.started.trial if record.started else ""),
        experiment=settings.get("experiment", ""),
        labels={str(axis): str(label) for axis, label in settings.get("labels", {}).items()},
        seed=settings.get("seed"),
        digest=settings.get("digest", ""),
    )


def _spent_until(record: Record, prices: Prices, seconds: float | None) -> float | None:
    """Money spent within so many seconds of the training, in USD."""
    span = training_span(record)
    if seconds is None or span is None:
        return None
    return Spending(record, prices).at(span[0] + seconds)


def _first_loss(faults: Sequence[FaultTimes]) -> FaultTimes | None:
    felt = (fault for fault in faults if fault.shard is not None)
    return next(felt, faults[0] if faults else None)


def _without_end(record: Record) -> str:
    if not record.events:
        return (
            "its record was cut short in its first line" if record.torn else "its record is empty"
        )
    cut = "; its last line is not whole and left out" if record.torn else ""
    return f"its record has no end: it is running, or was cut short{cut}"


def status(record: Record) -> tuple[str, str]:
    """Return whether a trial is "valid", "invalid" or "failed", and why: see `Outcome`."""
    ended, missed = record.ended, record.of(FaultMissed)
    if ended is None:
        return "failed", _without_end(record)
    if ended.status != "valid":
        return ended.status, ended.reason
    if missed:
        return "invalid", f"fault on {missed[0].target} did not happen: {missed[0].reason}"
    if (lost := first_unplanned(record)) is not None:
        return "failed" if lost.ended else "invalid", lost.reason
    if evaluator_lost(record):
        return "failed", "the evaluator was lost: nothing was scored after the training"
    if wrong := [event for event in record.of(EvaluationMissed) if event.score_failed]:
        return "failed", f"evaluations failed, {len(wrong)} in all: {wrong[0].reason}"
    return ended.status, ended.reason
