"""Faults: their targets, moments and kinds.

A target may be a place ("the tail of shard 0"), which is looked up when the fault is due: heads
move, and nodes are replaced. A moment may be drawn or recur; `expand` makes single moments of it.
An `Injector` carries faults out: kills and pauses by signals (`dps.faults.acts`), other kinds by
their `effect` (`dps.faults.effects`). It is imported on first use, because it imports Dask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from dps.cluster.backends.base import Act
from dps.core.ranges import AboveOne, Checked, NotNegative, Positive, refused, whole_from
from dps.errors import require

if TYPE_CHECKING:
    from dps.faults.effects import Effect as Effect
    from dps.faults.effects import Hit as Hit
    from dps.faults.effects import Seen as Seen
    from dps.faults.expansion import expand as expand
    from dps.faults.injector import Injector as Injector

_LAZY = {
    **dict.fromkeys(("Effect", "Hit", "Seen"), "dps.faults.effects"),
    "Injector": "dps.faults.injector",
    "expand": "dps.faults.expansion",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'dps.faults' has no attribute {name!r}")


Phase = Literal["checkpoint", "recovery"]
Position = Literal["head", "middle", "tail"]
Unit = Literal["seconds", "updates"]
Direction = Literal["both", "in", "out"]
Way = Literal["signal", "requeue", "host"]

MIN_SHAPE = 0.01  # below it, gaps between failures overflow


# -- targets -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seat:
    """The node that started with this name, or its latest replacement.

    >>> print(Kill(Seat("server-0"), AtUpdates(100)).describe())
    kill server-0 or its replacement at 100 updates, replaced after 1 s
    """

    name: str

    def __str__(self) -> str:
        return f"{self.name} or its replacement"


@dataclass(frozen=True, slots=True)
class InChain:
    """The replica at a position of a shard's chain: a word, or a number from 0, the head.

    Parameters
    ----------
    shard
        Number of the shard.
    position
        "head", "middle", "tail", or the number from the head, 0.

    Examples
    --------
    >>> print(Pause(InChain(shard=0, position="tail"), AtSeconds(2)).describe())
    pause the tail of shard 0 at 2 s, for 2 s
    """

    shard: int
    position: Position | int = "head"

    def __post_init__(self) -> None:
        known = self.position in get_args(Position)
        if not known and (not isinstance(self.position, int) or self.position < 0):
            raise refused("InChain: position", self.position, "head, middle, tail or 0 and above")

    def __str__(self) -> str:
        if isinstance(self.position, int):
            return f"replica {self.position} of shard {self.shard}"
        return f"the {self.position} of shard {self.shard}"


@dataclass(frozen=True, slots=True)
class Among:
    """A random one, or all, of the living nodes of a role, of a shard's chain, or of the cluster.

    The draw depends on the seed, the number of the fault and the living nodes. With "each", every
    node of the role has its own faults at its own moments: see `Every`.

    Parameters
    ----------
    pick
        "random": one of them. "all": all at once. "each": each separately, with a role and `Every`.
    role
        Role of the nodes; None: any.
    shard
        Shard that the nodes hold; None: any.

    Examples
    --------
    >>> print(Kill(Among("random", role="server"), AtUpdates(100), back_after=None).describe())
    kill a random server node at 100 updates, for good
    """

    pick: Literal["random", "all", "each"]
    role: str | None = None
    shard: int | None = None

    def __post_init__(self) -> None:
        of_role = self.pick != "each" or self.role is not None
        require(of_role, "each needs a role; expected {role: server, pick: each}")

    def __str__(self) -> str:
        role = "" if self.role is None else f"{self.role} "
        shard = "" if self.shard is None else f" of shard {self.shard}"
        pick = {"random": "a random", "all": "every", "each": "each"}[self.pick]
        return f"{pick} {role}node{shard}"


# A text is the name of a node; several names are hit at once. A number is that of a shard, for
# faults that hit checkpoints (`Fault.hits`).
Target = str | tuple[str, ...] | Seat | InChain | Among | int


# -- moments -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AtUpdates(Checked):
    """As soon as every shard has applied this number of updates.

    An `optional` fault, as of a random process, is skipped if the training ends before it is due,
    or if no such node is up.

    >>> print(AtUpdates(100))
    at 100 updates
    """

    updates: Annotated[int, whole_from(1, "updates")]
    optional: bool = False

    def __str__(self) -> str:
        return f"at {self.updates} updates"


@dataclass(frozen=True, slots=True)
class AtSeconds(Checked):
    """This number of seconds after the training started; `optional` as in `AtUpdates`.

    >>> print(AtSeconds(2.5))
    at 2.5 s
    """

    seconds: NotNegative
    optional: bool = False

    def __str__(self) -> str:
        return f"at {self.seconds:.3g} s"


@dataclass(frozen=True, slots=True)
class During(Checked):
    """While a checkpoint is being written, or a shard is being restored.

    >>> print(During("recovery"))
    while a shard is restored
    """

    phase: Phase
    optional: ClassVar[bool] = False

    def __str__(self) -> str:
        done = "a checkpoint is written" if self.phase == "checkpoint" else "a shard is restored"
        return f"while {done}"


@dataclass(frozen=True, slots=True)
class After(Checked):
    """Some seconds after another fault, given by its number in the plan, took effect.

    Parameters
    ----------
    fault
        Number of the fault in the plan, from 0.
    seconds
        Seconds after it took effect.

    Examples
    --------
    >>> print(Kill("server-1", After(fault=0, seconds=0.5)))
    kill server-1, 0.5 s after fault 0
    """

    fault: Annotated[int, whole_from(0, "faults")]
    seconds: NotNegative = 0.0
    optional: ClassVar[bool] = False

    def __str__(self) -> str:
        later = f"{self.seconds:g} s" if self.seconds else "at once"
        return f"{later} after fault {self.fault}"


@dataclass(frozen=True, slots=True)
class Between:
    """A moment drawn uniformly from [low, high), in seconds or updates.

    A range that is a multiple of a period, such as that of checkpoints, gives every phase of the
    period the same chance.

    >>> print(Between(100, 200, "updates"))
    between 100 and 200 updates
    """

    low: float
    high: float
    unit: Unit = "seconds"
    optional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        least = 1 if self.unit == "updates" else 0
        ordered = least <= self.low < self.high < math.inf
        require(ordered, f"{self}: expected two numbers from {least}, the smaller first")
        whole = self.unit == "seconds" or self.low % 1 == self.high % 1 == 0
        require(whole, f"{self}: expected whole numbers")

    def __str__(self) -> str:
        return f"between {self.low:g} and {self.high:g} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class Every(Checked):
    """A renewal process: the gaps between moments are independent draws of a Weibull distribution.

    A gap is from the start of one fault (or of the training) to the start of the next, so moments
    do not depend on how long a fault or a recovery lasts.

    Parameters
    ----------
    mtbf, updates
        The mean gap, in seconds (`mtbf`) or in updates; give exactly one.
    until
        The end of the process, in seconds or updates from the start of the training.
    shape
        The shape of the distribution, 0.01 or more: 1 is the exponential one (a Poisson process);
        below 1, failures come in bursts.

    Examples
    --------
    >>> print(Every(mtbf=30, until=300, shape=0.7))
    every 30 s until 300 s
    """

    mtbf: Positive | None = None
    updates: Positive | None = None
    until: Positive
    shape: Positive = 1.0
    optional: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one = (self.mtbf is None) != (self.updates is None)
        require(one, "expected exactly one of mtbf and updates")
        super().__post_init__()
        if self.shape < MIN_SHAPE:
            raise refused("Every: shape", self.shape, f"{MIN_SHAPE} or more")

    def __str__(self) -> str:
        mean = "s" if self.unit == "seconds" else "updates"
        return f"every {self.mean:.3g} {mean} until {self.until:g} {mean}"

    @property
    def unit(self) -> Unit:
        """The unit of the gaps."""
        return "seconds" if self.updates is None else "updates"

    @property
    def mean(self) -> float:
        """The mean of the gaps."""
        return self.mtbf or self.updates or 0.0


When = AtUpdates | AtSeconds | During | After | Between | Every


# -- faults ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault(Checked):
    """Base of all kinds of faults; derive your own from `Lasting`.

    A kind is a frozen dataclass with its settings as further fields, which have defaults. The keys
    and types of configurations and the text of reports are derived from it.

    Parameters
    ----------
    target, when
        The nodes that the fault hits, and the moment.

    Attributes
    ----------
    kind
        Its name in configurations, records and reports.
    lasts
        The end of the text of `describe`, with fields in braces.
    hits
        The kind of target: a node, or a shard, whose checkpoints are hit.
    needs
        The acts on a node's process that it needs; without one of them, a trial does not begin.
    """

    target: Target
    when: When
    kind: ClassVar[str]
    lasts: ClassVar[str] = ""
    hits: ClassVar[Literal["node", "shard"]] = "node"
    needs: ClassVar[tuple[Act, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.target, int)
        require(number == (self.hits == "shard"), f"{self.kind}: expected a {self.hits} as target")
        each = isinstance(self.target, Among) and self.target.pick == "each"
        if each and not isinstance(self.when, Every):
            name = f"{type(self).__name__}: target"
            raise refused(name, self.target, "every: as the moment, one for each node")

    def __str__(self) -> str:
        comma = "," if isinstance(self.when, After) else ""
        return f"{self.action} {self.whom}{comma} {self.when}"

    def describe(self) -> str:
        """Return the action, target, moment and duration in words."""
        return f"{self}{self.lasts.format(**vars(self))}"

    @property
    def action(self) -> str:
        """The verb of `describe`."""
        return self.kind

    @property
    def whom(self) -> str:
        """The target in words."""
        if isinstance(self.target, int):
            return f"shard {self.target}"
        return ", ".join(self.target) if isinstance(self.target, tuple) else str(self.target)

    def effect(self, hit: Hit) -> Effect:
        """Return the effect on a node; custom kinds override this."""
        raise LookupError(f"{type(self).__name__} has no effect(hit)")


@dataclass(frozen=True)
class Lasting(Fault):
    """Base of faults that begin and end: derive your own from it.

    Parameters
    ----------
    seconds
        Duration of the fault.
    """

    seconds: Positive = 2.0
    lasts: ClassVar[str] = ", for {seconds:g} s"


FaultPlan = tuple[Fault, ...]


# -- kinds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill(Fault):
    """SIGKILL; `back_after` seconds later a fresh node takes its place.

    Parameters
    ----------
    back_after
        Seconds until a fresh, empty node takes its place; None: never. With `by="requeue"`, the
        queueing system restarts the job instead.
    by
        "signal": SIGKILL to the process. "requeue": its job ends and is queued again. "host": its
        host is taken away with all its nodes, until they are replaced or the plan ends. The last
        two need nodes that are jobs of a queueing system.

    Examples
    --------
    >>> print(Kill(("server-0", "server-1"), AtUpdates(100), back_after=5).describe())
    kill server-0, server-1 at 100 updates, replaced after 5 s
    """

    back_after: NotNegative | None = 1.0
    by: Way = "signal"
    kind = "kill"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by == "requeue" and self.back_after != 1.0:
            raise refused("Kill: back_after", self.back_after, "none: the queue brings it back")
        same = not isinstance(self.target, Among) or self.target.pick == "each"
        if self.back_after is None and same and isinstance(self.when, Every):
            raise refused("Kill: back_after", None, "seconds: recurring kills need a replacement")

    @property
    def action(self) -> str:
        """The verb of `describe`."""
        return {"signal": "kill", "requeue": "requeue", "host": "take the host of"}[self.by]

    def describe(self) -> str:
        """Return the action, target, moment and duration in words."""
        if self.by == "requeue":
            return f"{self}, replaced when the queue restarts it"
        back = self.back_after
        return f"{self}, for good" if back is None else f"{self}, replaced after {back:g} s"


@dataclass(frozen=True)
class Pause(Lasting):
    """SIGSTOP for `seconds`, then SIGCONT.

    Connections stay open and memory is kept. The monitor of the host kills the stopped process if
    another copy of its state can take over; then a fresh node takes its place after the pause.

    Parameters
    ----------
    host
        Whether the whole host seems to hang: its monitor does not report the process, which is
        therefore given up only when its lease ends.

    Examples
    --------
    >>> print(Pause("worker-0", AtSeconds(2), seconds=5).describe())
    pause worker-0 at 2 s, for 5 s
    """

    host: bool = False
    kind = "pause"
    needs = ("pause",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host and isinstance(self.when, During):
            raise refused("Pause: host", True, "false: a moment during a phase hits one process")


@dataclass(frozen=True)
class Slow(Lasting):
    """The process runs `factor` times slower, for `seconds`: it is stopped and resumed in turns.

    Waits, such as `worker.sleep`, do not take longer.

    Parameters
    ----------
    factor
        Multiple of the time that computation takes.

    Examples
    --------
    >>> print(Slow("worker-0", AtSeconds(2), factor=3).describe())
    slow worker-0 at 2 s, 3 times slower for 2 s
    """

    factor: AboveOne = 4.0
    kind = "slow"
    lasts = ", {factor:g} times slower for {seconds:g} s"
    needs = ("pause",)


@dataclass(frozen=True)
class Cut(Lasting):
    """No message of the parameter server passes, for `seconds`.

    Parameters
    ----------
    direction
        The messages that are cut: "in", to the node; "out", from the node; or "both".

    Examples
    --------
    >>> print(Cut("server-0", AtSeconds(2), direction="out").describe())
    cut server-0 at 2 s, what it sends, for 2 s
    """

    direction: Direction = "both"
    kind = "cut"

    def describe(self) -> str:
        """Return the action, target, moment and duration in words."""
        what = {"both": "", "in": ", what it is sent", "out": ", what it sends"}[self.direction]
        return f"{self}{what}, for {self.seconds:g} s"


@dataclass(frozen=True)
class Delay(Lasting):
    """Each message of the parameter server takes `delay_seconds` longer, for `seconds`.

    Parameters
    ----------
    delay_seconds
        Additional seconds for each message.

    Examples
    --------
    >>> print(Delay("server-0", AtSeconds(2)).describe())
    delay server-0 at 2 s, each message by 0.05 s, for 2 s
    """

    delay_seconds: Positive = 0.05
    kind = "delay"
    lasts = ", each message by {delay_seconds:g} s, for {seconds:g} s"


@dataclass(frozen=True)
class DiskFull(Lasting):
    """Every write of a node's process to a file fails, as on a full disk, for `seconds`.

    >>> print(DiskFull("server-0", AtSeconds(2), seconds=5).describe())
    disk_full server-0 at 2 s, for 5 s
    """

    kind = "disk_full"
    needs = ("limit",)


@dataclass(frozen=True)
class Corrupt(Fault):
    """Damages bytes of the newest checkpoint of a shard, whose number is the target.

    >>> print(Corrupt(0, During("recovery")).describe())
    corrupt shard 0 while a shard is restored
    """

    kind = "corrupt"
    hits = "shard"


KINDS: tuple[type[Fault], ...] = (Kill, Pause, Slow, Cut, Delay, DiskFull, Corrupt)
