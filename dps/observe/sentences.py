"""What became of a group's members, in sentences: what the coordinator records of losses and moves.

`dps run` and `dps top` print them.
"""

from __future__ import annotations

from dps.events import Detected, Event, Failover, LossReported, Moved, RolledBack, WorkerLeft


def sentence(event: Event) -> str | None:
    """Return an event as a sentence; None: it is no loss, nothing done about one, and no move."""
    match event:
        case Detected():
            left = "goes on with the replicas left" if event.serving else "is down"
            return f"{event.node} found lost by the {event.by}; shard {event.shard} {left}"
        case Failover():
            return str(event)
        case LossReported():
            least = "" if event.exact else "at least "
            return f"shard {event.shard} has lost {least}{event.updates} acknowledged updates"
        case Moved():
            return (
                f"shard {event.shard} moved from {event.source} to {event.target}, with a pause of "
                f"{1e3 * event.pause_seconds:.0f} ms"
            )
        case RolledBack():
            return f"all shards go back to cut {event.cut}, for shard {event.shard}"
        case WorkerLeft() if event.reason != "finished":
            return f"{event.worker} {event.reason}"
    return None
