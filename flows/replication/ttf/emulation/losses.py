"""What a trial of the emulation lost: one rule for its three mechanics."""

from __future__ import annotations

from flows.analysis.ledger import acked_rows, applied_rows, truncations
from flows.records.record import Record


def lost_gradients(record: Record) -> int:
    """Return how many gradients a server had been given that are not in the final weights.

    Only a server of checkpoint or chain tells the worker that a gradient is applied; the stateless
    one takes gradients out of the store that nobody has again if it is killed before it puts the
    weights back. So what counts is not what was acknowledged. The one worker numbers its gradients,
    and they arrive in that order: whatever came before the last one that a server had is either in
    the weights or lost, and whatever came after it is still in the queue.

    The version of the weights says how many are in them, also of those whose application a killed
    server could not report any more.
    """
    rows = [row for row in applied_rows(record) if row.head]
    given = [row.id.seq for row in rows]
    given += [ack.id.seq for ack in acked_rows(record) if ack.outcome == "applied"]
    starts = truncations(record)
    if not given or not starts:
        return 0
    last = max(starts, key=lambda start: start.epoch)
    held = max([last.version, *(row.version for row in rows if row.epoch == last.epoch)])
    return max(given) + 1 - held
