"""Owns when things happened in a trial: the span of the training, and the moments of each fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dps.events import (
    Acked,
    Applied,
    CapacityRestored,
    Detected,
    Event,
    Killed,
    Promoted,
    Restored,
    TrainingStarted,
)
from flows.record import Record

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class FaultTimes:
    """The moments of one fault, in seconds since the Unix epoch; None for what did not happen.

    Attributes
    ----------
    killed
        SIGKILL was sent.
    detected
        The coordinator first learned that a shard had lost the node; `by` says from whom.
    capacity
        A fresh node had taken the place of the lost one.
    serving
        The shard served again; `source` says from what: "promoted", "initial", "checkpoint" or
        "store".
    first_applied
        The shard's head first applied an update after that.
    """

    fault: int
    node: str
    updates: int
    shard: int | None
    killed: float
    detected: float | None
    by: str | None
    capacity: float | None
    serving: float | None
    source: str | None
    first_applied: float | None

    @property
    def detect_seconds(self) -> float | None:
        """From the kill until it was detected."""
        return _between(self.killed, self.detected)

    @property
    def restore_seconds(self) -> float | None:
        """From detection until the shard served again, waiting for capacity included."""
        return _between(self.detected, self.serving)

    @property
    def wait_capacity_seconds(self) -> float | None:
        """The part of `restore_seconds` in which there was no node to restore on."""
        if self.detected is None or self.serving is None:
            return None
        if self.capacity is None or not self.detected <= self.capacity <= self.serving:
            return 0.0
        return self.capacity - self.detected

    @property
    def first_applied_seconds(self) -> float | None:
        """From the moment the shard served again until it had applied an update."""
        return _between(self.serving, self.first_applied)

    @property
    def rto_seconds(self) -> float | None:
        """From the kill until the first update applied after it."""
        return _between(self.killed, self.first_applied)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def training_span(record: Record) -> tuple[float, float] | None:
    """Return when the workers started and when one last got an answer; None if they never did."""
    started = record.of(TrainingStarted)
    if not started:
        return None
    answers = [t for batch in record.of(Acked) for t in batch.times]
    return started[0].t, max(answers, default=started[0].t)


def fault_times(record: Record) -> tuple[FaultTimes, ...]:
    """Return the moments of each kill that was carried out, in the order of the kills."""
    kills = sorted(record.of(Killed), key=lambda kill: kill.t)
    return tuple(_of_kill(record, kill) for kill in kills)


def _of_kill(record: Record, kill: Killed) -> FaultTimes:
    detected = _first([event for event in record.of(Detected) if event.node == kill.node])
    serving = _serving_again(record, detected) if detected else None
    capacity = _first([e for e in record.of(CapacityRestored) if e.fault == kill.fault])
    return FaultTimes(
        fault=kill.fault,
        node=kill.node,
        updates=kill.updates,
        shard=detected.shard if detected else None,
        killed=kill.t,
        detected=detected.t if detected else None,
        by=detected.by if detected else None,
        capacity=capacity.t if capacity else None,
        serving=serving.t if serving else None,
        source=_source(serving) if serving else None,
        first_applied=_first_applied(record, serving) if serving else None,
    )


def _serving_again(record: Record, detected: Detected) -> Promoted | Restored | None:
    events: list[Promoted | Restored] = [*record.of(Promoted), *record.of(Restored)]
    return _first([e for e in events if e.shard == detected.shard and e.epoch >= detected.epoch])


def _source(serving: Promoted | Restored) -> str:
    return serving.source if isinstance(serving, Restored) else "promoted"


def _first_applied(record: Record, serving: Promoted | Restored) -> float | None:
    times = [
        t
        for batch in record.of(Applied)
        if batch.head and batch.shard == serving.shard and batch.epoch >= serving.epoch
        for t in batch.times
    ]
    return min(times, default=None)


def _first(events: Sequence[E]) -> E | None:
    return min(events, key=lambda event: event.t, default=None)
