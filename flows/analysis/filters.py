"""What filters did in a trial: bytes before and after them, and what they held back."""

from __future__ import annotations

from dataclasses import dataclass

from dps.events import Filtered
from flows.records.record import Record


@dataclass(frozen=True, slots=True)
class Filtering:
    """The filters of all workers together; None: the trial has none.

    Attributes
    ----------
    raw_bytes, sent_bytes
        Of gradients before filters, and of what was sent in their place.
    saved
        Share of the bytes that was saved.
    withheld
        Share of the entries that was not sent with its update.
    lost
        Sum of the norms of what workers still withheld when they were last heard of. Who leaves in
        order sends it before.
    """

    raw_bytes: int | None = None
    sent_bytes: int | None = None
    saved: float | None = None
    withheld: float | None = None
    lost: float | None = None


def filtering(record: Record) -> Filtering:
    """Return what filters did, from the last event of each start of a worker."""
    last = {(e.worker, e.incarnation): e for e in record.of(Filtered)}
    raw = sum(event.raw_bytes for event in last.values())
    if not raw:
        return Filtering()
    sent = sum(event.sent_bytes for event in last.values())
    entries = sum(event.entries for event in last.values())
    return Filtering(
        raw_bytes=raw,
        sent_bytes=sent,
        saved=1 - sent / raw,
        withheld=sum(event.withheld for event in last.values()) / entries,
        lost=sum(event.residual_norm for event in last.values()),
    )
