"""Lines about failovers and lost updates in Dask's own log, of workers and of the scheduler."""

from __future__ import annotations

import logging

from dps.events import Event, Failover, LossReported, Sink
from dps.protocol.group import Group
from dps.protocol.messages import Loss

SILENT = "ignore"

# Below the loggers that Dask shows by default, and keeps for `Client.get_worker_logs()`.
scheduler_log = logging.getLogger("distributed.scheduler.dps")
worker_log = logging.getLogger("distributed.worker.dps")


def logged(group: Group, sink: Sink) -> Sink:
    """Return a sink that also writes failovers and losses to the log of Dask's scheduler."""

    def take(event: Event) -> None:
        if isinstance(event, Failover | LossReported) and group.on_loss != SILENT:
            what = event if isinstance(event, Failover) else _loss(event)
            scheduler_log.warning("dps: %s (group %s, epoch %d)", what, group.name, event.epoch)
        sink(event)

    return take


def log_own(group: Group, worker: str, loss: Loss) -> None:
    """Log on the worker's node that some of the worker's updates are lost."""
    if group.on_loss != SILENT:
        worker_log.warning("dps: of the updates of %s, %s (group %s)", worker, loss, group.name)


def _loss(event: LossReported) -> Loss:
    state = event.source, event.version, event.epoch
    return Loss(event.shard, event.t, event.updates, event.exact, *state, {}, event.cause)
