"""Faults, the outages that they bring about, and the time to recover from them."""

from __future__ import annotations

import math
from operator import attrgetter
from statistics import median

from dps.events import FaultSkipped
from flows.metrics.metric import Metric, Section
from flows.metrics.trial import Trial

RECOVERY = Section()


@RECOVERY.metric("faults met", "count")
def faults(trial: Trial) -> int:
    """Faults that took effect during the training, each on one node. A longer training may meet
    more faults by the clock (`at_seconds`, `every`, a trace).
    """
    return len(trial.faults)


@RECOVERY.metric("faults skipped", "count")
def faults_skipped(trial: Trial) -> int:
    """Faults of a random process or of a trace that were due while their node was down. They are
    not among the faults met.
    """
    return len(trial.record.of(FaultSkipped))


def _recoveries(trial: Trial) -> list[float]:
    return [outage.recovered - outage.began for outage in trial.outages]


@RECOVERY.metric("outages", "count", "lower")
def outages(trial: Trial) -> int:
    """Number of times that a shard was not served because of a fault. A fault during an outage
    prolongs it.
    """
    return len(trial.outages)


@RECOVERY.metric("outages not over", "count", "lower")
def outages_unrecovered(trial: Trial) -> int:
    """Outages after which the shard had applied no update when the training ended."""
    return sum(map(math.isinf, _recoveries(trial)))


@RECOVERY.metric("downtime", "s", "lower")
def downtime_seconds(trial: Trial) -> float:
    """Time during which a fault left at least one shard unserved: the union of all outages."""
    total, last = 0.0, -math.inf
    for since, until in sorted(trial.down):
        total += max(0.0, until - max(since, last))
        last = max(last, until)
    return total


@RECOVERY.metric("downtime, sum over shards", "s", "lower")
def downtime_shard_seconds(trial: Trial) -> float:
    """Time during which a shard was not served, summed over the shards."""
    return sum(until - since for since, until in trial.down)


@RECOVERY.metric("recovery time, median", "s", "lower")
def recovery_median_seconds(trial: Trial) -> float | None:
    """From the fault to the first update applied after recovery: median over all outages. An
    unrecovered outage counts as infinite; empty if the median is infinite.
    """
    middle = median(_recoveries(trial) or [math.inf])
    return middle if math.isfinite(middle) else None


# -- the first fault by which a shard was not served, otherwise the first of all -------------


@RECOVERY.metric("recovered from", number=False)
def recovered_from(trial: Trial) -> str | None:
    """State from which a shard continued after the first fault by which one was not served for a
    time: “promoted” (a replica took over), “checkpoint”, “store”, “initial” values, “worker”
    (rebuilt from a worker's copy), “others” (the head continued with the replicas left), or
    “resumed” (the pause or cut ended before eviction). The parts of recovery are of this fault.
    """
    return trial.loss.source


_PARTS = {
    "detect": ("detect", "From the fault until the coordinator knew of the loss."),
    "wait_capacity": (
        "waiting for a node",
        "The part of “restore” until a fresh node was ready. It depends on the fault plan, not on "
        "the strategy. 0 if no node was needed.",
    ),
    "restore": (
        "restore",
        "From detection until the shard served again, by promotion or from a copy; waiting for a "
        "node included.",
    ),
    "first_applied": (
        "first update",
        "From the moment the shard served again until it had applied an update.",
    ),
    "rto": (
        "recovery time",
        "From the fault, such as SIGKILL, until the first update that the shard applied once it "
        "served again (RTO): detect + restore + first update.",
    ),
}
RECOVERY += [
    Metric(
        f"{part}_seconds",
        label,
        "s",
        None if part == "wait_capacity" else "lower",
        text,
        attrgetter(f"loss.{part}_seconds"),
    )
    for part, (label, text) in _PARTS.items()
]
