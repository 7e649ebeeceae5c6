"""How a fault plan is told: each of its faults as one line that a person reads.

And what the ways of killing that a queueing system has do to a node.
"""

from __future__ import annotations

from dps.core.faults.plan import (
    After,
    Corrupt,
    Cut,
    Delay,
    Fault,
    FaultPlan,
    Kill,
    Slow,
    told,
)

FEW = 2
WAYS = {"host": "lost with its host", "requeue": "requeued"}


def line(fault: Fault) -> str:
    """Return a fault in words: what, whom, when."""
    comma = "," if isinstance(fault.when, After) else ""
    return f"{_done(fault)} {told(fault.target)}{comma} {fault.when}"


def late_line(fault: Fault) -> str:
    """Return the words for a fault whose moment lies after the end."""
    return f"the {fault.kind} of {told(fault.target)} {fault.when} never comes"


def brief(plan: FaultPlan) -> str:
    """Return a plan in the words of a table's cell."""
    if len(plan) > FEW:
        return f"{len(plan)} faults"
    return ", ".join(map(line, plan)) or "–"


def full(plan: FaultPlan) -> list[str]:
    """Return every fault of a plan in words, with its number and for how long it lasts."""
    return [f"{number}: {line(fault)}{_lasting(fault)}" for number, fault in enumerate(plan)]


def _done(fault: Fault) -> str:
    match fault:
        case Kill(by="requeue"):
            return "requeue"
        case Kill(by="host"):
            return "take the host of"
        case _:
            return fault.kind


def _lasting(fault: Fault) -> str:
    match fault:
        case Kill(by="requeue"):
            return ", back when the queue lets it"
        case Kill(back_after=None):
            return ", for good"
        case Kill(back_after=back):
            return f", replaced after {back:g} s"
        case Slow(factor=factor, seconds=seconds):
            return f", {factor:g} times slower for {seconds:g} s"
        case Cut(seconds=seconds, direction=direction):
            what = {"both": "", "in": ", what it is sent", "out": ", what it sends"}[direction]
            return f"{what}, for {seconds:g} s"
        case Delay(delay=delay, seconds=seconds):
            return f", each message by {delay:g} s, for {seconds:g} s"
        case Corrupt():
            return ""
        case _:
            return f", for {fault.seconds:g} s"
