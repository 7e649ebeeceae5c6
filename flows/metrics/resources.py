"""What the figures about resources and money mean."""

from __future__ import annotations

from collections.abc import Iterator

from dps.core.names import ROLES
from flows.metrics.metric import LINKS, Metric, Unit

_ROLE_NAMES = {"all": "all roles", **{role: role for role in ROLES}}
# What is told of each role: the key, the label, the unit, and the definition.
_OF_ROLES: tuple[tuple[str, str, Unit, str], ...] = (
    ("cpu_seconds", "CPU", "s", "User and system processor time of {}, from process start on."),
    (
        "peak_bytes",
        "memory",
        "MB",
        "Largest resident set of each process, summed over {}; a node that took the place of a "
        "lost one is not counted again.",
    ),
    ("sent_bytes", "sent", "MB", "Bytes of dps messages sent by {}."),
    ("received_bytes", "received", "MB", "Bytes of dps messages received by {}."),
)
# Roles that send each other gradients and states.
OF_LINKS = ("server", "replica", "store", "worker")
OF_ROLES = tuple(key for key, *_ in _OF_ROLES)  # figures of one role: "cpu_seconds", …


def _usage() -> Iterator[Metric]:
    for role, name in _ROLE_NAMES.items():
        whose = "all nodes" if role == "all" else f"nodes brought up as {role}"
        for key, label, unit, definition in _OF_ROLES:
            yield Metric(
                f"{key}_{role}",
                f"{label}, {name}",
                unit,
                definition.format(whose),
                f"usage/{role}/{key}",
                better="lower",
            )
    for link in LINKS:
        yield Metric(
            f"sent_bytes_link_{link}",
            f"sent, {link} links",
            "MB",
            f"Bytes sent over {link} links by all nodes.",
            f"usage/link_{link}/sent_bytes",
            better="lower",
        )
    for role in OF_LINKS:
        for link in LINKS:
            yield Metric(
                f"sent_bytes_{role}_{link}",
                f"sent by {role}, {link} links",
                "MB",
                f"Bytes sent over {link} links by nodes brought up as {role}.",
                f"usage/{role}/link_{link}/sent_bytes",
            )


FILTERS = (
    Metric(
        "filter_raw_bytes",
        "gradients before filters",
        "MB",
        "Bytes of the gradients that went through filters; nothing here and below where there are "
        "none.",
        "filters/raw_bytes",
    ),
    Metric(
        "filter_sent_bytes",
        "gradients after filters",
        "MB",
        "Bytes of values and indices that were sent in their place, each update counted once.",
        "filters/sent_bytes",
        better="lower",
    ),
    Metric(
        "filter_saved",
        "saved by filters",
        "%",
        "Share of the bytes of gradients that filters saved.",
        "filters/saved",
        better="higher",
    ),
    Metric(
        "filter_withheld",
        "entries withheld",
        "%",
        "Share of the entries of gradients that were not sent with their update.",
        "filters/withheld",
    ),
    Metric(
        "filter_lost",
        "withheld and lost",
        "",
        "Euclidean norm of what filters withheld of gradients in workers that did not leave in "
        "order, summed over these: it never became part of an update.",
        "filters/lost",
        better="lower",
    ),
)

USAGE = (
    *_usage(),
    Metric(
        "checkpoint_written_bytes",
        "checkpoints written",
        "MB",
        "Bytes of all checkpoints that were published.",
        "usage/checkpoint_written_bytes",
        better="lower",
    ),
    Metric(
        "checkpoint_kept_bytes",
        "checkpoints kept",
        "MB",
        "Bytes of the checkpoints that are kept: the last ones of each shard.",
        "usage/checkpoint_kept_bytes",
        better="lower",
    ),
    Metric(
        "store_bytes",
        "store",
        "MB",
        "The most that state store and mailboxes held.",
        "usage/store_bytes",
        better="lower",
    ),
    Metric(
        "stored_bytes",
        "stored",
        "MB",
        "Checkpoints kept, plus the store at its fullest.",
        "usage/stored_bytes",
        better="lower",
    ),
)

COST = (
    Metric(
        "cost_nodes_usd",
        "nodes",
        "USD",
        "Hours that nodes of each role were up during the training, at the price of the role.",
        "cost/nodes_usd",
        better="lower",
    ),
    Metric(
        "cost_moved_usd",
        "bytes moved",
        "USD",
        "Bytes sent, at the price per GB, as if every link crossed a zone.",
        "cost/moved_usd",
        better="lower",
    ),
    Metric(
        "cost_stored_usd",
        "bytes stored",
        "USD",
        "Bytes stored for the time of the training, at the price per GB and month.",
        "cost/stored_usd",
        better="lower",
    ),
    Metric(
        "cost_usd",
        "money",
        "USD",
        "Nodes on demand, bytes moved and bytes stored, for the time of the training.",
        "cost/usd",
        better="lower",
    ),
    Metric(
        "cost_spot_usd",
        "money, spot",
        "USD",
        "The same with nodes as spot instances.",
        "cost/spot_usd",
        better="lower",
    ),
    Metric(
        "cost_fixed_usd",
        "money, fixed term",
        "USD",
        "The same with nodes rented for a fixed term, paid for whether they are up or not.",
        "cost/fixed_usd",
        better="lower",
    ),
    Metric(
        "cost_per_point_usd",
        "money per percentage point",
        "USD",
        "Money on demand divided by the final accuracy in percentage points; empty for a score "
        "that is no share.",
        "cost/usd_per_point",
        better="lower",
    ),
)
