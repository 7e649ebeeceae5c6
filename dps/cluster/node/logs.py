"""Records of a node: events for the driver, and lines in the log of Dask.

Events are buffered in each process, and sent in batches on a Dask topic. Recording one costs a list
append on the training path.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from distributed.client import AllExit

from dps.cluster.names import KEY_PREFIX, topic
from dps.cluster.platform import Platform
from dps.cluster.transport.calls import Meter
from dps.errors import GroupClosed, ResultLost, TrainingStopped, UpdatesLost
from dps.events import (
    Evaluated,
    EvaluationMissed,
    Event,
    Failover,
    LossReported,
    Reported,
    ResourceSampled,
    Sink,
    TaskFailed,
    log,
    to_dict,
)
from dps.protocol.group import Group
from dps.protocol.messages import Loss

SILENT = "ignore"
SAMPLE_SECONDS = 1.0
KEPT = (Reported, Evaluated, EvaluationMissed)  # by the driver, for `ParameterServer.history`

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
    """Return a message that updates of a worker were dropped, why, and what to do."""
    return (
        f"updates of {worker} were dropped, not applied: {why_dropped(group)} (parameter server "
        f"{group.name}). worker.dropped counts them"
    )


def why_dropped(group: Group) -> str:
    """Return why updates are dropped, and what to do about it."""
    lease, patience = group.timings.lease, group.timings.patience
    return (
        f"the worker was stopped, unreachable for longer than its lease ({lease:g} s), or busy for "
        f"longer than its patience ({patience:g} s). The others continued without it, so its "
        "updates were too stale. If its steps take longer, raise the limit: "
        f"timings=dps.Timings(patience={10 * patience:g})"
    )


def is_logged(times: int) -> bool:
    """Whether to log a repeated failure: the 1st, 10th, 100th time, ..."""
    return str(times).strip("0") == "1"


def keep_quiet() -> None:
    """Prevent this process from logging tracebacks of workers that are ended on purpose."""
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


# -- events ----------------------------------------------------------------------------------------


class Recorder:
    """Buffers the events of one process. Thread-safe but for `send`, which belongs to the loop.

    Unless the group's events are recorded (`on`), it drops all but those that the driver keeps in
    any case (`KEPT`). Notable events also go to the log of the process, with the group's labels.
    `log_event` sends a message on a Dask topic.
    """

    def __init__(self, group: Group, log_event: Callable[[str, Any], None]) -> None:
        self.on = group.recorded
        self._labels = {**group.labels, "group": group.name}
        self._topic = topic("events", group.name)
        self._log_event = log_event
        self._failures = Counter[str]()
        self._refused = 0
        self._buffer: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Record an event."""
        log(event, self._labels)
        if isinstance(event, TaskFailed):
            self._failures[event.error] += 1
            if is_logged(self._failures[event.error]):
                worker_log.error("dps: a background task of %s failed: %s", event.node, event.trace)
        if self.on or isinstance(event, KEPT):
            with self._lock:
                self._buffer.append(event)

    def send(self) -> None:
        """Send the events since the last time, except those that Dask refuses."""
        with self._lock:
            batch, self._buffer = self._buffer, []
        if not batch:
            return
        try:
            self._log_event(self._topic, [to_dict(event) for event in batch])
        except TypeError:
            for event in batch:
                self._send_alone(event)

    async def send_forever(
        self, every: float, measure: Callable[[], Event], flush: Callable[[], None] = lambda: None
    ) -> None:
        """Call `flush` and send events every `every` seconds; if `on`, `measure` once a second."""
        flushes_per_sample = max(1, round(SAMPLE_SECONDS / every))
        for number in count():
            if self.on and number % flushes_per_sample == 0:
                self(measure())
            flush()
            self.send()
            await asyncio.sleep(every)

    def _send_alone(self, event: Event) -> None:
        try:
            self._log_event(self._topic, [to_dict(event)])
        except TypeError as error:
            self._refused += 1
            if is_logged(self._refused):
                kind, times = type(event).__name__, self._refused
                worker_log.warning("dps: cannot record %s (%d so far): %s", kind, times, error)


def sample(
    node: str, role: str, meter: Meter, platform: Platform, stored: int = 0
) -> ResourceSampled:
    """Measure what this process has used since it started."""
    cpu_seconds, peak_bytes = platform.usage()
    return ResourceSampled(
        platform.clock.now(),
        node,
        role,
        platform.pid,
        cpu_seconds=cpu_seconds,
        peak_bytes=peak_bytes,
        sent=dict(meter.sent),
        received=dict(meter.received),
        stored=stored,
        host=platform.host,
        started=platform.started,
    )
