"""Owns what each figure of `Outcome.row()` means: its heading, unit, definition and metric name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from flows.usage import LINKS, ROLES

Unit = Literal["", "%", "points", "s", "MB", "USD", "count", "per second"]

NOT_APPLICABLE = "–"

_ROLE_NAMES = {"all": "all roles", **{role: role for role in ROLES}}


@dataclass(frozen=True, slots=True)
class Column:
    """One figure.

    Attributes
    ----------
    key
        Its name in `Outcome.row()`.
    label
        Its heading in tables.
    unit
        How its value is written; rows hold plain numbers (shares in [0, 1], seconds, bytes, USD).
    definition
        What it is, in a sentence for the reader of a table.
    metric
        Its name among the metrics of a tracked run; None for what is not a number.
    """

    key: str
    label: str
    unit: Unit
    definition: str
    metric: str | None = None

    def text(self, value: Any) -> str:
        """Return a value of this column as a reader wants to see it."""
        if value is None or value == "":
            return NOT_APPLICABLE
        if isinstance(value, str):
            return value
        return _number(float(value), self.unit).replace("-", "−")


def _number(value: float, unit: Unit) -> str:
    if value == 0:
        return "0"
    if unit in ("%", "points"):
        return f"{100 * value:.1f}"
    if unit in ("count", ""):
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    if unit == "MB":
        return _three_digits(value / 1e6)
    if unit == "USD":
        return _money(value)
    if unit == "s" and abs(value) < 1:
        return f"{value:.3f}"
    return _three_digits(value)


def _money(value: float) -> str:
    if value >= 0.1:
        return f"{value:,.2f}"
    return "<0.000001" if value < 1e-6 else f"{value:.6f}"


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


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
        "“valid”; “invalid” when a planned fault did not happen; “failed” when the trial ended in "
        "an error or has no end. Only valid trials enter statistics.",
    ),
    Column("reason", "reason", "", "Why a trial is invalid or failed."),
)

ACCURACY = (
    Column(
        "accuracy_final",
        "final accuracy",
        "%",
        "Test accuracy: mean of the last 3 evaluations.",
        "final/accuracy",
    ),
    Column("accuracy_best", "best", "%", "Highest evaluation of the trial.", "final/best_accuracy"),
    Column(
        "accuracy_before",
        "before fault",
        "%",
        "Last evaluation whose snapshot was read before the fault.",
        "fault/accuracy_before",
    ),
    Column(
        "accuracy_before_mean",
        "before fault, mean of 3",
        "%",
        "Mean of the last 3 evaluations before the fault.",
        "fault/accuracy_before_mean",
    ),
    Column(
        "accuracy_after",
        "after fault",
        "%",
        "First evaluation after the shard served again.",
        "fault/accuracy_after",
    ),
    Column(
        "accuracy_drop",
        "drop",
        "points",
        "Accuracy before the fault minus accuracy after it, in percentage points; negative when "
        "accuracy was higher afterwards.",
        "fault/accuracy_drop",
    ),
    Column(
        "accuracy_lowest_after",
        "lowest after fault",
        "%",
        "Lowest evaluation after the shard served again.",
        "fault/accuracy_lowest_after",
    ),
    Column(
        "regain_seconds",
        "regained after",
        "s",
        "From the fault to the first evaluation, after the shard served again, that is at least "
        "the accuracy before the fault. As coarse as the interval between evaluations; empty when "
        "never reached.",
        "fault/regain_seconds",
    ),
    Column("evaluations", "evaluations", "count", "Snapshots scored.", "final/evaluations"),
    Column(
        "evaluations_missed",
        "evaluations missed",
        "count",
        "Snapshots that could not be read because a shard was down.",
        "final/evaluations_missed",
    ),
)

RECOVERY = (
    Column("faults", "faults", "count", "Kills and pauses carried out.", "recovery/faults"),
    Column("fault_kind", "fault", "", "“kill” (SIGKILL) or “pause” (SIGSTOP): the first fault."),
    Column("fault_node", "node", "", "Node whose process the first fault hit."),
    Column(
        "fault_updates",
        "fault at",
        "count",
        "Updates that the shards had applied when it was sent.",
        "recovery/fault_at_updates",
    ),
    Column("detected_by", "detected by", "", "Who noticed the loss: scheduler or client."),
    Column(
        "recovered_from",
        "recovered from",
        "",
        "What the shard went on from: “promoted” (a replica took over), “checkpoint”, “store”, "
        "“initial” values, “others” (the head went on with the replicas left), or “resumed” (the "
        "pause ended before the node was given up).",
    ),
    Column(
        "detect_seconds",
        "detect",
        "s",
        "From the fault until the coordinator knew of the loss.",
        "recovery/detect_seconds",
    ),
    Column(
        "wait_capacity_seconds",
        "of restore: no node",
        "s",
        "The part of “restore” that passed until a fresh node was there; set by the fault plan, "
        "not by the strategy. 0 where none was needed.",
        "recovery/wait_capacity_seconds",
    ),
    Column(
        "restore_seconds",
        "restore",
        "s",
        "From detection until the shard served again, by promotion or from a copy; waiting for a "
        "node included.",
        "recovery/restore_seconds",
    ),
    Column(
        "first_applied_seconds",
        "first update",
        "s",
        "From the moment the shard served again until it had applied an update.",
        "recovery/first_applied_seconds",
    ),
    Column(
        "rto_seconds",
        "recovery time",
        "s",
        "From SIGKILL until the first update that the shard applied after it (RTO): detect + "
        "restore + first update.",
        "recovery/rto_seconds",
    ),
)

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
    ),
    Column(
        "updates_lost",
        "lost",
        "count",
        "Acked updates that are missing from the state that the shard went on from, and that "
        "nothing brought back.",
        "updates/lost",
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
    ),
    Column(
        "staleness_p99",
        "p99",
        "count",
        "99th percentile of staleness (nearest rank).",
        "final/staleness_p99",
    ),
    Column("staleness_max", "max", "count", "Largest staleness.", "final/staleness_max"),
    Column(
        "staleness_p99_seconds",
        "p99",
        "s",
        "99th percentile of the age of the weights that a gradient was computed from.",
        "final/staleness_p99_seconds",
    ),
)

SPEED = (
    Column(
        "training_seconds",
        "training",
        "s",
        "From the start of the workers until one of them last got an answer to a push.",
        "final/training_seconds",
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
    ),
)


def _usage() -> Iterator[Column]:
    for role, name in _ROLE_NAMES.items():
        yield Column(
            f"cpu_seconds_{role}",
            f"CPU, {name}",
            "s",
            f"User and system processor time of {_whose(role)}, from process start on.",
            f"usage/{role}/cpu_seconds",
        )
        yield Column(
            f"peak_bytes_{role}",
            f"memory, {name}",
            "MB",
            f"Largest resident set of each process, summed over {_whose(role)}; a node that took "
            "the place of a lost one is not counted again.",
            f"usage/{role}/peak_bytes",
        )
        yield Column(
            f"sent_bytes_{role}",
            f"sent, {name}",
            "MB",
            f"Bytes of dps messages sent by {_whose(role)}.",
            f"usage/{role}/sent_bytes",
        )
        yield Column(
            f"received_bytes_{role}",
            f"received, {name}",
            "MB",
            f"Bytes of dps messages received by {_whose(role)}.",
            f"usage/{role}/received_bytes",
        )
    for link in LINKS:
        yield Column(
            f"sent_bytes_link_{link}",
            f"sent, {link} links",
            "MB",
            f"Bytes sent over {link} links by all nodes.",
            f"usage/link_{link}/sent_bytes",
        )


def _whose(role: str) -> str:
    return "all nodes" if role == "all" else f"nodes brought up as {role}"


USAGE = (
    *_usage(),
    Column(
        "checkpoint_written_bytes",
        "checkpoints written",
        "MB",
        "Bytes of all checkpoints that were published.",
        "usage/checkpoint_written_bytes",
    ),
    Column(
        "checkpoint_kept_bytes",
        "checkpoints kept",
        "MB",
        "Bytes of the checkpoints that are kept: the last ones of each shard.",
        "usage/checkpoint_kept_bytes",
    ),
    Column(
        "store_bytes",
        "store",
        "MB",
        "The most that state store and mailboxes held.",
        "usage/store_bytes",
    ),
    Column(
        "stored_bytes",
        "stored",
        "MB",
        "Checkpoints kept, plus the store at its fullest.",
        "usage/stored_bytes",
    ),
)

COST = (
    Column(
        "cost_nodes_usd",
        "nodes",
        "USD",
        "Hours that nodes of each role were up during the training, at the price of the role.",
        "cost/nodes_usd",
    ),
    Column(
        "cost_moved_usd",
        "bytes moved",
        "USD",
        "Bytes sent, at the price per GB, as if every link crossed a zone.",
        "cost/moved_usd",
    ),
    Column(
        "cost_stored_usd",
        "bytes stored",
        "USD",
        "Bytes stored for the time of the training, at the price per GB and month.",
        "cost/stored_usd",
    ),
    Column(
        "cost_usd",
        "money",
        "USD",
        "Nodes, bytes moved and bytes stored, for the time of the training.",
        "cost/usd",
    ),
)

COLUMNS: tuple[Column, ...] = (
    *IDENTITY,
    *ACCURACY,
    *RECOVERY,
    *UPDATES,
    *STALENESS,
    *SPEED,
    *USAGE,
    *COST,
)

BY_KEY: dict[str, Column] = {column.key: column for column in COLUMNS}
