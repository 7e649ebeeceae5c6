"""Lines in the log of Dask on a node: incidents, dropped updates, and fewer tracebacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from distributed.client import AllExit

from dps.cluster.names import KEY_PREFIX, topic
from dps.errors import GroupClosed, ResultLost, TrainingStopped, UpdatesLost
from dps.events import Event, Failover, LossReported, Sink
from dps.protocol.client.shard_client import Outcome
from dps.protocol.group import Group
from dps.protocol.messages import Loss

LogEvent = Callable[[str, Any], None]

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


class DropLog:
    """Reports once that updates of a worker were dropped. Used from the event loop."""

    def __init__(self, group: Group, worker: str, log_event: LogEvent) -> None:
        self._group = group
        self._worker = worker
        self._log_event = log_event
        self._reported = group.on_loss == SILENT

    def note(self, outcome: Outcome) -> None:
        """Note the outcome of an update."""
        if self._reported or outcome != "dropped":
            return
        self._reported = True
        worker_log.warning("dps: %s", dropped(self._group, self._worker))
        self._log_event(topic("dropped", self._group.name), self._worker)


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


_ERRORS = (GroupClosed, ResultLost, TrainingStopped, UpdatesLost)
_ON_PURPOSE = tuple(f"{error.__name__}(" for error in _ERRORS)

_dask_log = logging.getLogger("distributed.worker")


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
