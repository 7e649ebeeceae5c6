"""Metrics of updates: their outcomes, the staleness of their weights, and their pace."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter

from dps.events import Reported
from flows.metrics.metric import Better, Metric, Section, Unit
from flows.metrics.trial import Trial
from flows.records.events import Audited, LoadMeasured, TrainingStarted
from flows.records.record import Record

COMPUTE = "compute_seconds"

UPDATES = Section()

# What the ledger counts, and what it is.
_COUNTS = {
    "acked": "Updates whose worker received the ack. This and the other counts are of one update "
    "on one shard: a gradient pushed to 2 shards counts twice.",
    "applied": "Updates in the final state: the sum of the shards' last versions.",
    "lost": "Acked or buffered updates that are missing in the final state: the shard was restored "
    "from a state without them, or they were lost with their mailbox or worker.",
    "lost_per_fault": "Maximum of updates lost by one fault, acked and buffered, on all shards "
    "together (RPO).",
    "buffered": "Updates computed during an outage and kept in a mailbox or a worker; not acked.",
    "replayed": "Buffered updates that were applied after the outage.",
    "dropped": "Buffered updates that the replay policy left out, and updates that a shard "
    "rejected as too stale.",
    "duplicates": "Pushes of updates that the shard had: resent by a worker, or in a replay.",
    "applied_twice": "Applications of an update that the surviving state already held. Must be 0.",
    "replica_conflicts": "Versions at which two replicas of a shard applied different updates. "
    "Must be 0.",
    "audit_mismatches": "Final states, read from shards, that contradict the events. Must be 0.",
}
_BETTER: dict[str, Better] = {
    "applied": "higher",
    "lost": "lower",
    "lost_per_fault": "lower",
    "dropped": "lower",
}
_AT_THE_END = ("applied", "applied_twice", "replica_conflicts")  # known of resumed trials as well
UPDATES += [
    Metric(
        f"updates_{name}",
        name.replace("_", " "),
        "count",
        _BETTER.get(name),
        text,
        attrgetter(f"ledger.{name}"),
        whole=name not in _AT_THE_END,
    )
    for name, text in _COUNTS.items()
]


# -- examples --------------------------------------------------------------------------------

_EXAMPLES: dict[str, tuple[Unit, Better, str]] = {
    "examples_applied": ("count", "higher", "Examples in the final state, once for each epoch."),
    "examples_lost": (
        "count",
        "lower",
        "Examples missing in the final state, once for each epoch.",
    ),
    "examples_repeated": ("count", "lower", "Examples that were applied repeatedly."),
    "epochs": ("", "higher", "Passes over the leased data that are in the final state."),
}


def _of_examples(name: str, trial: Trial) -> float | None:
    """Count the examples of leased data; None for other trials, or if a shard did not answer."""
    training = trial.record.config.get("training", {})
    audits = {audit.shard: audit for audit in trial.record.of(Audited)}.values()
    started = trial.record.of(TrainingStarted)
    if training.get("epochs") is None or not started or len(audits) < started[0].shards:
        return None
    size = training["batch_size"] * training.get("local_steps", 1)
    applied = min(audit.batches for audit in audits)
    counts: dict[str, float] = {
        "examples_applied": size * applied,
        "examples_lost": size * (training["updates"] - applied),
        "examples_repeated": size * max(audit.version - audit.batches for audit in audits),
        "epochs": training["epochs"] * applied / training["updates"],
    }
    return counts[name]


UPDATES += [
    Metric(
        name,
        name.replace("_", " "),
        unit,
        better,
        f"{text} Value of the worst shard. Empty without leases (`training.epochs`), or if a "
        "shard was down at the end.",
        partial(_of_examples, name),
        whole=False,
    )
    for name, (unit, better, text) in _EXAMPLES.items()
]


# -- staleness -------------------------------------------------------------------------------


def nearest_rank(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _staleness(rank: str, share: float, name: str, unit: Unit) -> Metric:
    field, what = (
        (
            "staleness_seconds",
            "Age of the weights from which an update was computed, when it is applied",
        )
        if unit == "s"
        else (
            "staleness",
            "Version of the shard when an update is applied, minus the version of its weights",
        )
    )
    return Metric(
        f"staleness_{rank}{'_seconds' if unit == 's' else ''}",
        f"staleness {rank}",
        unit,
        "lower",
        f"{what}; {name} of the applications by heads of shards (nearest rank).",
        lambda trial: nearest_rank(
            [getattr(row, field) for row in trial.applied if row.head], share
        ),
    )


UPDATES += [
    _staleness("median", 0.5, "median", "count"),
    _staleness("p99", 0.99, "99th percentile", "count"),
    _staleness("max", 1.0, "largest", "count"),
    _staleness("median", 0.5, "median", "s"),
    _staleness("p99", 0.99, "99th percentile", "s"),
]


# -- pace ------------------------------------------------------------------------------------


@UPDATES.metric("training", "s", "lower")
def training_seconds(trial: Trial) -> float | None:
    """From the start of the workers until the last reply to a push."""
    return trial.seconds


@UPDATES.metric("gradients", "count")
def gradients_pushed(trial: Trial) -> int:
    """Distinct gradients that were acknowledged to workers as safe or buffered, each counted once
    regardless of the number of shards that it touches, even if it was lost later.
    """
    return len(trial.pushed)


@UPDATES.metric("gradients per second", "per second", "higher")
def gradients_per_second(trial: Trial) -> float | None:
    """Gradients divided by the time of the training."""
    return len(trial.pushed) / trial.seconds if trial.seconds else None


@UPDATES.metric("gradients, all workers at work", "per second", "higher")
def gradients_together(trial: Trial) -> float | None:
    """Gradients per second while all workers were at work: from when the last one had pushed its
    first gradient until one had pushed its last. Excludes the start and the end of workers.
    """
    by_worker: defaultdict[str, list[float]] = defaultdict(list)
    for (worker, _, _), t in trial.pushed.items():
        by_worker[worker].append(t)
    began = max(map(min, by_worker.values()), default=0.0)
    ended = min(map(max, by_worker.values()), default=0.0)
    if ended <= began:
        return None
    return sum(began < t <= ended for t in trial.pushed.values()) / (ended - began)


@UPDATES.metric("goodput", "per second", "higher")
def goodput(trial: Trial) -> float | None:
    """Gradients in the final state, mean over the shards, divided by the time of the training."""
    if not trial.seconds:
        return None
    return trial.ledger.applied / trial.record.of(TrainingStarted)[0].shards / trial.seconds


@UPDATES.metric("workers idle", "%", "lower")
def idle_share(trial: Trial) -> float | None:
    """Share of the workers' time, from first to last report, in which they did not compute a
    gradient (the emulated part counts as computing): they waited for the server or for each other.
    """
    steps = list(computing(trial.record))
    there = sum(end - began for began, end, _ in steps)
    if there <= 0:
        return None
    computed = sum(seconds for _, _, seconds in steps)
    # The clock of a report is not the one that the computation was timed with.
    return max(0.0, 1 - computed / there)


@UPDATES.metric("load average")
def load_average(trial: Trial) -> float | None:
    """Processes that wanted a core of the machine that drives the trial, on average over a minute:
    when the trial began or when it ended, whichever is more. Empty on virtual time.
    """
    return max((event.load for event in trial.record.of(LoadMeasured)), default=None)


def computing(record: Record) -> Iterator[tuple[float, float, float]]:
    """Yield for every step of a worker but its first: its beginning, its end, seconds computed.

    A step runs from one report to the next, so that the time in which a worker loads its data
    is in none.
    """
    runs: defaultdict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for event in record.of(Reported):
        if event.name == COMPUTE:
            run = runs[event.worker, event.incarnation]
            run.extend(zip(event.times, event.values, strict=True))
    for steps in runs.values():
        for (began, _), (end, computed) in pairwise(sorted(steps)):
            yield began, end, computed
