"""Lines in the log of Dask on a node: incidents, dropped updates, and fewer tracebacks."""

from __future__ import annotations

import logging

from distributed.client import AllExit

from dps.cluster.names import KEY_PREFIX
from dps.errors import GroupClosed, ResultLost, TrainingStopped, UpdatesLost
from dps.events import Event, Failover, LossReported, Sink
from dps.protocol.group import Group
from dps.protocol.messages import Loss

SILENT = "ignore"

# Below the loggers that Dask shows by default, and keeps for `Client.get_worker_logs()`.
scheduler_log = logging.getLogger("distributed.scheduler.dps")
worker_log = logging.getLogger("distributed.worker.dps")
_dask_log = logging.getLogger("distributed.worker")

_ERRORS = (GroupClosed, ResultLost, TrainingStopped, UpdatesLost)
_ON_PURPOSE = tuple(f"{error.__name__}(" for error in _ERRORS)


def logged(group: Group, sink: Sink) -> Sink:
    """Return a sink that also writes failovers and losses to the log of Dask's scheduler."""

    def take(event: Event) -> None:
        what: Failover | Loss | None = event if isinstance(event, Failover) else None
        if isinstance(event, LossReported):
            lost = event.shard, event.t, event.updates, event.exact
            what = Loss(*lost, event.source, event.version, event.epoch, {}, event.cause)
        if what is not None and group.on_loss != SILENT:
            scheduler_log.warning("dps: %s (group %s, epoch %d)", what, group.name, what.epoch)
        sink(event)

    return take


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


def is_logged(times: int) -> bool:
    """Whether to log a repeated failure: the 1st, 10th, 100th time, ..."""
    return str(times).strip("0") == "1"


def keep_quiet() -> None:
    """Keep this process from logging tracebacks of workers that are ended on purpose."""
    _dask_log.addFilter(_one_line)
    logging.getLogger("asyncio").addFilter(_retrieved)


def _retrieved(record: logging.LogRecord) -> bool:
    """Drop the records of an interrupted `Client.gather`, whose tasks nothing retrieves."""
    return not (record.exc_info and isinstance(record.exc_info[1], AllExit))


def _one_line(record: logging.LogRecord) -> bool:
    """Shorten Dask's record of a worker's task to one line if the task was ended on purpose."""
    about = record.args if str(record.msg).startswith("Compute Failed\nKey:") else None
    if not isinstance(about, tuple) or len(about) != 5:
        return True
    key, _, _, exception, _ = about
    if not (str(key).startswith(KEY_PREFIX) and str(exception).startswith(_ON_PURPOSE)):
        return True
    record.levelno, record.levelname = logging.INFO, "INFO"
    record.msg, record.args = "dps: %s ended: %s", (key, exception)
    return _dask_log.isEnabledFor(logging.INFO)
