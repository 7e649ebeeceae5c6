"""Outages: when shards were not served because of faults, over all the faults of a trial.

Faults that hit a shard while it is down already prolong its outage; they make no other one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dps.core.names import replacement
from dps.events import Acked, CapacityRestored, Killed, ReplicaAdded, WorkerJoined
from flows.analysis.faults import FaultTimes, training_span
from flows.records.record import Record

Span = tuple[float, float]


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


@dataclass(frozen=True, slots=True)
class Downtime:
    """The outages of a trial, summed up.

    Attributes
    ----------
    outages
        How many there were, each of one shard.
    unrecovered
        How many of them were not over when the training ended.
    seconds
        For how long during the training one shard at least was not served: the union of them.
    shard_seconds
        The sum over the shards of how long each was not served during the training.
    recovery_median, recovery_max
        From the fault to the first update that was applied after recovery, over the outages. One
        that was not over counts as longer than any; None where the figure would be that of such a
        one, and without outages.
    """

    outages: int
    unrecovered: int
    seconds: float
    shard_seconds: float
    recovery_median: float | None
    recovery_max: float | None


def outages(faults: Iterable[FaultTimes]) -> tuple[Outage, ...]:
    """Return the outages that faults brought about, in order of time."""
    merged: dict[int, list[Outage]] = {}
    for fault in sorted(faults, key=lambda fault: fault.began):
        if fault.shard is None:
            continue
        new = Outage(
            fault.shard,
            fault.began,
            math.inf if fault.serving is None else fault.serving,
            math.inf if fault.first_applied is None else fault.first_applied,
        )
        known = merged.setdefault(fault.shard, [])
        if known and new.began <= known[-1].serving:
            known[-1] = _prolonged(known[-1], new)
        else:
            known.append(new)
    return tuple(sorted((o for each in merged.values() for o in each), key=lambda o: o.began))


def downtime(record: Record, faults: Sequence[FaultTimes]) -> Downtime:
    """Return the outages of a training, summed up; `faults` are those of the record."""
    found = outages(faults)
    start, end = training_span(record) or (0.0, 0.0)
    down = [
        (max(start, outage.began), min(end, outage.serving))
        for outage in found
        if outage.began < end and outage.serving > start
    ]
    recoveries = [outage.recovered - outage.began for outage in found]
    return Downtime(
        outages=len(found),
        unrecovered=sum(math.isinf(seconds) for seconds in recoveries),
        seconds=sum(until - since for since, until in union(down)),
        shard_seconds=sum(until - since for since, until in down),
        recovery_median=_finite(median(recoveries)) if recoveries else None,
        recovery_max=_finite(max(recoveries)) if recoveries else None,
    )


def disturbed(record: Record, faults: Sequence[FaultTimes]) -> list[Span]:
    """Return the spans from each fault to when nothing was left of it to be seen, merged.

    That is when the shard applies updates again, and whatever was paused, slowed down or cut off
    goes on, and the node that took a lost one's place serves as a replica or works as a worker. A
    lost node that is no server and whose place nobody takes is missing to the end.
    """
    return union((fault.began, _over(record, fault)) for fault in faults)


def union(spans: Iterable[Span]) -> list[Span]:
    """Return spans that overlap or touch each other as one, in order."""
    merged: list[Span] = []
    for since, until in sorted(spans):
        if merged and since <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(until, merged[-1][1])
        else:
            merged.append((since, until))
    return merged


# -- parts -------------------------------------------------------------------------------------


def _prolonged(outage: Outage, by: Outage) -> Outage:
    serving = max(outage.serving, by.serving)
    return replace(outage, serving=serving, recovered=max(outage.recovered, by.recovered))


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _over(record: Record, fault: FaultTimes) -> float:
    moments = [fault.began]
    if fault.shard is not None:
        moments.append(math.inf if fault.first_applied is None else fault.first_applied)
    if fault.ended is not None:
        moments.append(fault.ended)
    elif (fault.fault, fault.node) in {(k.fault, k.node) for k in record.of(Killed)}:
        moments.append(_replaced(record, fault))
    elif fault.kind != "corrupt":  # which is done at once, though nobody undoes it
        moments.append(math.inf)
    return max(moments)


def _replaced(record: Record, fault: FaultTimes) -> float:
    """When a fresh node did what the lost one had done; at once if the shard does without."""
    fresh = replacement(fault.node)
    came = [e.t for e in record.of(CapacityRestored) if (e.fault, e.node) == (fault.fault, fresh)]
    if not came:
        return math.inf if fault.shard is None else fault.began
    moments = [min(came)]
    added = [e.t for e in record.of(ReplicaAdded) if e.node == fresh and e.t >= fault.began]
    moments += [min(added)] if added else []
    workers = {(e.worker, e.incarnation) for e in record.of(WorkerJoined) if e.node == fresh}
    pushed = [t for e in record.of(Acked) if (e.worker, e.incarnation) in workers for t in e.times]
    moments += [min(pushed)] if pushed else []
    return max(moments)
