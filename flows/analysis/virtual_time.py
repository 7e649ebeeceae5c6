"""Which trials ran on virtual time, as it was recorded, and what is said of them beside others."""

from __future__ import annotations

from collections.abc import Sequence

from flows.records.record import Record

REAL = ""


def profile(record: Record) -> str:
    """Return the profile of a trial that ran on virtual time; "" of one on real nodes."""
    cluster = record.config.get("cluster", {}) if record.started is not None else {}
    return str(cluster.get("profile", "?")) if cluster.get("kind") == "virtual" else REAL


def told(profiles: Sequence[str]) -> str:
    """Say of some trials on which time they ran; "" if all did on real nodes.

    Where it is not the same of all, it says that they cannot be compared.
    """
    found = sorted(set(profiles))
    if found == [REAL] or not found:
        return ""
    if len(found) == 1:
        return f"virtual, with the profile {found[0]}: times, money and use follow from that model"
    each = [
        f"{profiles.count(name)} "
        + (f"on virtual time with the profile {name}" if name else "on real nodes")
        for name in found
    ]
    return (
        f"not the same: {', '.join(each)}; do not compare times, money and use of one with another"
    )
