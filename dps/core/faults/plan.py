"""Fault plans as data: what happens to whom, when, and for how long.

A plan says at the latest at its moment whom it hits: heads move and nodes are replaced, so a target
may be a place ("the tail of shard 0") that is looked up when the fault is due.
`dps.core.faults.expansion` turns what recurs (random processes, flapping) into plain faults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dps.errors import ConfigurationError

Phase = Literal["checkpoint", "recovery"]
Direction = Literal["both", "in", "out"]
Position = Literal["head", "middle", "tail"]
Way = Literal["signal", "requeue", "host"]


# -- whom -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seat:
    """The node that has the place of `name`, which it had at the start: it or its replacement."""

    name: str

    def __str__(self) -> str:
        return f"{self.name} or its replacement"


@dataclass(frozen=True, slots=True)
class InChain:
    """The replica at a position of a shard's chain: a word, or a number with 0 for the head."""

    shard: int
    position: Position | int = "head"

    def __str__(self) -> str:
        if isinstance(self.position, int):
            return f"replica {self.position} of shard {self.shard}"
        return f"the {self.position} of shard {self.shard}"


@dataclass(frozen=True, slots=True)
class Among:
    """One drawn at random, or all, of the living nodes of a role or of a shard's chain.

    With neither it is of all nodes. What is drawn follows from the seed and the fault's number.
    """

    pick: Literal["random", "all"]
    role: str | None = None
    shard: int | None = None

    def __str__(self) -> str:
        whose = "" if self.role is None else f"{self.role} "
        where = "" if self.shard is None else f" of shard {self.shard}"
        return f"{'every' if self.pick == 'all' else 'a random'} {whose}node{where}"


# A text is the name of a node as it is; several names are hit at once.
Target = str | tuple[str, ...] | Seat | InChain | Among


# -- when -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AtUpdates:
    """As soon as the shards have applied so many updates (the least of them counts).

    One that is `optional` is of a random process: it simply does not happen if the training ends
    before, or if nobody is there to be hit.
    """

    updates: int
    optional: bool = False

    def __post_init__(self) -> None:
        _require(self.updates >= 1, f"at_updates={self.updates}, expected at least 1")

    def __str__(self) -> str:
        return f"at {self.updates} updates"


@dataclass(frozen=True, slots=True)
class AtSeconds:
    """So many seconds after the training started.

    One that is `optional` is of a random process or of a trace: it simply does not happen if the
    training ends before, or if nobody is there to be hit.
    """

    seconds: float
    optional: bool = False

    def __post_init__(self) -> None:
        _require(0 <= self.seconds < math.inf, f"at_seconds={self.seconds}, expected 0 s or more")

    def __str__(self) -> str:
        return f"at {self.seconds:.3g} s"


@dataclass(frozen=True, slots=True)
class During:
    """As soon as, and only while, a checkpoint is being written or a shard is being restored."""

    phase: Phase

    def __post_init__(self) -> None:
        _require(self.phase in get_args(Phase), f"phase={self.phase!r} is unknown")

    def __str__(self) -> str:
        return {
            "checkpoint": "while a checkpoint is written",
            "recovery": "while a shard is restored",
        }[self.phase]


@dataclass(frozen=True, slots=True)
class After:
    """So many seconds after another fault of the plan, given by its number, took effect."""

    fault: int
    seconds: float = 0.0

    def __post_init__(self) -> None:
        _require(self.fault >= 0, f"after fault {self.fault}: faults are counted from 0")
        _require(
            0 <= self.seconds < math.inf,
            f"after fault {self.fault}: seconds={self.seconds}, expected 0 s or more",
        )

    def __str__(self) -> str:
        later = f"{self.seconds:g} s" if self.seconds else "at once"
        return f"{later} after fault {self.fault}"


When = AtUpdates | AtSeconds | During | After


def is_optional(when: When) -> bool:
    """Whether a fault with this moment need not happen."""
    return isinstance(when, AtUpdates | AtSeconds) and when.optional


# -- what -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process of a node.

    Parameters
    ----------
    target, when
        Whom, and at which moment.
    back_after
        Seconds until a fresh, empty node takes its place; None: never. What is requeued comes back
        by itself, when the queueing system lets it.
    by
        How: SIGKILL to it ("signal"); its job is ended and queued again ("requeue"); its host is
        taken away with all nodes on it, until they come back or the plan ends ("host"). The last
        two only where nodes are jobs of a queueing system that can.
    """

    target: Target
    when: When
    back_after: float | None = 1.0
    by: Way = "signal"
    kind: ClassVar[str] = "kill"

    def __post_init__(self) -> None:
        _require(
            self.by in get_args(Way), f"kill of {told(self.target)}: by={self.by!r} is unknown"
        )
        _require(
            self.back_after is None or 0 <= self.back_after < math.inf,
            f"kill of {told(self.target)}: back_after={self.back_after}, expected 0 s or more",
        )


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop the process of a node with SIGSTOP for a while.

    Its connections stay open and its memory is kept. The monitor of its host sees that it is
    stopped, and kills it if another copy of its state can take over; a fresh node takes its place
    when the pause is over. Otherwise it resumes where it was.

    Parameters
    ----------
    target, when
        Whom, and at which moment.
    seconds
        How long it is stopped.
    host
        Whether its host seems to hang as a whole: the monitor says nothing of the process either,
        so only its lease ends.
    """

    target: Target
    when: When
    seconds: float = 2.0
    host: bool = False
    kind: ClassVar[str] = "pause"

    def __post_init__(self) -> None:
        _lasts("pause", self.target, self.seconds)
        held = self.host and isinstance(self.when, During)
        _require(not held, "pause: host=True needs another moment than one during a phase")


@dataclass(frozen=True, slots=True)
class Slow:
    """Have a node compute slower by a factor for a while.

    Parameters
    ----------
    target, when
        Whom, and at which moment.
    factor
        How many times as long everything takes: 4 leaves it a quarter of the time.
    seconds
        How long it is slow.
    """

    target: Target
    when: When
    factor: float = 4.0
    seconds: float = 2.0
    kind: ClassVar[str] = "slow"

    def __post_init__(self) -> None:
        _lasts("slow", self.target, self.seconds)
        _require(
            1 < self.factor < math.inf,
            f"slow of {told(self.target)}: factor={self.factor}, expected more than 1",
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut the links of a node for a while: nothing of the parameter server passes.

    Parameters
    ----------
    target, when
        Whom, and at which moment.
    seconds
        How long they are cut.
    direction
        What does not pass: what is sent to it ("in"), what it sends ("out"), or "both".
    """

    target: Target
    when: When
    seconds: float = 2.0
    direction: Direction = "both"
    kind: ClassVar[str] = "cut"

    def __post_init__(self) -> None:
        _lasts("cut", self.target, self.seconds)
        _require(
            self.direction in get_args(Direction),
            f"cut of {told(self.target)}: direction={self.direction!r} is unknown",
        )


@dataclass(frozen=True, slots=True)
class Delay:
    """Delay every message of the parameter server to and from a node for a while.

    Parameters
    ----------
    target, when
        Whom, and at which moment.
    delay
        How much longer each message takes, in seconds.
    seconds
        How long that goes on.
    """

    target: Target
    when: When
    delay: float = 0.05
    seconds: float = 2.0
    kind: ClassVar[str] = "delay"

    def __post_init__(self) -> None:
        _lasts("delay", self.target, self.seconds)
        _require(
            0 < self.delay < math.inf,
            f"delay of {told(self.target)}: delay={self.delay}, expected more than 0 s",
        )


@dataclass(frozen=True, slots=True)
class DiskFull:
    """Have every write of a node to its disk fail for a while, as if there was no space left.

    Parameters
    ----------
    target, when
        Whom, and at which moment.
    seconds
        How long it is full.
    """

    target: Target
    when: When
    seconds: float = 2.0
    kind: ClassVar[str] = "disk_full"

    def __post_init__(self) -> None:
        _lasts("disk_full", self.target, self.seconds)


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Damage the newest checkpoint of a shard.

    Parameters
    ----------
    target
        The number of the shard.
    when
        At which moment.
    """

    target: int
    when: When
    kind: ClassVar[str] = "corrupt"

    def __post_init__(self) -> None:
        _require(self.target >= 0, f"corrupt of shard {self.target}: shards are counted from 0")


@dataclass(frozen=True)
class Disturbing:
    """Base of further kinds of faults, which disturb nodes that go on: derive one of your own.

    What it does to a node, and what proves that, is said beside it (`dps.chaos.kinds.effect_of`).
    Its own settings are more fields, with defaults or keyword-only.

    Parameters
    ----------
    target, when
        Whom, and at which moment.
    seconds
        How long it goes on.

    Attributes
    ----------
    kind
        The word for it in configurations, records and reports.
    """

    target: Target
    when: When
    seconds: float = 2.0
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        _lasts(self.kind, self.target, self.seconds)


Lasting = Slow | Cut | Delay | DiskFull | Disturbing
Disturbance = Lasting | Corrupt
Fault = Kill | Pause | Disturbance
FaultPlan = tuple[Fault, ...]


def told(target: Target | int) -> str:
    """Say whom a fault hits; a number is that of a shard."""
    if isinstance(target, int):
        return f"shard {target}"
    return ", ".join(target) if isinstance(target, tuple) else str(target)


def _lasts(kind: str, target: Target, seconds: float) -> None:
    _require(
        0 < seconds < math.inf,
        f"{kind} of {told(target)}: seconds={seconds}, expected more than 0",
    )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigurationError(otherwise)
