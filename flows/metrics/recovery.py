"""What the figures about faults and the time to recover from them mean."""

from __future__ import annotations

from flows.metrics.metric import Metric

OUTAGES = (
    Metric(
        "faults",
        "faults met",
        "count",
        "Faults that were carried out during the training, each on one node. Of faults by the "
        "clock (`at_seconds`, `every`, a trace) a longer training may meet more.",
        "recovery/faults",
    ),
    Metric(
        "faults_skipped",
        "faults skipped",
        "count",
        "Faults of a random process or of a trace that came when nobody was there to be hit: what "
        "is down cannot fail. They are not among the faults met.",
        "recovery/faults_skipped",
    ),
    Metric(
        "outages",
        "outages",
        "count",
        "How often a shard was not served because of a fault, over all faults and shards. A fault "
        "that hits a shard that is down prolongs its outage.",
        "recovery/outages",
        better="lower",
    ),
    Metric(
        "outages_unrecovered",
        "outages not over",
        "count",
        "Outages of shards that had applied no update again when the training ended.",
        "recovery/outages_unrecovered",
        better="lower",
    ),
    Metric(
        "downtime_seconds",
        "downtime",
        "s",
        "For how long, from a fault on, at least one shard was not served during the training: the "
        "union of all outages.",
        "recovery/downtime_seconds",
        better="lower",
    ),
    Metric(
        "downtime_shard_seconds",
        "downtime, sum over shards",
        "s",
        "For how long each shard was not served during the training, summed over the shards.",
        "recovery/downtime_shard_seconds",
        better="lower",
    ),
    Metric(
        "recovery_median_seconds",
        "recovery time, median",
        "s",
        "From the fault to the first update applied after recovery: median over all outages. One "
        "that was not over counts as longer than any other; empty where the median is such a one.",
        "recovery/median_seconds",
        better="lower",
        of_faults=True,
    ),
    Metric(
        "recovery_max_seconds",
        "recovery time, longest",
        "s",
        "The same, the longest of all outages; empty where one was not over.",
        "recovery/max_seconds",
        better="lower",
        of_faults=True,
    ),
)

RECOVERY = (
    Metric(
        "fault_kind",
        "fault",
        "",
        "“kill” (SIGKILL), “host” (lost with it), “pause” (SIGSTOP) and so on: the first fault by "
        "which a shard was not served for a time, else the first of all. The parts of recovery, "
        "and the descriptions before and after a fault, are of this one.",
    ),
    Metric("fault_node", "node", "", "Node that this fault hit."),
    Metric(
        "fault_updates",
        "fault at",
        "count",
        "Updates that the shards had applied when it was sent.",
        "recovery/fault_at_updates",
        of_faults=True,
    ),
    Metric(
        "detected_by",
        "detected by",
        "",
        "Who noticed the loss: “scheduler” (a connection broke), “client” (calls failed), “lease” "
        "(the node was not heard of in time) or “coordinator” (the node did not "
        "answer it, or another process has its address).",
    ),
    Metric(
        "recovered_from",
        "recovered from",
        "",
        "What the shard went on from: “promoted” (a replica took over), “checkpoint”, “store”, "
        "“initial” values, “worker” (rebuilt from what a worker held), “others” (the head went on "
        "with the replicas left), or “resumed” (the pause or cut ended before the node was given "
        "up).",
    ),
    Metric(
        "detect_seconds",
        "detect",
        "s",
        "From the fault until the coordinator knew of the loss.",
        "recovery/detect_seconds",
        better="lower",
        of_faults=True,
    ),
    Metric(
        "wait_capacity_seconds",
        "waiting for a node",
        "s",
        "The part of “restore” that passed until a fresh node was there; set by the fault plan, "
        "not by the strategy. 0 where none was needed.",
        "recovery/wait_capacity_seconds",
        of_faults=True,
    ),
    Metric(
        "restore_seconds",
        "restore",
        "s",
        "From detection until the shard served again, by promotion or from a copy; waiting for a "
        "node included.",
        "recovery/restore_seconds",
        better="lower",
        of_faults=True,
    ),
    Metric(
        "first_applied_seconds",
        "first update",
        "s",
        "From the moment the shard served again until it had applied an update.",
        "recovery/first_applied_seconds",
        better="lower",
        of_faults=True,
    ),
    Metric(
        "rto_seconds",
        "recovery time",
        "s",
        "From the fault, such as SIGKILL, until the first update that the shard applied once it "
        "served again (RTO): detect + restore + first update.",
        "recovery/rto_seconds",
        better="lower",
        of_faults=True,
    ),
)
