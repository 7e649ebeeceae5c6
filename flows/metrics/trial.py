"""A trial as the input of metrics: its record, the prices, and values that metrics share."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf

from dps.events import Acked, Evaluated, EvaluationMissed, FaultMissed, ResourceSampled
from flows.metrics.faults import (
    FaultTimes,
    Outage,
    Span,
    evaluator_lost,
    fault_times,
    first_unplanned,
    outages,
    training_span,
)
from flows.metrics.ledger import Ledger, Row, applied_rows, ledger
from flows.metrics.metric import Metric, Value
from flows.metrics.prices import Prices, Spending
from flows.metrics.processes import last_samples
from flows.metrics.score import Score, score_of
from flows.records.events import TrialResumed
from flows.records.record import Record

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
_NO_FAULT = FaultTimes("", "", 0, 0.0)


def labels_text(labels: Mapping[str, str]) -> str:
    """Return labels as they are shown beside one another; a number with the name of its axis."""
    return " · ".join(
        f"{axis.rpartition('.')[2]} {label}" if _NUMBER.fullmatch(label) else label
        for axis, label in labels.items()
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """Which trial it is.

    `labels` are its labels on the experiment's axes.
    """

    trial: str
    experiment: str
    labels: dict[str, str]
    seed: int | None
    digest: str

    @property
    def strategy_axis(self) -> str | None:
        """The axis of colours and rows: recovery, otherwise the first; None without axes."""
        return "recovery" if "recovery" in self.labels else next(iter(self.labels), None)

    @property
    def strategy(self) -> str:
        """The label on that axis; the experiment's name without axes."""
        axis = self.strategy_axis
        return self.experiment if axis is None else self.labels[axis]

    @property
    def condition(self) -> str:
        """The labels on the other axes, such as "kill" or "no fault"; a number with its axis."""
        axis = self.strategy_axis
        return labels_text({key: label for key, label in self.labels.items() if key != axis})


@dataclass(frozen=True)
class Trial:
    """The record of one trial, with the prices for its costs.

    All other values are computed from these, once, on first access. `folder` names the trial if its
    record has no start.
    """

    record: Record
    prices: Prices
    folder: str = ""

    @cached_property
    def identity(self) -> Identity:
        """Which trial it is; a record without a start has an empty experiment."""
        started = self.record.started
        settings = started.settings if started else {}
        return Identity(
            trial=settings.get("trial", started.trial) if started else self.folder,
            experiment=settings.get("experiment", ""),
            labels={str(axis): str(label) for axis, label in settings.get("labels", {}).items()},
            seed=settings.get("seed"),
            digest=settings.get("digest", ""),
        )

    @cached_property
    def score(self) -> Score:
        """The score of its model."""
        return score_of(self.record.config)

    @cached_property
    def status(self) -> tuple[str, str]:
        """Whether it is "valid", "invalid" or "failed", and why."""
        return status(self.record)

    @property
    def whole(self) -> bool:
        """Whether the record is of the whole training; False for one that was resumed."""
        return not self.record.of(TrialResumed)

    # -- when ---------------------------------------------------------------------------------

    @cached_property
    def span(self) -> Span | None:
        """When the training began and ended; None if it never began."""
        return training_span(self.record)

    @property
    def seconds(self) -> float | None:
        """The length of the training."""
        return self.span[1] - self.span[0] if self.span else None

    @cached_property
    def faults(self) -> tuple[FaultTimes, ...]:
        """The moments of each fault."""
        return fault_times(self.record)

    @property
    def loss(self) -> FaultTimes:
        """The first fault by which a shard was not served for a time, otherwise the first of all.

        Without any fault, a placeholder without moments.
        """
        return first_loss(self.faults) or _NO_FAULT

    @cached_property
    def outages(self) -> tuple[Outage, ...]:
        """When shards were not served, over all faults."""
        return outages(self.faults)

    @cached_property
    def down(self) -> list[Span]:
        """The part of each outage that lies within the training, in order of time."""
        start, end = self.span or (0.0, 0.0)
        return [
            (max(start, outage.began), min(end, outage.serving))
            for outage in self.outages
            if outage.began < end and outage.serving > start
        ]

    # -- updates: pushes of the workers, and their outcome ---------------------------------------

    @cached_property
    def pushed(self) -> dict[tuple[str, int, int], float]:
        """When each gradient was first acknowledged: by worker, incarnation and number."""
        first: dict[tuple[str, int, int], float] = {}
        for batch in self.record.of(Acked):
            for t, seq, outcome in zip(batch.times, batch.seqs, batch.outcomes, strict=True):
                key = (batch.worker, batch.incarnation, seq)
                if outcome != "dropped":
                    first[key] = min(t, first.get(key, inf))
        return first

    @cached_property
    def pushed_before(self) -> int:
        """Gradients pushed before the record begins: those in the checkpoints of a resumed trial.

        Runs of different speed align on the count of gradients pushed. It counts work that was
        done, so it never decreases: updates that a failure undid stay counted.
        """
        resumed = self.record.of(TrialResumed)
        return resumed[0].updates if resumed else 0

    @cached_property
    def _push_times(self) -> list[float]:
        return sorted(self.pushed.values())

    def pushed_at(self, t: float) -> int:
        """Return how many gradients workers knew to be safe at `t`, in seconds since the epoch."""
        return self.pushed_before + bisect_right(self._push_times, t)

    @cached_property
    def applied(self) -> list[Row]:
        """Every recorded application of an update."""
        return list(applied_rows(self.record))

    @cached_property
    def ledger(self) -> Ledger:
        """The outcome of every update."""
        return ledger(self.record, self.applied, self.faults)

    @cached_property
    def evaluations(self) -> list[Evaluated]:
        """The evaluations in the order in which their snapshots were read."""
        return evaluations(self.record)

    # -- what it took -------------------------------------------------------------------------

    @cached_property
    def samples(self) -> list[ResourceSampled]:
        """The last sample of each process, which holds its total resource usage."""
        return last_samples(self.record)

    @cached_property
    def spending(self) -> Spending:
        """The money spent, over time."""
        return Spending(self.record, self.prices)


def status(record: Record) -> tuple[str, str]:
    """Return whether a trial is "valid", "invalid" or "failed", and why."""
    ended, missed = record.ended, record.of(FaultMissed)
    if ended is None:
        if not record.events:
            torn = "was cut short in its first line"
            return "failed", f"its record {torn if record.torn else 'is empty'}"
        cut = "; its last line is not whole and left out" if record.torn else ""
        return "failed", f"its record has no end: it is running, or was cut short{cut}"
    if ended.status != "valid":
        return ended.status, ended.reason
    if missed:
        return "invalid", f"fault on {missed[0].target} did not happen: {missed[0].reason}"
    if (lost := first_unplanned(record)) is not None:
        return lost
    if evaluator_lost(record):
        return "failed", "the evaluator was lost: nothing was scored after the training"
    if wrong := [event for event in record.of(EvaluationMissed) if event.score_failed]:
        return "failed", f"evaluations failed, {len(wrong)} in all: {wrong[0].reason}"
    return ended.status, ended.reason


def evaluations(record: Record) -> list[Evaluated]:
    """Return the evaluations in the order in which their snapshots were read."""
    return sorted(record.of(Evaluated), key=lambda event: event.t)


def first_loss(faults: tuple[FaultTimes, ...]) -> FaultTimes | None:
    """Return the first fault by which a shard was not served for a time, or the first of all."""
    felt = (fault for fault in faults if fault.shard is not None)
    return next(felt, faults[0] if faults else None)


# -- the metrics that identify a trial, and whether it counts ---------------------------------

_IDENTITY: dict[str, tuple[Callable[[Trial], Value], str]] = {
    "experiment": (lambda t: t.identity.experiment, "Name of the experiment."),
    "trial": (lambda t: t.identity.trial, "Name of the trial, and of its folder."),
    "strategy": (lambda t: t.identity.strategy, "Label on the axis of recovery strategies."),
    "condition": (lambda t: t.identity.condition, "The trial's labels on the other axes."),
    "seed": (lambda t: t.identity.seed, "Seed of initial values, batch order and data order."),
    "digest": (lambda t: t.identity.digest, "Short hash of the trial's whole configuration."),
    "score": (
        lambda t: t.score.key,
        "Score of the model, `evaluation.metric`; metrics with “accuracy” in their key refer to "
        "it. Higher is better for “accuracy”, “auc” and “r2”, lower for “rmse” and “loss”.",
    ),
    "status": (
        lambda t: t.status[0],
        "“valid”; “invalid” when a planned fault did not happen (one of a random process or a "
        "trace may be skipped), or a node without a fault was evicted; “failed” when the "
        "trial ended in an error, lost a process without a fault, or has no end. Only valid trials "
        "enter statistics.",
    ),
    "reason": (lambda t: t.status[1], "Why a trial is invalid or failed."),
    "failed_before": (
        lambda t: t.record.failed_before,
        "Attempts at the trial that failed before this one; their records are kept in `earlier`.",
    ),
}
IDENTITY = [
    Metric(key, key.replace("_", " "), "", None, text, compute, number=False, whole=False)
    for key, (compute, text) in _IDENTITY.items()
]
