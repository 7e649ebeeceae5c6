"""Faults and schedules as data: who fails how, when and for how long, drawn from one seed.

A schedule says everything that is not decided by the program, so that it can be run again, with
some of its faults left out. Whom a fault hits is said by what it does ("the head of shard 0") and
is found out when the fault is due.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tests.simulator.network import Weather
from tests.simulator.schedules.strategies import Case

CALM = "calm"
WIDE = "wide"
WATCHED = "watched"
NOTHING = "none"

# What may happen to whom, and after what.
EFFECTS = {
    "crash": "{whom} crashes",
    "crash in a write": "{whom} crashes in the middle of writing a checkpoint",
    "pause": "{whom} is paused",
    "slow": "{whom} runs slowly, in short bursts",
    "suspicion": "{whom} is taken for lost, but lives",
    "partition": "{whom} and {other} cannot reach each other",
    "one-way cut": "nothing that {whom} sends reaches {other}",
    "lossy link": "half of what {whom} sends to {other} is lost",
    "slow link": "what {whom} sends to {other} takes long",
    "full disk": "{whom} is full",
    "failed rename": "{whom} refuses to rename files",
    "torn write": "{whom} keeps half of the next file, and says nothing",
    "bit flip": "a bit of the newest file of {whom} flips",
    "join": "a worker joins",
    "scale": "{whom} are to hold the shards",
    "drain": "{whom} is drained, and then shut down",
    "dismiss": "{whom} is asked to leave",
    "clock step": "the wall clock of {whom} jumps",
    "power loss": "the machine of {whom} loses its power, and what its disk has in its cache",
    "power loss in a write": "{whom} loses its power in the middle of writing a checkpoint",
    "slow disk": "{whom} is slow, like all work that is done in threads",
    "late copies": "some of what {whom} sends and is sent arrives again much later",
    "return": "{whom} crashes, and comes back under its name",
    "twin": "a second process has the name of {whom}; the first one ends in the end",
    "resume": "{whom} ends, and goes on from its checkpoints",
    "busy": "{whom} is busy, and answers nothing",
    "standstill": "{whom} is paused, and its clock with it",
    "monitor lost": "the monitor on the machine of {whom} ends",
    "exception": "a background task of {whom} raises what nobody foresaw",
}

AT_ONCE = {"suspicion", "torn write", "bit flip", "join", "scale", "drain", "dismiss", "exception"}
STEP_SECONDS = (0.1, 100.0)  # the shortest jump of a clock, and the longest

MOMENTS = {
    "before": "",
    "detected": "a loss is noticed",
    "node back": "a fresh node is up",
    "copying": "a state is on its way to a newcomer",
    "extending": "a replica is being added",
    "configuring": "a new epoch is being announced",
    "moved": "a replica has moved",
    "promoted": "a replica is promoted",
    "restored": "a shard is restored",
    "writing": "a checkpoint is being written",
    "stored": "a state is on its way to the store",
    "mail taken": "a mailbox is being emptied",
    "whole": "every shard is whole again",
    "restoring": "a shard is to be restored",
    "entering": "a worker asks to take part",
}


ROLES = {
    "worker": "worker {}",
    "head": "the head of shard {}",
    "middle": "the middle of shard {}",
    "tail": "the tail of shard {}",
    "store": "the store of shard {}",
    "mailbox": "the mailbox of shard {}",
    "disk": "the disk of shard {}",
    "replacement": "the replacement of the last victim",
    "newcomer": "the newcomer that is being given a state",
    "source": "the replica that gives its state",
    "scheduler": "the scheduler",
    "servers": "{} servers",
    "restorer": "the host that is to restore a shard",
    "entrant": "the worker that asks to take part",
    "group": "the whole group",
}


@dataclass(frozen=True, slots=True)
class Whom:
    """Who is hit, by what it is then; `number` is of a shard or of a worker, or how many."""

    role: str
    number: int = 0

    def __str__(self) -> str:
        return ROLES[self.role].format(self.number)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes
    ----------
    after, delay
        It happens so many seconds after the fault before it, or after something that comes then.
    lasts
        When it is over: the process goes on, a fresh node takes its place, the link works again.
        None: not before the faults are over.
    other
        The other end of a link.
    which
        A number from 0 to 1, for what else is to be chosen: of a slow link, how slow.
    """

    kind: str
    whom: Whom
    delay: float
    after: str = "before"
    lasts: float | None = None
    other: Whom | None = None
    which: float = 0.0

    def __post_init__(self) -> None:
        assert self.kind in EFFECTS, self.kind
        assert self.after in MOMENTS, self.after

    def __str__(self) -> str:
        moment = f" after {MOMENTS[self.after]}" if self.after != "before" else " later"
        effect = EFFECTS[self.kind].format(whom=self.whom, other=self.other)
        return f"{self.delay:.3f} s{moment}: {effect}{self._end}"

    @property
    def step(self) -> float:
        """By how many seconds a clock jumps: back, if `which` is below one half."""
        shortest, longest = STEP_SECONDS
        size: float = shortest * (longest / shortest) ** abs(2 * self.which - 1)
        return -size if self.which < 0.5 else size

    @property
    def _end(self) -> str:
        match self.kind:
            case "clock step":
                return f" by {self.step:+.3f} s"
            case "return":
                return f"; it does so {self.lasts:.3f} s later"
            case "twin":
                return f", {self.lasts:.3f} s later"
            case "resume":
                left = "; its hosts live on for themselves" if self.which < 0.5 else ""
                return f"{left}; it is brought up {self.lasts:.3f} s later"
            case "power loss in a write" | "power loss":
                return f"; fresh ones are up {self.lasts:.3f} s later" if self.lasts else ""
            case "monitor lost":
                return "; another one starts"
            case kind if kind in AT_ONCE:
                return ""
            case "crash" | "crash in a write":
                fresh = "another one joins" if self.whom.role == "worker" else "a fresh one is up"
                return f"; {fresh} {self.lasts:.3f} s later" if self.lasts else "; it stays down"
        return f", for {self.lasts:.3f} s" if self.lasts else ", to the end"


@dataclass(frozen=True)
class Schedule:
    """All that a run of a case depends on.

    Attributes
    ----------
    seed
        Whatever else is random is drawn from it, in streams of their own.
    think
        The longest pause of a worker between two updates, in seconds.
    work
        The longest time that work in an executor takes.
    inline
        Whether the update rule runs in the event loop and not in an executor.
    extra
        Nodes besides those that the group needs.
    told
        Whether the coordinator is told of connections that break.
    skewed
        Whether the processes' clocks differ.
    tables
        Whether workers push to a sparse table as well.
    wide
        Whether it has what is drawn from a stream of its own: of the faults, and what comes next.
    watched
        Whether there is a monitor on each machine, and faults that it sees.
    machines
        How many machines there are for all nodes; 0: one for each.
    shaped
        Whether the rule has slots, and each shard arrays of two dtypes, in several blocks.
    calm
        Whether all was left out that the seed draws besides the faults.
    chosen
        Which of the seed's faults these are; None: all.
    """

    case: Case
    seed: int
    weather: Weather
    faults: tuple[Fault, ...]
    think: float = 0.05
    work: float = 0.02
    inline: bool = True
    extra: tuple[str, ...] = ()
    told: bool = True
    skewed: bool = False
    tables: bool = False
    wide: bool = False
    watched: bool = False
    machines: int = 0
    shaped: bool = False
    calm: bool = False
    chosen: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """What `make simulate REPLAY=…` takes."""
        parts = [self.case.name, str(self.seed)]
        if self.chosen is not None:
            parts.append(",".join(map(str, self.chosen)) or NOTHING)
        parts += [WIDE] * self.wide + [WATCHED] * self.watched + [CALM] * self.calm
        return ":".join(parts)

    def only(self, chosen: Iterable[int]) -> Schedule:
        """The same schedule with only some of its faults, by number."""
        kept = tuple(chosen)
        numbers = self.chosen if self.chosen is not None else tuple(range(len(self.faults)))
        faults = tuple(self.faults[i] for i in kept)
        return replace(self, faults=faults, chosen=tuple(numbers[i] for i in kept))

    def calmed(self) -> Schedule:
        """The same schedule in good weather, and with clocks that agree."""
        calm = Weather(self.weather.delays)
        return replace(self, weather=calm, skewed=False, told=True, calm=True)

    def in_words(self) -> list[str]:
        """The faults, one a line, after what is unusual about the rest."""
        unusual = {
            "the rule has slots, and each shard arrays of two dtypes, in blocks": self.shaped,
            f"all nodes are on {self.machines} machines": self.machines,
            "there is a monitor on each machine": self.watched,
            "clocks run at different speeds": self.skewed,
            f"there are more nodes than needed: {', '.join(self.extra)}": self.extra,
            "nobody tells the coordinator of connections that break": not self.told,
            "some requests arrive twice": self.weather.duplicated,
            "messages are lost now and then": self.weather.loss,
        }
        return [text for text, so in unusual.items() if so] + [str(fault) for fault in self.faults]
