"""Times of events: the span of a training, the moments of faults, outages, other losses.

A fault that hits a shard that is already down prolongs its outage; it does not start another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, NamedTuple, TypeVar

from dps.core.names import replacement
from dps.events import (
    Acked,
    Applied,
    CapacityRestored,
    Decided,
    Detected,
    Disturbed,
    Evaluated,
    EvaluationMissed,
    Killed,
    NodeJoined,
    Paused,
    Promoted,
    Restored,
    Resumed,
    Undisturbed,
    WorkerJoined,
    WorkerLeft,
)
from dps.protocol.timings import Timings
from flows.records.events import TrainingStarted
from flows.records.record import Record

E = TypeVar("E", Applied, Decided, Promoted, Restored)

Struck = Killed | Paused | Disturbed

# Faults that silence a node: unless it is evicted before they end, it serves again afterwards.
SILENT = ("pause", "cut")
# Nodes at the other end of such a link may be evicted, rightly, although no fault struck them.
BETWEEN_NODES = ("cut", "delay")
BY_SILENCE = ("lease", "host")  # how a loss is noticed of a process that may well live
# Seconds for which a fault that is over may still cost a node its lease.
AFTERMATH = Timings().lease + 5.0
Span = tuple[float, float]
_TIME = attrgetter("t")


@dataclass(frozen=True, slots=True)
class FaultTimes:
    """The moments of one fault, in seconds since the Unix epoch; None for what did not happen.

    Attributes
    ----------
    kind
        "kill", "host" or "requeue" (ways of killing that Slurm has), "pause", "slow", "cut",
        "delay", "disk_full" or "corrupt".
    updates
        Updates that the shards had applied when it was sent.
    began
        SIGKILL, or SIGSTOP, was sent, or the disturbance began.
    shard
        The shard that was not served for a time because of it; None: no shard was interrupted.
    detected
        The coordinator first learned that a shard had lost the node; `by` is the source:
        "scheduler" (a connection broke), "client" (calls failed), "lease" (the node was silent) or
        "coordinator" (the node did not answer it, or another process has its address).
    decided
        The coordinator had chosen how the shard continues, for the last time before it did.
    capacity
        A fresh node had taken the place of the lost one.
    serving
        The shard served again; `source` is where its state came from: "promoted", "initial",
        "checkpoint", "store" or "worker"; "others" if the head was not the lost replica; "resumed"
        for a head whose pause or cut ended before it was evicted. `source` is None if the new head
        was lost before it reported that it served: acks to workers show it then.
    first_applied
        The shard's head first applied an update after that.
    ended
        The node continued, or the disturbance ended; None if it was killed or gone by then.
    """

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

    @property
    def detect_seconds(self) -> float | None:
        """From the fault until it was detected."""
        return _between(self.began, self.detected)

    @property
    def decide_seconds(self) -> float | None:
        """From detection until it was decided how the shard continues, a part of restoration."""
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


def training_span(record: Record) -> Span | None:
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
    effective = (fault for fault in record.of(Disturbed) if fault.effective)
    return sorted([*record.of(Killed), *record.of(Paused), *effective], key=_TIME)


def _moments(record: Record, fault: Struck) -> FaultTimes:
    ended = _ends(record).get((fault.fault, fault.node))
    if isinstance(fault, Killed):
        kind = "kill" if fault.by == "signal" else fault.by
    else:
        kind = "pause" if isinstance(fault, Paused) else fault.kind
    times = FaultTimes(kind, fault.node, fault.updates, fault.t, ended=ended)
    # A node can be hit several times: its loss until the next of them is that of this one.
    later = (e.t for e in _struck(record) if e.node == fault.node and e.t > fault.t)
    until = min(later, default=math.inf)
    losses = (e for e in record.of(Detected) if e.node == fault.node and fault.t <= e.t < until)
    detected = min(losses, key=_TIME, default=None)
    if detected is not None:
        return _detected_times(record, times, fault, detected)
    if ended is not None and kind in SILENT:
        return _undetected(record, times, ended)
    return times


def _ends(record: Record) -> dict[tuple[int, str], float]:
    ends: list[Resumed | Undisturbed] = [*record.of(Resumed), *record.of(Undisturbed)]
    return {(event.fault, event.node): event.t for event in ends}


def _detected_times(
    record: Record, times: FaultTimes, fault: Struck, detected: Detected
) -> FaultTimes:
    serving, source, applied = _back(record, detected)
    again = _lost_again(record, detected)
    if again is not None and (serving is None or serving > again):
        # A head that served in between may have been lost before it could report that.
        told = _told_to_workers(record, detected, again)
        if told is not None:
            serving, source, applied = told, None, told
    fresh = fault.fault, replacement(times.node)
    capacity = (e.t for e in record.of(CapacityRestored) if (e.fault, e.node) == fresh)
    # Other choices may have failed before, and later ones belong to other faults.
    until = math.inf if serving is None else serving
    decided = (e.t for e in _following(record, Decided, detected) if e.t <= until)
    return replace(
        times,
        shard=detected.shard,
        detected=detected.t,
        by=detected.by,
        decided=max(decided, default=None),
        capacity=min(capacity, default=None),
        serving=serving,
        source=source,
        first_applied=applied,
    )


def _following(record: Record, kind: type[E], detected: Detected) -> list[E]:
    """Events of a kind that concern a shard from the epoch on in which it had lost a node."""
    return [
        event
        for event in record.of(kind)
        if event.shard == detected.shard and event.epoch >= detected.epoch
    ]


def _undetected(record: Record, times: FaultTimes, ended: float) -> FaultTimes:
    """The moments of a silence that was over before the node was evicted."""
    batches = [b for b in record.of(Applied) if b.head and b.node == times.node]
    last = max((b for b in batches if b.times[0] <= times.began), key=_TIME, default=None)
    if last is None:
        return times
    after = (t for b in batches if b.shard == last.shard for t in b.times if t > ended)
    applied = min(after, default=None)
    return replace(times, shard=last.shard, serving=ended, source="resumed", first_applied=applied)


def _back(record: Record, detected: Detected) -> tuple[float | None, str | None, float | None]:
    """When the shard served again, from what, and when its head next applied an update."""
    batches = (batch for batch in _following(record, Applied, detected) if batch.head)
    applied = min((t for batch in batches for t in batch.times), default=None)
    events: list[Promoted | Restored] = [
        *_following(record, Promoted, detected),
        *_following(record, Restored, detected),
    ]
    # Later ones belong to other faults; an earlier one may have come to nothing.
    by_then = (event for event in events if applied is None or event.t <= applied)
    serving = max(by_then, key=_TIME, default=None)
    if serving is not None:
        return serving.t, "promoted" if isinstance(serving, Promoted) else serving.source, applied
    # The head is still there: it is known to serve again from what it applies.
    return applied, None if applied is None else "others", applied


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
    """When a worker first received the ack of an applied update, between two losses of a shard."""
    choices = (e.t for e in _following(record, Decided, detected) if e.t < until)
    since = max(choices, default=math.inf)
    times = (
        t
        for batch in record.of(Acked)
        for t, shard, outcome in zip(batch.times, batch.shards, batch.outcomes, strict=True)
        if shard == detected.shard and outcome == "applied" and since < t < until
    )
    return min(times, default=None)


# -- outages ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outage:
    """One shard that was not served for a time, in seconds since the Unix epoch.

    Attributes
    ----------
    began
        The first fault that it is due to took effect.
    serving
        The shard served again; infinity if it did not.
    recovered
        It had applied an update after that; infinity if it did not.
    """

    shard: int
    began: float
    serving: float
    recovered: float


def outages(faults: Iterable[FaultTimes]) -> tuple[Outage, ...]:
    """Return the outages that faults brought about, in order of time."""
    merged: dict[int, list[Outage]] = {}
    for fault in sorted(faults, key=lambda fault: fault.began):
        if fault.shard is None:
            continue
        serving = math.inf if fault.serving is None else fault.serving
        recovered = math.inf if fault.first_applied is None else fault.first_applied
        known = merged.setdefault(fault.shard, [])
        began = fault.began
        if known and began <= known[-1].serving:
            last = known.pop()
            began = last.began
            serving, recovered = max(last.serving, serving), max(last.recovered, recovered)
        known.append(Outage(fault.shard, began, serving, recovered))
    return tuple(sorted((o for each in merged.values() for o in each), key=lambda o: o.began))


# -- losses that no fault asked for ----------------------------------------------------------


class _Loss(NamedTuple):
    """A lost node; `ended` is true if its process had ended, false if it was only silent."""

    t: float
    node: str
    ended: bool


def first_unplanned(record: Record) -> tuple[Literal["failed", "invalid"], str] | None:
    """Return the status, with the reason, after the first node loss that no fault explains.

    Return None if a fault explains every loss during the training.
    """
    began, ended = training_span(record) or (math.inf, -math.inf)
    losses = (loss for loss in _losses(record) if began <= loss.t <= ended)
    unplanned = (loss for loss in losses if not _asked_for(loss, record))
    first = min(unplanned, key=_TIME, default=None)
    if first is None:
        return None
    since = f"{first.t - began:.1f} s after the start, without a planned fault"
    if first.ended:
        return "failed", f"{first.node} was lost {since}: its process ended"
    return "invalid", f"{first.node} was evicted {since}: the machine was too busy"


def evaluator_lost(record: Record) -> bool:
    """Whether the evaluator was gone when the training ended: it scores once more after that."""
    span = training_span(record)
    evaluators = {event.node for event in record.of(NodeJoined) if event.role == "evaluator"}
    faults: list[Killed | Paused] = [*record.of(Killed), *record.of(Paused)]
    struck = {fault.node for fault in faults}
    if span is None or not evaluators or evaluators & struck:
        return False
    last = max((e.t for e in (*record.of(Evaluated), *record.of(EvaluationMissed))), default=0.0)
    return last < span[1]


def _losses(record: Record) -> Iterator[_Loss]:
    for event in record.of(Detected):
        yield _Loss(event.t, event.node, event.by not in BY_SILENCE)
    nodes = {(event.worker, event.incarnation): event.node for event in record.of(WorkerJoined)}
    for left in record.of(WorkerLeft):
        node = nodes.get((left.worker, left.incarnation))
        # The node of a worker from before a resumption is not known.
        if left.was_lost and node is not None:
            yield _Loss(left.t, node, left.reason == "lost")


def _asked_for(loss: _Loss, record: Record) -> bool:
    """Whether a fault that had struck by then explains the loss."""
    if any(fault.t <= loss.t and fault.node == loss.node for fault in record.of(Killed)):
        return True
    over = _ends(record)
    lasting: list[Paused | Disturbed] = [*record.of(Paused), *record.of(Disturbed)]
    return any(
        fault.t <= loss.t <= over.get((fault.fault, fault.node), math.inf) + AFTERMATH
        for fault in lasting
        if fault.node == loss.node or (isinstance(fault, Disturbed) and fault.kind in BETWEEN_NODES)
    )
