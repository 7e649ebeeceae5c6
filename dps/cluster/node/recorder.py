"""How events reach the driver: buffered in each process, sent in batches on a Dask topic.

Recording an event costs a list append on the training path.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

from dps.cluster.names import topic
from dps.cluster.node.logs import LogEvent, is_logged, worker_log
from dps.cluster.platform import Platform
from dps.cluster.transport.calls import Meter
from dps.core.updates import UpdateId
from dps.events import (
    Acked,
    Evaluated,
    EvaluationMissed,
    Event,
    Filtered,
    Reported,
    ResourceSampled,
    TaskFailed,
    log,
    to_dict,
)
from dps.protocol.client.client import Client
from dps.protocol.client.shard_client import Outcome
from dps.protocol.group import Group
from dps.protocol.transport import Clock

SAMPLE_SECONDS = 1.0
KEPT = (Reported, Evaluated, EvaluationMissed)  # by the driver, for `ParameterServer.history`


class Recorder:
    """Buffers the events of one process. Thread-safe but for `send`, which belongs to the loop.

    Unless the group's events are recorded (`on`), it drops all but those that the driver keeps in
    any case (`KEPT`). Notable events also go to the log of the process, with `labels`.
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
        self._topic = topic("events", group)
        self._log_event = log_event
        self._refused = 0
        self._failures = Counter[str]()
        self._buffer: list[Event] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, group: Group, log_event: LogEvent) -> Recorder:
        """Return a recorder of one process of a group."""
        return cls(group.name, log_event, group.recorded, group.labels)

    def __call__(self, event: Event) -> None:
        """Record an event."""
        log(event, self._labels)
        if isinstance(event, TaskFailed):
            self._failures[event.error] += 1
            if is_logged(self._failures[event.error]):
                worker_log.error("dps: a background task of %s failed: %s", event.node, event.trace)
        if not self.on and not isinstance(event, KEPT):
            return
        with self._lock:
            self._buffer.append(event)

    def send(self) -> None:
        """Send the events since the last time, without those that Dask refuses."""
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
        """Send events every `every` seconds, after a call of `flush`.

        Once a second a measurement of the process's resources is recorded as well.
        """
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
                worker_log.warning("dps: %s is not recorded (%d until now): %s", kind, times, error)


def sample(
    node: str, role: str, meter: Meter, platform: Platform, stored: int = 0
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


class WorkerRecords:
    """Collects what a worker reports, is acknowledged and filters, for few events.

    `report` is called from the training's thread, the rest from the event loop.
    """

    def __init__(self, client: Client, recorder: Recorder, clock: Clock) -> None:
        self._client = client
        self._recorder = recorder
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: dict[str, list[tuple[float, int, float, int]]] = {}
        self._steps = 0
        self._acks: list[tuple[float, int, int, int, Outcome]] = []
        self._filtered = client.filtered

    def report(self, metrics: Mapping[str, float], version: int | None) -> None:
        """Note numbers of the next step; `version` is that of the weights read last, if any."""
        self._steps += 1
        now, seen = self._clock.now(), -1 if version is None else version
        with self._lock:
            for name, value in metrics.items():
                self._reports.setdefault(name, []).append((now, self._steps, float(value), seen))

    def acked(self, shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        """Note an acknowledgement, if events are recorded."""
        if self._recorder.on:
            self._acks.append((self._clock.now(), shard, update.seq, version, outcome))

    def flush(self) -> None:
        """Record what was noted since the last flush."""
        now, source = self._clock.now(), (self._client.worker, self._client.incarnation)
        with self._lock:
            reports, self._reports = self._reports, {}
        for name, rows in reports.items():
            self._recorder(Reported(now, *source, name, *zip(*rows, strict=True)))
        acks, self._acks = self._acks, []
        if acks:
            self._recorder(Acked(now, *source, *zip(*acks, strict=True)))
        filtered = self._client.filtered if self._recorder.on else self._filtered
        if filtered != self._filtered:
            self._filtered = filtered
            self._recorder(Filtered(now, *source, **filtered))
