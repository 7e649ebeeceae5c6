"""The processes of a trial: to which one a sample, a start and a death belong.

Neither a pid nor a node's name identifies a process: containers share pids (each counts from 1),
and a node that is restarted comes back under its name.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from dps.events import Killed, NodeJoined, NodeLeft, ResourceSampled
from flows.records.record import Record


@dataclass(frozen=True, slots=True)
class Process:
    """One life of a node; `started` is when the process began, in seconds since the Unix epoch."""

    node: str
    host: str
    pid: int
    started: float


def process_of(event: NodeJoined | ResourceSampled) -> Process:
    """Return the process that recorded an event."""
    return Process(event.node, event.host, event.pid, event.started)


def joins(record: Record) -> dict[Process, NodeJoined]:
    """Return when each process joined first, in order of time."""
    first: dict[Process, NodeJoined] = {}
    # A node on which one worker runs after another joins with each of them.
    for event in sorted(record.of(NodeJoined), key=lambda event: event.t):
        first.setdefault(process_of(event), event)
    return first


def deaths(record: Record) -> dict[Process, float]:
    """Return when processes ended before the trial did.

    That is when a fault killed them or they left, or at the latest when the next process of their
    node's name joined.
    """
    lives: defaultdict[str, list[NodeJoined]] = defaultdict(list)
    for event in joins(record).values():
        lives[event.node].append(event)
    ends = {
        process_of(before): after.t for each in lives.values() for before, after in pairwise(each)
    }
    early: list[Killed | NodeLeft] = [*record.of(Killed), *record.of(NodeLeft)]
    for end in early:
        alike = [e for e in lives[end.node] if not isinstance(end, Killed) or e.pid == end.pid]
        # Without one before it, the clocks of two hosts differ.
        before = [event for event in alike if event.t <= end.t] or alike[:1]
        if before:
            process = process_of(before[-1])
            ends[process] = min(end.t, ends.get(process, end.t))
    return ends
