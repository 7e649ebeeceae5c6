"""Owns the losses that no fault asked for: nodes that a busy machine let seem dead.

Such a trial is none of the experiment's: a control without faults that lost a node is no control.
"""

from __future__ import annotations

from dataclasses import dataclass

from dps.events import Detected, Disturbed, Killed, Paused, WorkerJoined, WorkerLeft
from flows.record import Record
from flows.timeline import training_span

# Nodes at the other end of such a link may be given up, rightly, though nothing struck them.
BETWEEN_NODES = ("cut", "delay")


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A node that was given up during the training; `seconds` are since the training began."""

    node: str
    seconds: float


def first_unplanned(record: Record) -> Unplanned | None:
    """Return the first loss during the training of a node that no fault had struck by then."""
    span = training_span(record)
    if span is None:
        return None
    for t, node in sorted(_losses(record)):
        if span[0] <= t <= span[1] and not _asked_for(t, node, record):
            return Unplanned(node, t - span[0])
    return None


def _losses(record: Record) -> list[tuple[float, str]]:
    servers = [(event.t, event.node) for event in record.of(Detected)]
    nodes = {(event.worker, event.incarnation): event.node for event in record.of(WorkerJoined)}
    workers = [
        (event.t, nodes[event.worker, event.incarnation])
        for event in record.of(WorkerLeft)
        # Of a worker from before a resumption nothing else is known, not even its node.
        if event.reason == "lost" and (event.worker, event.incarnation) in nodes
    ]
    return servers + workers


def _asked_for(t: float, node: str, record: Record) -> bool:
    struck: list[Killed | Paused | Disturbed] = [*record.of(Killed), *record.of(Paused)]
    disturbed = record.of(Disturbed)
    return any(fault.t <= t and fault.node == node for fault in (*struck, *disturbed)) or any(
        fault.t <= t and fault.kind in BETWEEN_NODES for fault in disturbed
    )
