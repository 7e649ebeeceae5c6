"""The processes of a trial: the lifetime and resource use of each.

A pid or a node's name does not identify a process: containers share pids (each counts from 1), and
a restarted node keeps its name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from dps.core.names import original
from dps.events import Killed, NodeJoined, NodeLeft, ResourceSampled
from flows.metrics.faults import training_span
from flows.records.events import LoadMeasured
from flows.records.record import Record

OTHER_PROCESSES = 2  # of a trial, not among its nodes: the scheduler and the driver


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


def node_spans(record: Record) -> list[tuple[str, float, float]]:
    """Return the role of each node, and from when to when it was up during the training."""
    span = training_span(record)
    if span is None:
        return []
    start, end = span
    died = deaths(record)
    spans = (
        (event.role, max(start, event.t), min(end, died.get(process, end)))
        for process, event in joins(record).items()
    )
    return [(role, came, max(came, went)) for role, came, went in spans]


def last_samples(record: Record) -> list[ResourceSampled]:
    """Return the last sample of each process, which holds everything that it used."""
    return list({process_of(sample): sample for sample in record.of(ResourceSampled)}.values())


def peak_bytes(samples: Iterable[ResourceSampled]) -> int:
    """Return the sum over nodes of the largest resident set of each.

    A replacement of a lost node counts as the same node.
    """
    largest = Counter[tuple[str, str]]()
    for sample in samples:
        place = sample.role, original(sample.node)
        largest[place] = max(largest[place], sample.peak_bytes)
    return largest.total()


def is_overloaded(record: Record) -> bool:
    """Whether more processes wanted a core than there are cores, and than the trial has."""
    own = len({event.node for event in record.of(NodeJoined)}) + OTHER_PROCESSES
    return any(event.load > max(own, event.cores) for event in record.of(LoadMeasured))
