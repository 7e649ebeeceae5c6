"""How events reach the driver: buffered in each process, sent in batches as a Dask topic.

Recording an event costs a list append on the training path; the batch travels over the connection
to the scheduler that Dask keeps open anyway.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

from dps.cluster.node.logs import LogEvent, is_told, worker_log
from dps.cluster.platform import SYSTEM, Platform
from dps.cluster.transport.calls import Meter
from dps.core.updates import UpdateId
from dps.events import (
    Acked,
    Evaluated,
    EvaluationMissed,
    Event,
    Filtered,
    NodeJoined,
    Reported,
    ResourceSampled,
    TaskFailed,
    log,
    to_dict,
)
from dps.protocol.client.client import Client
from dps.protocol.client.shard_client import Outcome
from dps.protocol.group import Group
from dps.protocol.tasks import Tasks, task_failed
from dps.protocol.transport import Clock

SAMPLE_SECONDS = 1.0
KEPT = (Reported, Evaluated, EvaluationMissed)  # by the driver, for `ParameterServer.history`


def topic(group: str) -> str:
    """The Dask topic on which a group's events are sent."""
    return f"dps-events-{group}"


class Recorder:
    """Buffers the events of one process. Thread-safe but for `send`, which belongs to the loop.

    Where nobody listens to the group's events (`on` is false), it lets go of them at once, but for
    those that the driver keeps in any case (`KEPT`). Those that are of interest by themselves also
    go to the log of the process, with `labels`.
    """

    def __init__(
        self,
        group: str,
        log_event: LogEvent,
        on: bool = True,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.on = on
        self._labels = {**(labels or {}), "group": group}
        self._topic = topic(group)
        self._log_event = log_event
        self._refused = 0
        self._failures = Counter[str]()
        self._buffer: list[Event] = []
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Record an event."""
        log(event, self._labels)
        if isinstance(event, TaskFailed):
            self._failures[event.error] += 1
            if is_told(self._failures[event.error]):
                worker_log.error("dps: a background task of %s failed: %s", event.node, event.trace)
        if not self.on and not isinstance(event, KEPT):
            return
        with self._lock:
            self._buffer.append(event)

    def send(self) -> None:
        """Send on what was recorded since the last time, without events that Dask does not take."""
        with self._lock:
            batch, self._buffer = self._buffer, []
        if not batch:
            return
        try:
            self._log_event(self._topic, [to_dict(event) for event in batch])
        except TypeError:
            for event in batch:
                self._send_alone(event)

    def _send_alone(self, event: Event) -> None:
        try:
            self._log_event(self._topic, [to_dict(event)])
        except TypeError as error:
            self._refused += 1
            if is_told(self._refused):
                kind, times = type(event).__name__, self._refused
                worker_log.warning("dps: %s is not recorded (%d until now): %s", kind, times, error)


def recorder_of(group: Group, log_event: LogEvent) -> Recorder:
    """The recorder of one process of a group."""
    return Recorder(group.name, log_event, group.recorded, group.labels)


def joined(node: str, role: str, platform: Platform) -> NodeJoined:
    """Return the event that this process became part of a group."""
    now = platform.clock.now()
    return NodeJoined(now, node, role, platform.pid, platform.host, platform.started)


def sample(
    node: str, role: str, meter: Meter, stored: int = 0, platform: Platform = SYSTEM
) -> ResourceSampled:
    """Measure what this process has used since it started."""
    used = platform.usage()
    return ResourceSampled(
        platform.clock.now(),
        node,
        role,
        platform.pid,
        cpu_seconds=used.cpu_seconds,
        peak_bytes=used.peak_bytes,
        sent=dict(meter.sent),
        received=dict(meter.received),
        stored=stored,
        host=platform.host,
        started=platform.started,
    )


def recorded_tasks(recorder: Recorder, clock: Clock, node: str) -> Tasks:
    """Return the background tasks of an actor: exceptions that end them are recorded."""
    return Tasks(lambda error: recorder(task_failed(clock, node, error)))


def keep_recording(
    tasks: Tasks,
    recorder: Recorder,
    every: float,
    measure: Callable[[], Event],
    flush: Callable[[], None] = lambda: None,
    keeps: bool = False,
) -> asyncio.Task[None]:
    """Start a task that sends recorded events every `every` seconds, after a call of `flush`.

    Once a second a measurement of the process's resources is recorded as well. Where nobody listens
    there are no measurements, and it ends at once unless the process records what the driver
    `keeps`.
    """
    record = partial(_record_forever, recorder, every, measure, flush, keeps)
    return tasks.keep(record, every)


async def _record_forever(
    recorder: Recorder,
    every: float,
    measure: Callable[[], Event],
    flush: Callable[[], None],
    keeps: bool,
) -> None:
    if not (recorder.on or keeps):
        return
    flushes_per_sample = max(1, round(SAMPLE_SECONDS / every))
    count = 0
    while True:
        if recorder.on and count % flushes_per_sample == 0:
            recorder(measure())
        flush()
        recorder.send()
        count += 1
        await asyncio.sleep(every)


class ReportColumns:
    """Collects what a training function reports until it is recorded, one event for each name.

    Called from the training's thread, flushed from the event loop.
    """

    def __init__(self, worker: str, recorder: Recorder, clock: Clock) -> None:
        self._worker = worker
        self._recorder = recorder
        self._clock = clock
        self._lock = threading.Lock()
        self._rows: dict[str, list[tuple[float, int, float, int]]] = {}
        self._steps = 0
        self.incarnation = 0

    def __call__(self, metrics: Mapping[str, float], version: int | None) -> None:
        """Note numbers about the next step, and the version of what the worker has read last."""
        self._steps += 1
        now, seen = self._clock.now(), -1 if version is None else version
        with self._lock:
            for name, value in metrics.items():
                self._rows.setdefault(name, []).append((now, self._steps, float(value), seen))

    def flush(self) -> None:
        """Record what was noted since the last flush."""
        with self._lock:
            columns, self._rows = self._rows, {}
        now = self._clock.now()
        for name, rows in columns.items():
            who = self._worker, self.incarnation
            self._recorder(Reported(now, *who, name, *zip(*rows, strict=True)))


class AckColumns:
    """Collects acknowledgements until they are recorded as one event. Used from the event loop."""

    def __init__(self, worker: str, recorder: Recorder, clock: Clock) -> None:
        self._worker = worker
        self._recorder = recorder
        self._clock = clock
        self._rows: list[tuple[float, int, int, int, Outcome]] = []
        self.incarnation = 0

    def __call__(self, shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        """Note an acknowledgement, unless nothing is recorded."""
        if self._recorder.on:
            self._rows.append((self._clock.now(), shard, update.seq, version, outcome))

    def flush(self) -> None:
        """Record what was noted since the last flush."""
        rows, self._rows = self._rows, []
        if rows:
            times, shards, seqs, versions, outcomes = zip(*rows, strict=True)
            now = self._clock.now()
            self._recorder(
                Acked(now, self._worker, self.incarnation, times, shards, seqs, versions, outcomes)
            )


class FilterCounts:
    """Records what a client's filters have done whenever that has changed."""

    def __init__(self, client: Client, recorder: Recorder, clock: Clock) -> None:
        self._client = client
        self._recorder = recorder
        self._clock = clock
        self._last = client.filtered
        self.incarnation = 0

    def flush(self) -> None:
        """Record the counts if they are others than at the last flush."""
        found = self._client.filtered
        if found != self._last:
            self._last = found
            worker, counts = self._client.worker, asdict(found.counts)
            now, norm = self._clock.now(), found.residual_norm
            self._recorder(Filtered(now, worker, self.incarnation, **counts, residual_norm=norm))
