"""Lines about lost updates in Dask's own log, of workers and of the scheduler."""

from __future__ import annotations

import logging
from typing import Any

from dps.events import Event, LossReported, Sink
from dps.protocol.group import Group
from dps.protocol.messages import Loss

SILENT = "ignore"

# Below the loggers that Dask shows by default, and keeps for `Client.get_worker_logs()`.
scheduler_log = logging.getLogger("distributed.scheduler.dps")
worker_log = logging.getLogger("distributed.worker.dps")


def logged(group: Group, sink: Sink) -> Sink:
    """A sink that also writes losses to the log of Dask's scheduler."""

    def take(event: Event) -> None:
        if isinstance(event, LossReported) and group.on_loss != SILENT:
            scheduler_log.warning("%s", _line(group, event))
        sink(event)

    return take


def log_own(group: Group, worker: str, loss: Loss) -> None:
    """Write to the log of a worker's node that some of the worker's updates are lost."""
    if group.on_loss != SILENT:
        worker_log.warning("dps: of the updates of %s, %s (group %s)", worker, loss, group.name)


def _line(group: Group, event: LossReported) -> str:
    what: Any = event.t, event.updates, event.exact, event.source, event.version, event.epoch
    return f"dps: {Loss(event.shard, *what)} (group {group.name}, epoch {event.epoch})"
