"""What a worker's task collects, to be recorded as columns: acks, reports and counts of filters.

One event for each number would cost more than the training's own messages; so they are collected,
and each flush of the recorder makes one event of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict

from dps.cluster.node.recorder import Recorder
from dps.core.updates import UpdateId
from dps.events import Acked, Filtered, Reported
from dps.protocol.client.client import Client
from dps.protocol.client.shard_client import Outcome
from dps.protocol.transport import Clock


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
