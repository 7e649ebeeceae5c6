"""Reports of updates that were refused as too stale: in the node's log, and to the driver."""

from __future__ import annotations

from dps.cluster.node.incident_log import SILENT, worker_log
from dps.cluster.node.recorder import LogEvent
from dps.protocol.client.shard_client import Outcome
from dps.protocol.group import Group


def drop_topic(group: str) -> str:
    """Return the Dask topic on which a group's workers report dropped updates."""
    return f"dps-dropped-{group}"


class DropLog:
    """Reports once that updates of a worker were dropped. Used from the event loop."""

    def __init__(self, group: Group, worker: str, log_event: LogEvent) -> None:
        self._group = group
        self._worker = worker
        self._log_event = log_event
        self._said = group.on_loss == SILENT

    def note(self, outcome: Outcome) -> None:
        """Note the outcome of an update."""
        if self._said or outcome != "dropped":
            return
        self._said = True
        worker_log.warning("dps: %s", dropped(self._group, self._worker))
        self._log_event(drop_topic(self._group.name), self._worker)


def dropped(group: Group, worker: str) -> str:
    """Report that updates of a worker were dropped, why, and what to do."""
    return (
        f"updates of {worker} were dropped, not applied: {why_dropped(group)} (parameter server "
        f"{group.name}). worker.dropped counts them"
    )


def why_dropped(group: Group) -> str:
    """Return why updates are dropped, and what to do about it."""
    lease, patience = group.timings.lease, group.timings.patience
    return (
        f"the worker was stopped, unreachable for longer than its lease ({lease:g} s), or busy for "
        f"longer than its patience ({patience:g} s). The others continued without it, so what it "
        "computed meanwhile was too stale. If its steps take so long, raise the limit: "
        f"timings=dps.Timings(patience={10 * patience:g})"
    )
