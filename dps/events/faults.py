"""The events of injected faults: what was done to whom, and what proves its effect.

`fault` is always the number of the fault in the trial's plan, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from dps.events.base import Event, recorded


@recorded
@dataclass(frozen=True, slots=True)
class Killed(Event):
    """A fault plan killed a node's process.

    `gone` tells whether the process was seen to be gone afterwards (the proof that the fault
    happened), `updates` is the number of updates applied when it was killed. `by` says how: with
    SIGKILL ("signal"), its job was requeued, or its host was taken away ("host"); then every node
    on that host has such an event. `evidence` is what a queueing system said of it, if any did.
    """

    fault: int
    node: str
    pid: int
    updates: int
    gone: bool
    by: str = "signal"
    evidence: str = ""


@recorded
@dataclass(frozen=True, slots=True)
class Paused(Event):
    """A fault plan sent SIGSTOP to a node's process.

    `stopped` tells whether the process was seen to be stopped afterwards (the proof that the fault
    happened), `updates` is the number of updates applied when it was sent.
    """

    fault: int
    node: str
    pid: int
    updates: int
    stopped: bool


@recorded
@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """A paused process was sent SIGCONT; `running` tells whether it was seen to go on."""

    fault: int
    node: str
    pid: int
    running: bool


@recorded
@dataclass(frozen=True, slots=True)
class FaultMissed(Event):
    """A planned fault never happened, or without effect; it makes the trial invalid."""

    fault: int
    target: str
    reason: str


@recorded
@dataclass(frozen=True, slots=True)
class FaultSkipped(Event):
    """A fault of a random process or of a trace came when nobody was there to be hit.

    What is down already cannot fail: the trial stays valid.
    """

    fault: int
    target: str
    reason: str


@recorded
@dataclass(frozen=True, slots=True)
class CapacityRestored(Event):
    """A fresh node was brought up in the place of a lost one."""

    fault: int
    node: str


@recorded
@dataclass(frozen=True, slots=True)
class Disturbed(Event):
    """A fault plan began to disturb a node that goes on: slow, cut, delay, disk_full or corrupt.

    `evidence` says in words what was observed from outside, `effective` whether it proves the
    effect; `updates` is the number of updates applied when it began. What damages a shard's files
    rather than a node has "shard-0" and the like as its `node`.
    """

    fault: int
    kind: str
    node: str
    updates: int
    evidence: str
    effective: bool


@recorded
@dataclass(frozen=True, slots=True)
class Undisturbed(Event):
    """A disturbance was taken back; `evidence` says what it was seen to have done until then."""

    fault: int
    node: str
    evidence: str


@recorded
@dataclass(frozen=True, slots=True)
class PhaseMet(Event):
    """A fault that waited for a phase ("checkpoint" or "recovery") struck while it lasted.

    `evidence` says what was seen of the phase when the fault took effect.
    """

    fault: int
    phase: str
    evidence: str
