"""The losses that no fault asked for: of nodes that crashed, or seemed dead to a busy machine.

Such a trial is none of the experiment's: a control without faults that lost a node is no control.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dps.events import (
    Detected,
    Disturbed,
    Evaluated,
    EvaluationMissed,
    Killed,
    NodeJoined,
    Paused,
    Resumed,
    Undisturbed,
    WorkerJoined,
    WorkerLeft,
)
from dps.protocol.timings import Timings
from flows.analysis.faults import training_span
from flows.records.record import Record

# Nodes at the other end of such a link may be given up, rightly, though nothing struck them.
BETWEEN_NODES = ("cut", "delay")
SILENT = ("lease", "host")  # how a loss is noticed of a process that may well live
# Seconds for which a fault that is over may still cost a node its lease.
AFTERMATH = Timings().lease + 5.0


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A node that was lost at `t`, in a training that began at `began`.

    `ended` says that its process was found to have ended, not only to be silent for too long.
    """

    t: float
    node: str
    ended: bool
    began: float

    @property
    def seconds(self) -> float:
        """Since the training began."""
        return self.t - self.began

    @property
    def reason(self) -> str:
        """What it means for the trial, in words."""
        if self.ended:
            return (
                f"{self.node} was lost {self.seconds:.1f} s after the start though no fault had "
                "struck it: its process ended by itself, or something else ended it"
            )
        return (
            f"{self.node} was given up {self.seconds:.1f} s after the start though no fault had "
            "struck it: the machine was too busy"
        )


def first_unplanned(record: Record) -> Unplanned | None:
    """Return the first loss during the training of a node that no fault had struck by then."""
    span = training_span(record)
    if span is None:
        return None
    began, ended = span
    for loss in sorted(_losses(record, began), key=lambda loss: loss.t):
        if began <= loss.t <= ended and not _asked_for(loss, record):
            return loss
    return None


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


def _losses(record: Record, began: float) -> Iterator[Unplanned]:
    for event in record.of(Detected):
        yield Unplanned(event.t, event.node, event.by not in SILENT, began)
    nodes = {(event.worker, event.incarnation): event.node for event in record.of(WorkerJoined)}
    for left in record.of(WorkerLeft):
        node = nodes.get((left.worker, left.incarnation))
        # Of a worker from before a resumption nothing else is known, not even its node.
        if left.was_lost and node is not None:
            yield Unplanned(left.t, node, left.reason == "lost", began)


def _asked_for(loss: Unplanned, record: Record) -> bool:
    """Whether a fault that had struck by then explains the loss."""
    if any(fault.t <= loss.t and fault.node == loss.node for fault in record.of(Killed)):
        return True
    ends: list[Resumed | Undisturbed] = [*record.of(Resumed), *record.of(Undisturbed)]
    over = {(event.fault, event.node): event.t for event in ends}
    lasting: list[Paused | Disturbed] = [*record.of(Paused), *record.of(Disturbed)]
    return any(
        fault.t <= loss.t <= over.get((fault.fault, fault.node), math.inf) + AFTERMATH
        for fault in lasting
        if fault.node == loss.node or (isinstance(fault, Disturbed) and fault.kind in BETWEEN_NODES)
    )
