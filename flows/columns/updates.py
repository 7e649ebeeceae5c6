"""Owns what the figures about updates mean: what became of them, their age and pace."""

from __future__ import annotations

from flows.columns.column import Column

UPDATES = (
    Column(
        "updates_attempted",
        "attempted",
        "count",
        "Updates that workers sent, as far as acknowledgements and applications show. This and the "
        "other counts are of one update on one shard: a gradient pushed to 2 shards counts twice.",
        "updates/attempted",
    ),
    Column(
        "updates_acked",
        "acked",
        "count",
        "Updates that a worker was told are safe to the strategy's promise.",
        "updates/acked",
    ),
    Column(
        "updates_applied",
        "applied",
        "count",
        "Updates in the final state: the sum of the shards' last versions.",
        "updates/applied",
        better="higher",
    ),
    Column(
        "updates_lost",
        "lost",
        "count",
        "Acked updates that are missing from the state that the shard went on from, and that "
        "nothing brought back.",
        "updates/lost",
        better="lower",
    ),
    Column(
        "updates_buffered",
        "buffered",
        "count",
        "Updates computed during the outage and kept in a mailbox or in the worker.",
        "updates/buffered",
    ),
    Column(
        "updates_replayed",
        "replayed",
        "count",
        "Buffered updates that were applied after the outage.",
        "updates/replayed",
    ),
    Column(
        "updates_dropped",
        "dropped",
        "count",
        "Buffered updates that the replay policy left out.",
        "updates/dropped",
        better="lower",
    ),
    Column(
        "updates_duplicates",
        "refused as duplicates",
        "count",
        "Pushes that a shard refused because it had them: answers to workers that re-sent, and "
        "refusals in a replay.",
        "updates/duplicates",
    ),
    Column(
        "updates_applied_twice",
        "applied twice",
        "count",
        "Applications of an update that the surviving state already held. Must be 0.",
        "updates/applied_twice",
    ),
    Column(
        "updates_replica_conflicts",
        "replica conflicts",
        "count",
        "Versions at which two replicas of a shard applied different updates. Must be 0.",
        "updates/replica_conflicts",
    ),
    Column(
        "updates_audit_mismatches",
        "audit mismatches",
        "count",
        "Final states, read from the shards, that contradict the events. Must be 0.",
        "updates/audit_mismatches",
    ),
    Column(
        "updates_unrecorded",
        "unrecorded",
        "count",
        "Updates in the final state whose application was never reported, because the node that "
        "applied them was killed first.",
        "updates/unrecorded",
    ),
)

STALENESS = (
    Column(
        "staleness_median",
        "staleness, median",
        "count",
        "Version of the shard when a gradient is applied minus the version it was computed from; "
        "median over all applications by heads of shards (nearest rank).",
        "final/staleness_median",
        better="lower",
    ),
    Column(
        "staleness_p99",
        "p99",
        "count",
        "99th percentile of staleness (nearest rank).",
        "final/staleness_p99",
        better="lower",
    ),
    Column(
        "staleness_max",
        "max",
        "count",
        "Largest staleness.",
        "final/staleness_max",
        better="lower",
    ),
    Column(
        "staleness_p99_seconds",
        "p99",
        "s",
        "99th percentile of the age of the weights that a gradient was computed from.",
        "final/staleness_p99_seconds",
        better="lower",
    ),
)

SPEED = (
    Column(
        "training_seconds",
        "training",
        "s",
        "From the start of the workers until one of them last got an answer to a push.",
        "final/training_seconds",
        better="lower",
    ),
    Column(
        "updates_pushed",
        "gradients",
        "count",
        "Different gradients that workers were told are safe, each counted once however many "
        "shards it touches.",
        "updates/pushed",
    ),
    Column(
        "updates_per_second",
        "gradients per second",
        "per second",
        "Gradients divided by the time of the training.",
        "final/updates_per_second",
        better="higher",
    ),
)
