"""Owns the outcome of a trial: everything that the tables show, computed from its events alone.

The parts are computed next door (`lineage` the ledger of updates, `timeline` the moments of the
faults, `usage` resources and money); `columns` says what each figure means to a reader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dps.events import Acked, Evaluated, EvaluationMissed, FaultMissed
from flows.lineage import Ledger, Row, applied_rows, ledger
from flows.prices import Prices
from flows.record import Record
from flows.timeline import FaultTimes, fault_times, training_span
from flows.usage import (
    LINKS,
    ROLES,
    Cost,
    Storage,
    Usage,
    cost,
    sent_by_link,
    storage,
    total_usage,
    usage_by_role,
)

LAST_EVALUATIONS = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """Which trial it is; `labels` are its values on the experiment's axes."""

    trial: str
    experiment: str
    labels: dict[str, str]
    seed: int | None
    digest: str

    @property
    def strategy(self) -> str:
        """The label that colours and rows go by: that of the recovery axis, else of the first."""
        if "recovery" in self.labels:
            return self.labels["recovery"]
        return next(iter(self.labels.values()), self.experiment)

    @property
    def condition(self) -> str:
        """The labels on the other axes, such as "kill" or "no fault"."""
        axis = "recovery" if "recovery" in self.labels else next(iter(self.labels), None)
        return " · ".join(label for key, label in self.labels.items() if key != axis)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Test accuracy as the evaluator saw it, in [0, 1]; None where there was no evaluation.

    Attributes
    ----------
    final
        Mean of the last 3 evaluations.
    best
        The highest evaluation.
    before, before_mean
        The last evaluation before the first fault, and the mean of the last 3 before it.
    after
        The first evaluation after the shard served again.
    lowest_after
        The lowest evaluation after the shard served again.
    regain_seconds
        From the fault to the first evaluation, after the shard served again, that is at least
        `before`; None also when that was never reached.
    """

    final: float | None
    best: float | None
    before: float | None
    before_mean: float | None
    after: float | None
    lowest_after: float | None
    regain_seconds: float | None

    @property
    def drop(self) -> float | None:
        """`before` minus `after`: what the fault cost at once (negative: accuracy went on up)."""
        return None if self.before is None or self.after is None else self.before - self.after


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old the weights were that applied gradients came from, over all head applications.

    Percentiles are nearest-rank. `median`, `p99` and `max` count versions, `p99_seconds` time.
    """

    median: int | None
    p99: int | None
    max: int | None
    p99_seconds: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trial in figures.

    Attributes
    ----------
    status, reason
        "valid", "invalid" (a planned fault did not happen) or "failed", and why.
    faults
        The moments of each fault.
    accuracy, staleness, ledger
        What it did to the model and to the updates.
    training_seconds
        From the start of the workers until one of them last got an answer.
    pushed
        Different gradients that workers were told are safe, however many shards each touches.
    usage, sent_by_link, storage, cost
        What it took, per role of node and per kind of link, and what that would cost.
    evaluations, evaluations_missed
        How often the evaluator read a snapshot, or could not because a shard was down.
    """

    identity: Identity
    status: str
    reason: str
    faults: tuple[FaultTimes, ...]
    accuracy: Accuracy
    staleness: Staleness
    ledger: Ledger
    training_seconds: float | None
    pushed: int
    usage: dict[str, Usage]
    sent_by_link: dict[str, int]
    storage: Storage
    cost: Cost
    evaluations: int
    evaluations_missed: int

    @property
    def valid(self) -> bool:
        """Whether the trial may enter statistics."""
        return self.status == "valid"

    @property
    def updates_per_second(self) -> float | None:
        """Pushed gradients per second of training."""
        return self.pushed / self.training_seconds if self.training_seconds else None

    def row(self) -> dict[str, Any]:
        """Return every figure under a flat name, JSON-ready, with the same names for all trials.

        Recovery times are those of the trial's first fault. `flows.columns` defines each name.
        """
        return {
            "experiment": self.identity.experiment,
            "trial": self.identity.trial,
            "strategy": self.identity.strategy,
            "condition": self.identity.condition,
            "seed": self.identity.seed,
            "digest": self.identity.digest,
            "status": self.status,
            "reason": self.reason,
            **self._accuracy_row(),
            **self._recovery_row(),
            **{f"updates_{name}": count for name, count in asdict(self.ledger).items()},
            **{f"staleness_{name}": value for name, value in asdict(self.staleness).items()},
            "training_seconds": self.training_seconds,
            "updates_pushed": self.pushed,
            "updates_per_second": self.updates_per_second,
            **self._usage_row(),
            "cost_nodes_usd": self.cost.nodes,
            "cost_moved_usd": self.cost.moved,
            "cost_stored_usd": self.cost.stored,
            "cost_usd": self.cost.total,
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
            "evaluations": self.evaluations,
            "evaluations_missed": self.evaluations_missed,
        }

    def _recovery_row(self) -> dict[str, Any]:
        first = self.faults[0] if self.faults else None
        return {
            "faults": len(self.faults),
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

    def _usage_row(self) -> dict[str, Any]:
        total = total_usage(self.usage)
        row: dict[str, Any] = {}
        for role, usage in [("all", total), *((role, self.usage[role]) for role in ROLES)]:
            row[f"cpu_seconds_{role}"] = usage.cpu_seconds
            row[f"peak_bytes_{role}"] = usage.peak_bytes
            row[f"sent_bytes_{role}"] = usage.sent_bytes
            row[f"received_bytes_{role}"] = usage.received_bytes
        for link in LINKS:
            row[f"sent_bytes_link_{link}"] = self.sent_by_link.get(link, 0)
        return {**row, **asdict(self.storage), "stored_bytes": self.storage.stored_bytes}


def outcome(record: Record, prices: Prices) -> Outcome:
    """Return the figures of one trial, from its events and the price table alone."""
    faults = fault_times(record)
    span = training_span(record)
    status, reason = _status(record)
    heads = [row for row in applied_rows(record) if row.head]
    return Outcome(
        identity=identity(record),
        status=status,
        reason=reason,
        faults=faults,
        accuracy=_accuracy(evaluations(record), faults[0] if faults else None),
        staleness=_staleness(heads),
        ledger=ledger(record),
        training_seconds=span[1] - span[0] if span else None,
        pushed=len({(b.worker, b.incarnation, seq) for b in record.of(Acked) for seq in b.seqs}),
        usage=usage_by_role(record),
        sent_by_link=sent_by_link(record),
        storage=storage(record),
        cost=cost(record, prices),
        evaluations=len(record.of(Evaluated)),
        evaluations_missed=len(record.of(EvaluationMissed)),
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


def evaluations(record: Record) -> list[Evaluated]:
    """Return the evaluations in the order in which their snapshots were read."""
    return sorted(record.of(Evaluated), key=lambda event: event.t)


def nearest_rank(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _status(record: Record) -> tuple[str, str]:
    ended, missed = record.ended, record.of(FaultMissed)
    if ended is None:
        cut = "; its last line was cut short and is left out" if record.torn else ""
        no_end = "the record has no end: the trial was interrupted or is still running"
        return "failed", no_end + cut
    if ended.status == "valid" and missed:
        return "invalid", f"fault on {missed[0].target} did not happen: {missed[0].reason}"
    return ended.status, ended.reason


def _accuracy(scores: Sequence[Evaluated], fault: FaultTimes | None) -> Accuracy:
    values = [score.accuracy for score in scores]
    before = [s.accuracy for s in scores if fault and s.t < fault.began]
    serving = fault.serving if fault else None
    after = [s for s in scores if serving is not None and s.t >= serving]
    return Accuracy(
        final=_mean(values[-LAST_EVALUATIONS:]),
        best=max(values, default=None),
        before=before[-1] if before else None,
        before_mean=_mean(before[-LAST_EVALUATIONS:]),
        after=after[0].accuracy if after else None,
        lowest_after=min((s.accuracy for s in after), default=None),
        regain_seconds=_regain(before, after, fault),
    )


def _regain(
    before: Sequence[float], after: Sequence[Evaluated], fault: FaultTimes | None
) -> float | None:
    if fault is None or not before:
        return None
    regained = (s.t - fault.began for s in after if s.accuracy >= before[-1])
    return next(regained, None)


def _staleness(heads: Sequence[Row]) -> Staleness:
    versions = [row.staleness for row in heads]
    median, p99 = nearest_rank(versions, 0.5), nearest_rank(versions, 0.99)
    return Staleness(
        median=None if median is None else int(median),
        p99=None if p99 is None else int(p99),
        max=max(versions, default=None),
        p99_seconds=nearest_rank([row.staleness_seconds for row in heads], 0.99),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
