"""What the figures about updates mean: what became of them, their age and pace."""

from __future__ import annotations

from collections.abc import Iterator

from flows.metrics.metric import Metric, Period, Unit

UPDATES = (
    Metric(
        "updates_attempted",
        "attempted",
        "count",
        "Updates that workers sent, as far as acknowledgements and applications show. This and the "
        "other counts are of one update on one shard: a gradient pushed to 2 shards counts twice.",
        "updates/attempted",
    ),
    Metric(
        "updates_acked",
        "acked",
        "count",
        "Updates that a worker was told are safe to the strategy's promise.",
        "updates/acked",
    ),
    Metric(
        "updates_applied",
        "applied",
        "count",
        "Updates in the final state: the sum of the shards' last versions.",
        "updates/applied",
        better="higher",
        whole=False,
    ),
    Metric(
        "updates_lost",
        "lost",
        "count",
        "Updates that a worker took for safe and that are not in the final state: acked ones that "
        "the state that a shard went on from did not have and nothing brought back, and buffered "
        "ones that were lost with their mailbox or worker.",
        "updates/lost",
        better="lower",
    ),
    Metric(
        "updates_buffered",
        "buffered",
        "count",
        "Updates computed during the outage and kept in a mailbox or in the worker; not among the "
        "acked.",
        "updates/buffered",
    ),
    Metric(
        "updates_replayed",
        "replayed",
        "count",
        "Buffered updates that were applied after the outage.",
        "updates/replayed",
    ),
    Metric(
        "updates_dropped",
        "dropped",
        "count",
        "Updates that were given up: buffered ones that the replay policy left out, and those that "
        "a shard refused as too stale.",
        "updates/dropped",
        better="lower",
    ),
    Metric(
        "updates_duplicates",
        "refused as duplicates",
        "count",
        "Pushes that a shard refused because it had them: answers to workers that re-sent, and "
        "refusals in a replay.",
        "updates/duplicates",
    ),
    Metric(
        "updates_applied_twice",
        "applied twice",
        "count",
        "Applications of an update that the surviving state already held. Must be 0.",
        "updates/applied_twice",
        whole=False,
    ),
    Metric(
        "updates_replica_conflicts",
        "replica conflicts",
        "count",
        "Versions at which two replicas of a shard applied different updates. Must be 0.",
        "updates/replica_conflicts",
        whole=False,
    ),
    Metric(
        "updates_audit_mismatches",
        "audit mismatches",
        "count",
        "Final states, read from the shards, that contradict the events. Must be 0.",
        "updates/audit_mismatches",
    ),
    Metric(
        "updates_lost_per_fault",
        "lost by a fault",
        "count",
        "The most updates that one fault lost, acked and buffered, on all shards together (RPO).",
        "recovery/rpo_updates",
        better="lower",
        of_faults=True,
    ),
    Metric(
        "updates_unrecorded",
        "unrecorded",
        "count",
        "Updates in the final state whose application was never reported, because the node that "
        "applied them was killed first.",
        "updates/unrecorded",
    ),
)

_WHEN: dict[Period | None, str] = {
    None: "",
    "before": " before the first fault",
    "during": " during a fault: applied after it began, from weights read before the shard served "
    "again; replayed updates are among them",
    "after": " after the faults",
}


def _staleness() -> Iterator[Metric]:
    for period, when in _WHEN.items():
        prefix = f"{period}_" if period else ""
        metric = f"fault/staleness_{prefix}" if period else "final/staleness_"
        for name, label, unit, definition in _FIGURES:
            yield Metric(
                f"staleness_{prefix}{name}",
                f"staleness {label}, {period}" if period else f"staleness {label}",
                unit,
                f"{definition}{when}.",
                f"{metric}{name}",
                better="lower",
                of_faults=period in ("during", "after"),
            )


_VERSIONS = (
    "Version of the shard when an update is applied minus the version it was computed from; {} of "
    "the applications by heads of shards (nearest rank)"
)
_SECONDS = (
    "Age of the weights that an update was computed from when it is applied; {} of the "
    "applications by heads of shards (nearest rank)"
)
_FIGURES: tuple[tuple[str, str, Unit, str], ...] = (
    ("median", "median", "count", _VERSIONS.format("median")),
    ("p99", "p99", "count", _VERSIONS.format("99th percentile")),
    ("max", "max", "count", _VERSIONS.format("largest")),
    ("median_seconds", "median", "s", _SECONDS.format("median")),
    ("p99_seconds", "p99", "s", _SECONDS.format("99th percentile")),
)
STALENESS = tuple(_staleness())

SPEED = (
    Metric(
        "training_seconds",
        "training",
        "s",
        "From the start of the workers until one of them last got an answer to a push.",
        "final/training_seconds",
        better="lower",
    ),
    Metric(
        "gradients_pushed",
        "gradients",
        "count",
        "Different gradients that workers were told are safe or buffered, each counted once "
        "however many shards it touches, and whatever became of it later.",
        "gradients/pushed",
    ),
    Metric(
        "gradients_per_second",
        "gradients per second",
        "per second",
        "Gradients divided by the time of the training.",
        "final/gradients_per_second",
        better="higher",
    ),
    Metric(
        "gradients_together",
        "gradients, all workers at work",
        "per second",
        "Gradients per second while all workers were at work: from when the last one had pushed "
        "its first gradient until one had pushed its last. Leaves out how workers come and go, "
        "which weighs more the shorter a training is.",
        "final/gradients_together",
        better="higher",
    ),
    Metric(
        "gradients_steady",
        "steady rate",
        "per second",
        "Gradients per second while all workers were at work, without the time from each fault to "
        "when nothing was left of it to be seen: the shard applied updates again, what was paused "
        "or disturbed went on, and the node that took a lost one's place was a replica or worked. "
        "Empty where no time is left.",
        "final/gradients_steady",
        better="higher",
    ),
    Metric(
        "goodput",
        "goodput",
        "per second",
        "Gradients in the final state, mean over the shards, divided by the time of the training.",
        "final/goodput",
        better="higher",
    ),
    Metric(
        "idle_share",
        "workers idle",
        "%",
        "Share of the workers' time, from first to last report, in which they did not compute a "
        "gradient (the emulated part counts as computing): they waited for the server or for each "
        "other.",
        "final/idle_share",
        better="lower",
    ),
    Metric(
        "load_average",
        "load average",
        "",
        "Processes that wanted a core of the machine that drives the trial, on average over a "
        "minute: when the trial began or when it ended, whichever is more. Empty on virtual time.",
        "final/load_average",
    ),
)
