"""When things happened in a trial: the span of the training, and the moments of each fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dps.core.names import replacement
from dps.events import (
    Acked,
    Applied,
    CapacityRestored,
    Decided,
    Detected,
    Disturbed,
    Event,
    Killed,
    Paused,
    Promoted,
    Restored,
    Resumed,
    TrainingStarted,
    Undisturbed,
)
from flows.records.record import Record

E = TypeVar("E", bound=Event)

Struck = Killed | Paused | Disturbed

# What a node goes through without serving: if nobody gave it up meanwhile, it serves again after.
SILENT = ("pause", "cut")


@dataclass(frozen=True, slots=True)
class FaultTimes:
    """The moments of one fault, in seconds since the Unix epoch; None for what did not happen.

    Attributes
    ----------
    kind
        "kill", "host" or "requeue" (ways of killing that Slurm has), "pause", "slow", "cut",
        "delay", "disk_full" or "corrupt".
    began
        SIGKILL, or SIGSTOP, was sent, or the disturbance began.
    shard
        The shard that was not served for a time because of it; None: it did without.
    detected
        The coordinator first learned that a shard had lost the node; `by` says from whom.
    decided
        The coordinator had chosen how the shard goes on, for the last time before it did.
    capacity
        A fresh node had taken the place of the lost one.
    serving
        The shard served again; `source` says from what: "promoted", "initial", "checkpoint",
        "store" or "worker"; "others" if the head was not the one that was lost; "resumed" for a
        head whose pause or cut ended before anybody gave it up. None if whoever served then was
        lost before it reported so: what workers were told then tells that it served.
    first_applied
        The shard's head first applied an update after that.
    ended
        The node went on, or was disturbed no more; None if it was killed or gone by then.
    evidence
        What was seen of a disturbance when it began.
    """

    fault: int
    kind: str
    node: str
    updates: int
    began: float
    shard: int | None = None
    detected: float | None = None
    by: str | None = None
    decided: float | None = None
    capacity: float | None = None
    serving: float | None = None
    source: str | None = None
    first_applied: float | None = None
    ended: float | None = None
    evidence: str | None = None

    @property
    def detect_seconds(self) -> float | None:
        """From the fault until it was detected."""
        return _between(self.began, self.detected)

    @property
    def decide_seconds(self) -> float | None:
        """From detection until it was decided how the shard goes on, a part of the restoration."""
        return _between(self.detected, self.decided)

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
        """From the fault until the first update applied after recovery."""
        return _between(self.began, self.first_applied)


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
    """Return the moments of each fault that was carried out, in the order of the faults.

    One that hit several nodes has moments for each of them.
    """
    return tuple(_moments(record, fault) for fault in _struck(record))


def _struck(record: Record) -> list[Struck]:
    faults: list[Struck] = [
        *record.of(Killed),
        *record.of(Paused),
        *(fault for fault in record.of(Disturbed) if fault.effective),
    ]
    return sorted(faults, key=lambda fault: fault.t)


def _moments(record: Record, fault: Struck) -> FaultTimes:
    ends: list[Resumed | Undisturbed] = [*record.of(Resumed), *record.of(Undisturbed)]
    ended = _first([e for e in ends if (e.fault, e.node) == (fault.fault, fault.node)])
    times = FaultTimes(
        fault=fault.fault,
        kind=_kind(fault),
        node=fault.node,
        updates=fault.updates,
        began=fault.t,
        ended=ended.t if ended else None,
        evidence=None if isinstance(fault, Paused) else fault.evidence or None,
    )
    detected = _detected(record, fault)
    if detected is not None:
        return _detected_times(record, times, detected)
    if ended is not None and times.kind in SILENT:
        return _undetected(record, times, ended.t)
    return times


def _kind(fault: Struck) -> str:
    if isinstance(fault, Disturbed):
        return fault.kind
    if isinstance(fault, Killed):
        return "kill" if fault.by == "signal" else fault.by
    return "pause"


def _detected(record: Record, fault: Struck) -> Detected | None:
    """The loss that this fault brought about: a node can be hit several times."""
    later = [e.t for e in _struck(record) if e.node == fault.node and e.t > fault.t]
    until = min(later, default=math.inf)
    return _first(
        [e for e in record.of(Detected) if e.node == fault.node and fault.t <= e.t < until]
    )


def _detected_times(record: Record, times: FaultTimes, detected: Detected) -> FaultTimes:
    """The moments of a fault by which a shard lost a node."""
    serving, source, applied = _back(record, detected)
    again = _lost_again(record, detected)
    if again is not None and (serving is None or serving > again):
        # Whoever served in between may have been lost before it could report that.
        told = _told_to_workers(record, detected, again)
        if told is not None:
            serving, source, applied = told, None, told
    fresh = replacement(times.node)
    capacity = _first(
        [e for e in record.of(CapacityRestored) if (e.fault, e.node) == (times.fault, fresh)]
    )
    return replace(
        times,
        shard=detected.shard,
        detected=detected.t,
        by=detected.by,
        decided=_decided(record, detected, serving),
        capacity=capacity.t if capacity else None,
        serving=serving,
        source=source,
        first_applied=applied,
    )


def _undetected(record: Record, times: FaultTimes, ended: float) -> FaultTimes:
    """The moments of a silence that was over before anybody gave the node up."""
    batches = [b for b in record.of(Applied) if b.head and b.node == times.node]
    last = max((b for b in batches if b.times[0] <= times.began), key=lambda b: b.t, default=None)
    if last is None:
        return times
    after = [t for b in batches if b.shard == last.shard for t in b.times if t > ended]
    return replace(
        times,
        shard=last.shard,
        serving=ended,
        source="resumed",
        first_applied=min(after, default=None),
    )


def _back(record: Record, detected: Detected) -> tuple[float | None, str | None, float | None]:
    """When the shard served again, from what, and when its head next applied an update."""
    applied = _first_applied(record, detected)
    events: list[Promoted | Restored] = [*record.of(Promoted), *record.of(Restored)]
    # Later ones belong to other faults; an earlier one may have come to nothing.
    by_then = [
        e
        for e in events
        if e.shard == detected.shard and e.epoch >= detected.epoch
        if applied is None or e.t <= applied
    ]
    serving = max(by_then, key=lambda event: event.t, default=None)
    if serving is not None:
        return serving.t, "promoted" if isinstance(serving, Promoted) else serving.source, applied
    # The head is still there: it is known to serve again from what it applies.
    return applied, None if applied is None else "others", applied


def _decided(record: Record, detected: Detected, serving: float | None) -> float | None:
    """When the choice was made by which the shard serves again; others may have failed before."""
    times = [
        e.t
        for e in record.of(Decided)
        if e.shard == detected.shard and e.epoch >= detected.epoch
        if serving is None or e.t <= serving
    ]
    return max(times, default=None)


def _lost_again(record: Record, detected: Detected) -> float | None:
    """When the loss by a later fault, if any, of a replica of the same shard was detected."""
    struck: dict[str, float] = {}  # by node, when first after this loss
    for fault in _struck(record):
        if fault.t > detected.t:
            struck.setdefault(fault.node, fault.t)
    times = (
        e.t
        for e in record.of(Detected)
        if e.shard == detected.shard and struck.get(e.node, math.inf) <= e.t
    )
    return min(times, default=None)


def _told_to_workers(record: Record, detected: Detected, until: float) -> float | None:
    """When a worker was first told that an update was applied, between two losses of a shard."""
    choices = [
        e.t
        for e in record.of(Decided)
        if e.shard == detected.shard and e.epoch >= detected.epoch and e.t < until
    ]
    if not choices:
        return None
    since = max(choices)
    times = (
        t
        for batch in record.of(Acked)
        for t, shard, outcome in zip(batch.times, batch.shards, batch.outcomes, strict=True)
        if shard == detected.shard and outcome == "applied" and since < t < until
    )
    return min(times, default=None)


def _first_applied(record: Record, detected: Detected) -> float | None:
    times = [
        t
        for batch in record.of(Applied)
        if batch.head and batch.shard == detected.shard and batch.epoch >= detected.epoch
        for t in batch.times
    ]
    return min(times, default=None)


def _first(events: Sequence[E]) -> E | None:
    return min(events, key=lambda event: event.t, default=None)
