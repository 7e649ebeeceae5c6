"""Stories of what goes wrong together, and mixes of faults, as they are drawn for a schedule.

Wide schedules have clocks that jump, machines that lose their power, requests that arrive long
after they were sent, workers that come back under their names, disks that are slow, and groups that
end as a whole and go on from their checkpoints. Watched ones have machines with monitors, processes
that are busy, and tasks that raise. Both are drawn from streams of random numbers of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from dps.core.consistency import ASP
from dps.core.replay import Continue
from dps.protocol.lease import STANDSTILL
from dps.recovery.durability import NoDurability
from tests.simulator.schedules.schedule import Fault, Schedule, Whom
from tests.simulator.schedules.strategies import TIMINGS, Case

Story = Callable[["Draw"], list[Fault]]


class Draw:
    """What the faults of one schedule are drawn with."""

    def __init__(self, case: Case, random: Random) -> None:
        self.case = case
        self.random = random
        self.replicas = case.recovery.durability.above.replicas

    def faults(self) -> list[Fault]:
        """A story, a mix, or a story and then a mix."""
        dice = self.random.random()
        if dice < 0.3:
            return mix(self)
        story = self.random.choice(self.stories())
        return story(self) + (mix(self) if dice > 0.8 else [])

    def stories(self) -> list[Story]:
        """The stories that this case has the nodes for."""
        stories: list[Story] = [one, one_after_another, during_return, stalled, late_worker]
        stories += [zombie, frozen, cut_off, suspected]
        if self.replicas > 1:
            stories += [newcomer, behind]
        if self.replicas > 2:
            stories += [two_at_once, during_recovery, source_of_copy]
        if self.case.recovery.durability.writes_checkpoints:
            stories += [bad_disk, torn_by_crash] * 3
        if self.case.recovery.stores:
            stories += [store_out]
        if self.case.recovery.durability.above.stores > 1:
            stories += [store_and_server, store_after_store, store_behind, mail_of_one_store] * 3
        if self.case.recovery.durability.has_layer_below:
            stories += [nothing_above, nothing_above_and_bad_disk, layer_stuck] * 3
        return stories

    # -- what stories are made of ------------------------------------------------------------------

    def shard(self) -> int:
        """Any shard."""
        return self.random.randrange(self.case.shards)

    def seconds(self, longest: float) -> float:
        """A time between 0 and `longest` seconds."""
        return round(self.random.uniform(0, longest), 3)

    def which(self) -> float:
        """A number from 0 to 1."""
        return round(self.random.random(), 3)

    def replica(self, shard: int) -> Whom:
        """Any replica of a shard, by its role."""
        roles = ["head", "middle", "tail"]
        return Whom(self.random.choice(roles[: self.replicas]), shard)

    def worker(self) -> Whom:
        """Any worker."""
        return Whom("worker", self.random.randrange(self.case.workers))

    def host(self, shard: int) -> Whom:
        """Any node that serves for a shard."""
        if self.case.recovery.stores and self.random.random() < 0.3:
            return Whom(self.random.choice(["store", "mailbox"]), shard)
        return self.replica(shard)

    def crash(self, whom: Whom, within: float, after: str = "before") -> Fault:
        """Have a process crash; in 1 of 20 it stays down."""
        back = 0.02 + self.seconds(0.6)
        lasts = None if self.random.random() < 0.05 else back
        return Fault("crash", whom, self.seconds(within), after, lasts)

    def change(self, after: str = "before") -> Fault:
        """Another number of servers, a node that is taken out of use, or a worker that is."""
        dice, within = self.random.random(), self.seconds(0.3)
        if dice < 0.7:
            number = self.random.randint(self.replicas, self.case.shards * self.replicas)
            return Fault("scale", Whom("servers", number), within, after)
        if dice < 0.9:
            return Fault("drain", self.host(self.shard()), within, after)
        return Fault("dismiss", self.worker(), within, after)

    def deaf(self, lasts: float, within: float = 0.2) -> Fault:
        """A worker does not hear of what changes."""
        whom, other = Whom("scheduler"), Whom("worker", 1)
        return Fault("one-way cut", whom, self.seconds(within), lasts=lasts, other=other)

    def pause(self, whom: Whom, within: float, after: str = "before") -> Fault:
        """Pause a process for up to 0.51 s, or, as often, for up to 3.01 s."""
        longest = 0.5 if self.random.random() < 0.5 else 3.0
        return Fault("pause", whom, self.seconds(within), after, 0.01 + self.seconds(longest))


def changed(d: Draw, faults: list[Fault]) -> list[Fault]:
    """In every second schedule, have servers and workers come and go among the faults."""
    if d.random.random() < 0.5:
        return faults
    if d.random.random() < 0.5:
        return lost_in_a_move(d) + faults
    found = [d.change(), *faults]
    for _ in range(d.random.randint(0, 2)):
        found.insert(d.random.randint(0, len(found)), d.change())
    return found


def lost_in_a_move(d: Draw) -> list[Fault]:
    """Change who holds shards, and hit who takes part in it; a worker may not hear of it."""
    deaf = d.deaf(1.5)
    moments = ["copying", "extending", "configuring", "moved"]
    roles = ["source", "newcomer", "head", "tail"]
    whom, moment = Whom(d.random.choice(roles), d.shard()), d.random.choice(moments)
    hit = d.crash if d.random.random() < 0.6 else d.pause
    some = [d.change(), hit(whom, 0.02, moment), d.change()]
    return some if d.random.random() < 0.6 else [deaf, *some]


def one(d: Draw) -> list[Fault]:
    """Lose any one node of a shard."""
    return [d.crash(d.replica(d.shard()), 0.4)]


def one_after_another(d: Draw) -> list[Fault]:
    """Lose nodes of the same shard, each when the one before has been replaced."""
    shard, times = d.shard(), d.random.randint(2, 3)
    return [d.crash(d.replica(shard), 0.2, "whole") for _ in range(times)]


def zombie(d: Draw) -> list[Fault]:
    """Cut a head off that lives and serves, and a worker that does not hear of it; lose the next.

    The worker goes on to ask it.
    """
    head, scheduler = Whom("head", d.shard()), Whom("scheduler")
    lasts = 0.8 + d.seconds(0.8)
    return [
        d.deaf(lasts, 0.3),
        Fault("partition", head, 0.0, lasts=lasts, other=scheduler),
        d.crash(head, 1.5),
    ]


def suspected(d: Draw) -> list[Fault]:
    """Have a node taken for lost that lives and serves, then lose one."""
    shard = d.shard()
    return [Fault("suspicion", d.replica(shard), d.seconds(0.4)), d.crash(d.replica(shard), 0.4)]


def frozen(d: Draw) -> list[Fault]:
    """Pause a replica for longer than its lease; a worker still counts on it when it comes back."""
    whom = d.replica(d.shard())
    deaf = d.deaf(3.0, 0.3)
    paused = Fault("pause", whom, d.seconds(0.1), lasts=0.8 + d.seconds(1.0))
    return [paused] if d.random.random() < 0.5 else [deaf, paused]


def late_replies(d: Draw) -> list[Fault]:
    """Have leases granted long before their holder hears of it, then nothing more heard of it.

    A worker that does not hear of its replacement goes on to ask it.
    """
    holder, scheduler = Whom("tail", d.shard()), Whom("scheduler")
    deaf = d.deaf(2.5)
    late = Fault("slow link", scheduler, 0.0, lasts=1.5, other=holder, which=0.5)
    unheard = Fault("one-way cut", holder, 0.3 + d.seconds(0.2), lasts=1.2, other=scheduler)
    return [deaf, late, unheard]


def cut_off(d: Draw) -> list[Fault]:
    """Cut a replica off from the coordinator for longer than its lease, but not from the rest."""
    kinds = ["partition", "one-way cut"]
    kind, ends = d.random.choice(kinds), [d.replica(d.shard()), Whom("scheduler")]
    d.random.shuffle(ends)
    return [Fault(kind, ends[0], d.seconds(0.3), lasts=0.8 + d.seconds(1.5), other=ends[1])]


def during_return(d: Draw) -> list[Fault]:
    """Lose a node, then the one that takes its place, while it is brought into service."""
    first = d.crash(Whom("tail", d.shard()), 0.4)
    return [first, d.crash(Whom("replacement"), 0.05, "node back")]


def newcomer(d: Draw) -> list[Fault]:
    """Lose a node, then the replica that is being added at the tail."""
    first = d.crash(d.replica(d.shard()), 0.4)
    return [first, d.crash(Whom("newcomer"), 0.05, "copying")]


def behind(d: Draw) -> list[Fault]:
    """Lose a head when its successor is far behind it."""
    shard = d.shard()
    ends = Whom("head", shard), Whom("middle", shard)
    slow = Fault("slow link", ends[0], d.seconds(0.3), lasts=0.5, other=ends[1])
    return [slow, d.crash(Whom("head", shard), 0.3)]


def two_at_once(d: Draw) -> list[Fault]:
    """Lose all replicas of a shard but one, almost together."""
    shard = d.shard()
    first = d.crash(d.replica(shard), 0.4)
    return [first, d.crash(d.replica(shard), 0.03)]


def during_recovery(d: Draw) -> list[Fault]:
    """Lose a node, and another one as soon as the coordinator has noticed."""
    shard = d.shard()
    return [d.crash(d.replica(shard), 0.4), d.crash(d.replica(shard), 0.02, "detected")]


def source_of_copy(d: Draw) -> list[Fault]:
    """Lose a node, and the replica that copies its state to the newcomer."""
    return [d.crash(d.replica(d.shard()), 0.4), d.crash(Whom("source"), 0.05, "copying")]


def stalled(d: Draw) -> list[Fault]:
    """Pause or slow down a node for a moment, and lose another one meanwhile or afterwards."""
    shard = d.shard()
    kinds = ["pause", "slow"]
    stall = Fault(d.random.choice(kinds), d.host(shard), d.seconds(0.3), lasts=d.seconds(0.5))
    return [stall, d.crash(d.replica(shard), 0.6)]


def late_worker(d: Draw) -> list[Fault]:
    """Lose a worker somewhere in its training, have another one join, and lose a node."""
    return [d.crash(d.worker(), 0.4), d.crash(d.replica(d.shard()), 0.3)]


def bad_disk(d: Draw) -> list[Fault]:
    """Have a disk fail, and then the server that counts on what is there."""
    shard = d.shard()
    kinds = ["full disk", "failed rename", "torn write", "bit flip"]
    kind, which = d.random.choice(kinds), d.which()
    bad = Fault(kind, Whom("disk", shard), 0.1 + d.seconds(0.3), lasts=d.seconds(0.5), which=which)
    return [bad, d.crash(Whom("head", shard), 0.5)]


def torn_by_crash(d: Draw) -> list[Fault]:
    """Lose a server between two steps of writing a checkpoint, and perhaps the next one too."""
    whom, faults = Whom("head", d.shard()), []
    for _ in range(d.random.randint(1, 2)):
        which, back = d.which(), 0.02 + d.seconds(0.3)
        faults.append(Fault("crash in a write", whom, d.seconds(0.3), lasts=back, which=which))
    return faults


def nothing_above(d: Draw) -> list[Fault]:
    """Lose every copy of a shard above the layer of checkpoints, almost together."""
    shard, durability = d.shard(), d.case.recovery.durability
    roles = ["tail", "head", "middle"]
    copies = [Whom(role, shard) for role in roles[: d.replicas]]
    if durability.above.stores:
        copies.insert(d.random.randint(0, 1), Whom("store", shard))
        copies += [Whom("store", shard + other) for other in range(1, durability.above.stores)]
    first, *others = copies
    return [d.crash(first, 0.6), *(d.crash(whom, 0.02) for whom in others)]


def nothing_above_and_bad_disk(d: Draw) -> list[Fault]:
    """Have a disk fail under a layer, then lose every copy above it; and again."""
    faults = [bad_disk(d)[0], *nothing_above(d)]
    return faults if d.random.random() < 0.5 else [*faults, *nothing_above(d)]


def layer_stuck(d: Draw) -> list[Fault]:
    """Have nothing written for a while, in which acks go on, and perhaps lose some copy above."""
    shard = d.shard()
    kinds = ["full disk", "failed rename", "slow disk"]
    kind, which = d.random.choice(kinds), d.which()
    bad = Fault(kind, Whom("disk", shard), d.seconds(0.2), lasts=0.5 + d.seconds(1.0), which=which)
    return [bad, d.crash(d.host(shard), 0.5)] if d.random.random() < 0.5 else [bad]


def store_out(d: Draw) -> list[Fault]:
    """Have the store or a mailbox fail, stand still or be out of reach, and lose a server too."""
    shard = d.shard()
    whom, dice = Whom(d.random.choice(["store", "mailbox"]), shard), d.random.random()
    if dice < 0.4:
        out = d.crash(whom, 0.4)
    elif dice < 0.7:
        out = Fault("pause", whom, d.seconds(0.3), lasts=d.seconds(0.8))
    else:
        out = Fault(
            "partition", whom, d.seconds(0.3), "before", d.seconds(0.8), Whom("head", shard)
        )
    return [out, d.crash(Whom("head", shard), 0.5)]


def store_and_server(d: Draw) -> list[Fault]:
    """Lose one of several stores and, almost together, a server."""
    faults = [
        d.crash(Whom("store", d.random.randrange(d.case.recovery.durability.above.stores)), 0.5),
        d.crash(Whom("head", d.shard()), 0.05),
    ]
    d.random.shuffle(faults)
    return faults


def store_after_store(d: Draw) -> list[Fault]:
    """Lose a store and, as soon as a new one is up, one that has what it lacks, and a server."""
    first, other = Whom("store", 0), Whom("store", 0)
    moments = ["node back", "configuring", "stored"]
    lost = Fault("crash", first, d.seconds(0.4), lasts=0.02 + d.seconds(0.2))
    again = [d.crash(other, 0.3, d.random.choice(moments)), d.crash(Whom("head", d.shard()), 0.1)]
    d.random.shuffle(again)
    return [lost, *again]


def store_behind(d: Draw) -> list[Fault]:
    """Have a store out of reach of a server for a while, and lose the server, and another store."""
    shard, store = d.shard(), d.random.randrange(2)
    head, lasts = Whom("head", shard), 0.1 + d.seconds(0.6)
    cut = Fault("partition", Whom("store", store), d.seconds(0.4), lasts=lasts, other=head)
    faults = [cut, d.crash(head, 0.4)]
    if d.random.random() < 0.5:
        faults.append(d.crash(Whom("store", store + 1), 0.1))
    return faults


def mail_of_one_store(d: Draw) -> list[Fault]:
    """Lose a server for long and, while its mail is kept, one mailbox, then perhaps the other."""
    lost = Fault("crash", Whom("head", d.shard()), d.seconds(0.3), lasts=0.8 + d.seconds(0.8))
    faults = [lost, d.crash(Whom("mailbox", d.random.randrange(2)), 0.3)]
    again = d.crash(Whom("mailbox", 0), 0.3, "node back")
    return faults if d.random.random() < 0.5 else [*faults, again]


def mix(d: Draw) -> list[Fault]:
    """One to four faults of any kinds."""
    triggers: list[str] = ["before"] * 6
    triggers += ["detected", "node back", "copying", "configuring", "promoted", "restored", "whole"]
    durability = d.case.recovery.durability
    if durability.writes_checkpoints:
        triggers += ["writing"]
    if d.case.recovery.stores:
        triggers += ["stored", "mail taken"]
    faults = []
    for i in range(d.random.randint(1, 4)):
        after = d.random.choice(triggers) if i else "before"
        faults.append(d.random.choice(MIXED)(d, after))
    return faults


def _any_crash(d: Draw, after: str) -> Fault:
    return d.crash(d.replica(d.shard()), 0.4 if after == "before" else 0.05, after)


def _any_pause(d: Draw, after: str) -> Fault:
    whom = d.host(d.shard()) if d.random.random() < 0.9 else Whom("scheduler")
    return d.pause(whom, 0.3, after)


def _any_slow(d: Draw, after: str) -> Fault:
    return Fault("slow", d.host(d.shard()), d.seconds(0.3), after, d.seconds(0.6))


def _any_link(d: Draw, after: str) -> Fault:
    shard = d.shard()
    ends = [d.host(shard), d.worker() if d.random.random() < 0.5 else d.host(shard)]
    if d.random.random() < 0.3:
        ends[1] = Whom("scheduler")
    d.random.shuffle(ends)
    kind = d.random.choice(["partition", "one-way cut", "lossy link", "slow link"])
    return Fault(kind, ends[0], d.seconds(0.3), after, d.seconds(1.2), ends[1])


def _any_worker(d: Draw, after: str) -> Fault:
    whom = d.worker()
    dice = d.random.random()
    if dice < 0.3:
        return Fault("join", whom, d.seconds(0.3), after)
    return d.crash(whom, 0.3, after) if dice < 0.6 else d.pause(whom, 0.3, after)


MIXED = (
    _any_crash,
    _any_crash,
    _any_crash,
    _any_pause,
    _any_pause,
    _any_slow,
    _any_link,
    _any_link,
    _any_worker,
)


# -- wide schedules: clocks, power, late copies, lives, groups that end ----------------------------


ON_MACHINES = 0.4  # how many of the schedules have several nodes on one machine
SHAPED = 0.4
WITH_KEEPERS = 0.15
WITH_DRAINED_STORE = 0.2
WITH_STORE_OUT_OF_REACH = 0.3
LONGER_THAN_ANYBODY_WAITS = 33.0  # seconds; see Timings.unavailable
KEEPER_BACK_SECONDS = 3.0  # when a store is in reach again that a server cannot do without


def surroundings(case: Case, random: Random, extra: tuple[str, ...]) -> dict[str, Any]:
    """What is unusual about a wide schedule besides its faults, as fields of it."""
    machines = random.randint(2, 4) if random.random() < ON_MACHINES else 0
    # A function changes weights, and no slots: what is in these would not agree.
    shaped = random.random() < SHAPED and not case.calls
    spares = random.choice((0, 0, 1, 2))
    more = tuple(name for i in range(spares) if (name := f"spare-{i}") not in extra)
    return {"machines": machines, "shaped": shaped, "extra": (*extra, *more)}


def widened(d: Draw, drawn: Schedule) -> tuple[Fault, ...]:
    """Have stories of these faults instead of a schedule's own, or before them."""
    stories = _wide_stories(d)
    faults = d.random.choice(stories)(d)
    if d.random.random() < 0.3:
        faults += d.random.choice(stories)(d)
    return tuple(faults if d.random.random() < 0.5 else [*faults, *drawn.faults])


def of_keepers(d: Draw) -> tuple[Fault, ...] | None:
    """For some, a story of what the store and the mailbox keep, in place of all others."""
    stories = [moved_from_a_slow_store] if d.case.recovery.durability.above.stores else []
    if isinstance(d.case.recovery.outage, Continue) and d.case.recovery.outage.buffer == "mailbox":
        stories += [mail_taken_twice]
    if not stories or d.random.random() >= WITH_KEEPERS:
        return None
    return tuple(d.random.choice(stories)(d))


def of_drained_store(d: Draw) -> tuple[Fault, ...] | None:
    """For some that have a store, the story of one that is drained, in place of all others."""
    stores = d.case.recovery.stores
    if not stores or d.random.random() >= WITH_DRAINED_STORE:
        return None
    return tuple(store_drained(d))


def of_store_out_of_reach(d: Draw) -> tuple[Fault, ...] | None:
    """For some that have several stores, a story of one that a server cannot reach, as above."""
    if d.case.recovery.stores < 2 or d.random.random() >= WITH_STORE_OUT_OF_REACH:
        return None
    return tuple(d.random.choice([store_out_of_reach, other_store_lost])(d))


def _wide_stories(d: Draw) -> list[Story]:
    durability = d.case.recovery.durability
    stories: list[Story] = [zombie_of_a_stepped_clock, stepped, scheduler_stands_still]
    stories += [late, late_after_a_loss, returning, twin, dark, dark] + [moved_and_lost] * 2
    if durability.above.reads == "any":
        stories += [head_is_told_late] * 4
    if isinstance(d.case.recovery.outage, Continue) and d.case.recovery.outage.buffer == "worker":
        stories += [held_too_long] * 2
    if durability.seconds is not None:
        stories += [moved_and_lost_later] * 4
    if durability.writes_checkpoints:
        stories += [resumed] * 4 + [dark_writer] * 2 + [slow_disk, restored_twice]
        if durability.scope == "all":
            stories += [gone_back_twice] * 2
    if d.case.recovery.stores:
        stories += [dark_store, restored_twice]
    if not isinstance(d.case.consistency, ASP):
        stories += [lost_on_entering, twin, late_worker_back]
    return stories


def _step(d: Draw, whom: Whom, back: bool, after: str = "before") -> Fault:
    which = d.random.uniform(0, 0.5) if back else d.random.uniform(0.5, 1)
    lasts = d.seconds(2.0) + 0.1 if d.random.random() < 0.5 else None
    return Fault("clock step", whom, d.seconds(0.3), after, lasts, which=round(which, 3))


def _power_loss(d: Draw, whom: Whom, within: float, after: str = "before") -> Fault:
    back = 0.1 + d.seconds(1.0)
    return Fault("power loss", whom, d.seconds(within), after, back, which=d.which())


def zombie_of_a_stepped_clock(d: Draw) -> list[Fault]:
    """Set the clock of a head back, cut it off, and have a worker not hear of its successor."""
    head, lasts = Whom("head", d.shard()), 1.0 + d.seconds(1.0)
    cut = Fault("partition", head, 0.02 + d.seconds(0.1), lasts=lasts, other=Whom("scheduler"))
    return [d.deaf(lasts + 0.5), _step(d, head, back=True), cut]


def stepped(d: Draw) -> list[Fault]:
    """Have any clock jump, and then lose a node."""
    whom = d.random.choice([d.host(d.shard()), d.worker(), Whom("scheduler")])
    jump = _step(d, whom, back=d.random.random() < 0.5)
    return [jump, d.crash(d.replica(d.shard()), 0.5)]


def scheduler_stands_still(d: Draw) -> list[Fault]:
    """Pause the scheduler for longer than a lease; nobody else has done anything wrong."""
    still = Fault("pause", Whom("scheduler"), d.seconds(0.4), lasts=0.5 + d.seconds(1.0))
    return [still, d.crash(d.replica(d.shard()), 0.5)] if d.random.random() < 0.3 else [still]


def late(d: Draw) -> list[Fault]:
    """Have what a node sends arrive again much later, while nodes are lost and come back."""
    whom = d.random.choice([d.host(d.shard()), d.worker(), Whom("scheduler")])
    echo = Fault("late copies", whom, d.seconds(0.2), lasts=0.5 + d.seconds(1.0))
    return [echo, *(d.crash(d.replica(d.shard()), 0.5) for _ in range(d.random.randint(1, 2)))]


def late_after_a_loss(d: Draw) -> list[Fault]:
    """Have a host given up that lives, and get what it was sent before when it starts over."""
    shard = d.shard()
    whom = d.host(shard)
    echo = Fault("late copies", whom, d.seconds(0.2), lasts=1.0)
    gone = Fault(
        "partition", whom, d.seconds(0.3), lasts=0.6 + d.seconds(0.8), other=Whom("scheduler")
    )
    return [echo, gone, d.change()] if d.random.random() < 0.5 else [echo, gone]


def returning(d: Draw) -> list[Fault]:
    """Have a worker crash, and come back under its name while old requests are under way."""
    whom, faults = d.worker(), []
    if d.random.random() < 0.6:
        faults += [Fault("late copies", whom, d.seconds(0.2), lasts=1.0)]
    for _ in range(d.random.randint(1, 2)):
        faults += [Fault("return", whom, d.seconds(0.4), lasts=0.02 + d.seconds(0.8))]
    return [*faults, d.crash(d.replica(d.shard()), 0.5)]


def late_worker_back(d: Draw) -> list[Fault]:
    """Pause a worker until it is given up, while its requests arrive again, and lose a server."""
    whom = d.worker()
    return [
        Fault("late copies", whom, d.seconds(0.2), lasts=1.5),
        Fault("pause", whom, d.seconds(0.3), lasts=0.5 + d.seconds(1.0)),
        d.crash(d.replica(d.shard()), 0.5),
    ]


def twin(d: Draw) -> list[Fault]:
    """Have a second process take a worker's name while the first one lives on for a while."""
    return [Fault("twin", d.worker(), d.seconds(0.5), lasts=0.05 + d.seconds(0.8))]


def dark(d: Draw) -> list[Fault]:
    """Have machines lose their power, one after the other or almost together."""
    first = _power_loss(d, d.replica(d.shard()), 0.6)
    if d.random.random() < 0.5:
        return [first]
    return [first, _power_loss(d, d.replica(d.shard()), 0.1 if d.random.random() < 0.5 else 1.0)]


def dark_writer(d: Draw) -> list[Fault]:
    """Have a server's machine lose its power when it has written, or while it writes."""
    shard, faults = d.shard(), []
    for _ in range(d.random.randint(1, 2)):
        if d.random.random() < 0.5:
            faults.append(_power_loss(d, Whom("head", shard), 0.05, "writing"))
        else:
            back, which = 0.1 + d.seconds(0.5), d.which()
            kind = "power loss in a write"
            whom, within = Whom("head", shard), d.seconds(0.3)
            faults.append(Fault(kind, whom, within, lasts=back, which=which))
    return faults


def dark_store(d: Draw) -> list[Fault]:
    """Have the machine of the store or the mailbox lose its power, and lose a server."""
    first = _power_loss(d, Whom(d.random.choice(["store", "mailbox"]), 0), 0.4)
    return [first, d.crash(Whom("head", d.shard()), 1.0)]


def slow_disk(d: Draw) -> list[Fault]:
    """Have writes take long, and then lose the server."""
    shard = d.shard()
    slow = Fault("slow disk", Whom("disk", shard), d.seconds(0.2), lasts=1.0, which=d.which())
    return [slow, d.crash(Whom("head", shard), 1.0)]


def restored_twice(d: Draw) -> list[Fault]:
    """Give a host up while it restores a shard, which goes on there when it has started over."""
    shard = d.shard()
    lasts = 0.5 + d.seconds(0.5)
    slow = Fault("slow disk", Whom("disk", shard), 0.0, lasts=2.0, which=d.which())
    cut = Fault(
        "partition",
        Whom("restorer"),
        d.seconds(0.01),
        "restoring",
        lasts,
        other=Whom("scheduler"),
    )
    return [slow, d.crash(Whom("head", shard), 0.4), cut]


def mail_taken_twice(d: Draw) -> list[Fault]:
    """Lose a shard, and cut off who applies its mail, so that another one begins anew."""
    shard = d.shard()
    slow = Fault("slow disk", Whom("disk", shard), 0.0, lasts=3.0, which=d.which())
    lost = Fault("crash", Whom("head", shard), 0.1 + d.seconds(0.3), lasts=0.3 + d.seconds(0.5))
    whom, scheduler, lasts = Whom("restorer"), Whom("scheduler"), 0.5 + d.seconds(0.5)
    cut = Fault("partition", whom, d.seconds(0.005), "mail taken", lasts, other=scheduler)
    return [slow, lost, cut]


def moved_from_a_slow_store(d: Draw) -> list[Fault]:
    """Move a shard while its newest updates are not stored yet, and lose who got it."""
    shard = d.shard()
    ends = Whom("head", shard), Whom("store", shard)
    slow = Fault("slow link", ends[0], d.seconds(0.2), lasts=1.0, other=ends[1])
    moved = Fault("drain", Whom("head", shard), d.seconds(0.1))
    moments = ["extending", "configuring", "moved"]
    return [slow, moved, d.crash(Whom("newcomer"), 0.1, d.random.choice(moments))]


def store_drained(d: Draw) -> list[Fault]:
    """Drain a store, and lose a server, or also a store, at any moment while another one is filled.

    Those that are drained come first in the table, and the one that is filled last.
    """
    stores, shard = d.case.recovery.stores, d.shard()
    head, filled = Whom("head", shard), Whom("store", stores)
    moments = ["before", "configuring", "stored", "stored"]
    faults = [Fault("drain", Whom("store", d.random.randrange(stores)), d.seconds(0.4))]
    if d.random.random() < 0.6:
        kinds = ["slow link", "partition"]
        kind, lasts, which = d.random.choice(kinds), 0.1 + d.seconds(0.6), d.which()
        late = d.seconds(0.005)
        faults.append(Fault(kind, head, late, "configuring", lasts, filled, which))
    faults.append(d.crash(head, 0.1, d.random.choice(moments)))
    if d.random.random() < 0.4:
        lost = Whom("store", d.random.randint(0, stores))
        back = 0.02 + d.seconds(0.6)  # else the drained one could not be done without
        faults.append(Fault("crash", lost, d.seconds(0.2), d.random.choice(moments), back))
    if d.random.random() < 0.4:
        faults.append(d.crash(Whom("head", d.shard()), 0.3, "node back"))
    return faults


def store_out_of_reach(d: Draw) -> list[Fault]:
    """Cut a server off from a store or mailbox for long, and perhaps lose it."""
    head, number = Whom("head", d.shard()), d.random.randrange(d.case.recovery.stores)
    role = "store" if d.random.random() < 0.8 else "mailbox"
    lasts, keeper = LONGER_THAN_ANYBODY_WAITS, Whom(role, number)
    cut = Fault("partition", keeper, d.seconds(0.5), lasts=lasts, other=head)
    lost = Fault("crash", head, d.seconds(0.3), lasts=0.02 + d.seconds(0.3))
    return d.random.choice([[cut], [cut, lost], [cut, lost], [lost, cut, lost]])


def other_store_lost(d: Draw) -> list[Fault]:
    """Cut a server off from one store, and lose the other one, and then the server."""
    head, cut_off = Whom("head", d.shard()), d.random.randrange(2)
    lasts = KEEPER_BACK_SECONDS - 1.0 + d.seconds(1.0)
    cut = Fault("partition", Whom("store", cut_off), d.seconds(0.3), lasts=lasts, other=head)
    back = 0.02 + d.seconds(0.3)
    lost = Fault("crash", Whom("store", 1 - cut_off), 0.0, lasts=back)
    server = Fault("crash", head, d.seconds(0.1), lasts=0.02 + d.seconds(0.3))
    if d.random.random() < 0.5:  # the other one alone has what is acked
        return [cut, replace(lost, delay=1.1 + d.seconds(0.8)), server]
    return [replace(lost, delay=d.seconds(0.5)), replace(cut, delay=d.seconds(0.3)), server]


def moved_and_lost(d: Draw) -> list[Fault]:
    """Move replicas, and lose who got them, and perhaps who had them."""
    faults = [d.change()]
    for _ in range(d.random.randint(1, 2)):
        whom = Whom(d.random.choice(["head", "tail", "newcomer", "source"]), d.shard())
        lose = d.crash if d.random.random() < 0.5 else partial(_power_loss, d)
        faults.append(lose(whom, 0.05, d.random.choice(["extending", "configuring", "moved"])))
    return faults


def moved_and_lost_later(d: Draw) -> list[Fault]:
    """Move replicas, and lose who got one when what was pushed before should be saved."""
    lost = d.crash(Whom("newcomer"), 0.5, "moved")
    return [d.change(), replace(lost, delay=round(lost.delay + 0.3, 3))]


def gone_back_twice(d: Draw) -> list[Fault]:
    """Have all shards go back, and again, because one finds its part of the cut damaged."""
    damaged = d.shard()
    lost = (damaged + 1) % d.case.shards
    flip = Fault("bit flip", Whom("disk", damaged), 0.2 + d.seconds(0.4), which=d.which())
    return [d.deaf(3.0), flip, replace(d.crash(Whom("head", lost), 0.05), after="before")]


def held_too_long(d: Draw) -> list[Fault]:
    """Have a worker hold updates back of a shard that is down, and be given up until it is up."""
    shard, after, lasts = d.shard(), 0.1 + d.seconds(0.2), 0.6 + d.seconds(0.6)
    back = 0.3 + d.seconds(0.3)
    lost = [
        Fault("crash", Whom("head", shard), d.seconds(0.3), lasts=back),
        Fault("crash", Whom("tail", shard), 0.0, lasts=back),
    ]
    return [*lost[-d.replicas :], Fault("pause", d.worker(), round(after, 3), "before", lasts)]


def head_is_told_late(d: Draw) -> list[Fault]:
    """Have a head learn late of what is committed, and then be the one that is read from."""
    shard = d.shard()
    ends = Whom("middle", shard), Whom("head", shard)
    slow = Fault("slow link", ends[0], d.seconds(0.3), lasts=1.0, other=ends[1])
    return [slow, d.crash(Whom("tail", shard), 0.3)]


def lost_on_entering(d: Draw) -> list[Fault]:
    """Have a worker's machine lose its power as it begins to take part."""
    join = Fault("join", d.worker(), d.seconds(0.3))
    lost = Fault("power loss", Whom("entrant"), d.seconds(0.02), "before", 2.5)
    return [join, lost]


def resumed(d: Draw) -> list[Fault]:
    """Have the whole group end, and go on from its checkpoints; with it, nodes are lost."""
    faults = []
    for _ in range(d.random.choice((1, 1, 2))):
        if d.random.random() < 0.5:
            faults.append(d.random.choice([returning, one_dark, twin])(d)[0])
        whole, back = Whom("group"), 0.02 + d.seconds(0.5)
        faults.append(Fault("resume", whole, 0.1 + d.seconds(0.8), lasts=back, which=d.which()))
    return [*faults, d.crash(d.replica(d.shard()), 0.8)] if d.random.random() < 0.5 else faults


def one_dark(d: Draw) -> list[Fault]:
    """Have one machine lose its power."""
    return [_power_loss(d, d.replica(d.shard()), 0.5)]


# -- machines with monitors ------------------------------------------------------------------------


# A process that is busy for less than the patience must cost nothing, whatever its clock.
LONGEST_BUSY = 0.85 * TIMINGS.patience
LONGEST_STANDSTILL = 0.95 * STANDSTILL * TIMINGS.lease


def watched(d: Draw, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Put one to three of these stories among the faults of a schedule, or in their place."""
    stories = _watched_stories(d)
    new: list[Fault] = []
    for _ in range(d.random.randint(1, 3)):
        new += d.random.choice(stories)(d)
    dice = d.random.random()
    if dice < 0.4:
        return tuple(new)
    return (*new, *faults) if dice < 0.7 else (*faults, *new)


def _watched_stories(d: Draw) -> list[Story]:
    stories: list[Story] = [busy_server, busy_server, busy_and_lost, stopped, stopped_and_back]
    stories += [unforeseen] * 4 + [
        slow,
        monitor_lost,
        standstill,
        everyone_busy,
        busy_scheduler,
        busy_too_long,
    ]
    if not isinstance(d.case.consistency, ASP):
        stories += [busy_worker] * 3
    if isinstance(d.case.recovery.durability, NoDurability):
        stories += [busy_too_long] * 4
    if d.replicas > 1:
        stories += [replicas_stopped, busy_successor] * 2
    if d.case.recovery.stores:
        stories += [busy_store] * 2
    return stories


def _busy(d: Draw, whom: Whom, within: float = 0.3) -> Fault:
    return Fault("busy", whom, d.seconds(within), lasts=0.05 + d.seconds(LONGEST_BUSY - 0.05))


def _stopped(d: Draw, whom: Whom, within: float = 0.3) -> Fault:
    return Fault("pause", whom, d.seconds(within), lasts=2 * TIMINGS.stopped + d.seconds(2.0))


def busy_server(d: Draw) -> list[Fault]:
    """Keep a server busy, perhaps for much longer than a lease."""
    return [_busy(d, d.host(d.shard()))]


def busy_worker(d: Draw) -> list[Fault]:
    """Keep a worker busy for which others have to wait, or two."""
    return [_busy(d, d.worker()) for _ in range(d.random.randint(1, 2))]


def busy_store(d: Draw) -> list[Fault]:
    """Keep the store busy, and perhaps lose a server meanwhile."""
    shard = d.shard()
    busy = _busy(d, Whom("store", shard))
    return [busy] if d.random.random() < 0.5 else [busy, d.crash(Whom("head", shard), 0.3)]


def busy_scheduler(d: Draw) -> list[Fault]:
    """Keep the scheduler busy, and a server or worker too."""
    whom = d.host(d.shard()) if d.random.random() < 0.5 else d.worker()
    return [_busy(d, Whom("scheduler")), _busy(d, whom, 0.1)]


def busy_too_long(d: Draw) -> list[Fault]:
    """Keep a process busy for longer than anybody waits for it."""
    whom = d.host(d.shard()) if d.random.random() < 0.5 else d.worker()
    return [Fault("busy", whom, d.seconds(0.3), lasts=TIMINGS.patience + 1.2 + d.seconds(0.5))]


def everyone_busy(d: Draw) -> list[Fault]:
    """Keep several processes busy at once, as on a machine that has too much to do."""
    hosts = [d.host(d.shard()) for _ in range(d.random.randint(2, 4))]
    return [_busy(d, whom, 0.05) for whom in [*hosts, d.worker()]]


def busy_and_lost(d: Draw) -> list[Fault]:
    """Keep a server busy, and lose it, another one or a worker meanwhile."""
    shard = d.shard()
    lost = d.random.choice([d.replica(shard), d.replica(d.shard()), d.worker()])
    return [_busy(d, d.replica(shard)), d.crash(lost, 0.5)]


def busy_successor(d: Draw) -> list[Fault]:
    """Keep a tail busy for longer than a link may fail, and perhaps lose its head afterwards."""
    shard = d.shard()
    lasts = LONGEST_BUSY - d.seconds(0.4)
    busy = Fault("busy", Whom("tail", shard), d.seconds(0.2), lasts=lasts)
    return [busy] if d.random.random() < 0.5 else [busy, d.crash(Whom("head", shard), 1.5)]


def stopped(d: Draw) -> list[Fault]:
    """Stop any process for longer than that is waited for."""
    return [_stopped(d, d.random.choice([d.host(d.shard()), d.worker()]))]


def stopped_and_back(d: Draw) -> list[Fault]:
    """Have a process continue just when its monitor is about to kill it."""
    lasts = round(TIMINGS.stopped * (0.8 + 0.6 * d.random.random()), 3)
    return [Fault("pause", d.host(d.shard()), d.seconds(0.3), lasts=lasts)]


def replicas_stopped(d: Draw) -> list[Fault]:
    """Stop all replicas of a shard almost at once: none of them must be killed."""
    shard = d.shard()
    whom = [Whom("head", shard), Whom("middle", shard), Whom("tail", shard)]
    chosen = whom if d.replicas > 2 else [whom[0], whom[2]]
    return [_stopped(d, each, 0.03) for each in chosen]


def unforeseen(d: Draw) -> list[Fault]:
    """Have tasks of one to three processes raise, and perhaps lose a node."""
    faults = []
    for _ in range(d.random.randint(1, 3)):
        dice = d.random.random()
        whom = Whom("scheduler") if dice < 0.35 else d.host(d.shard())
        whom = d.worker() if dice > 0.8 else whom
        which = d.which()
        faults.append(Fault("exception", whom, d.seconds(0.4), which=which))
    if d.random.random() < 0.5:
        faults.insert(d.random.randint(0, len(faults)), d.crash(d.replica(d.shard()), 0.3))
    return faults


def slow(d: Draw) -> list[Fault]:
    """Have a server stopped and continued again and again: it is slow, not stopped."""
    return [Fault("slow", d.host(d.shard()), d.seconds(0.3), lasts=0.5 + d.seconds(1.0))]


def monitor_lost(d: Draw) -> list[Fault]:
    """End the monitor of a machine, and keep a process busy there, or stop it, or lose it."""
    whom = d.random.choice([d.host(d.shard()), d.worker()])
    then = d.random.choice([_busy(d, whom, 0.1), _stopped(d, whom, 0.1), d.crash(whom, 0.1)])
    lost = Fault("monitor lost", whom, d.seconds(0.3))
    return [lost, then] if d.random.random() < 0.5 else [then, lost]


def standstill(d: Draw) -> list[Fault]:
    """Pause the virtual machine of a head that is cut off just then, and its clock with it."""
    head, scheduler, lasts = Whom("head", d.shard()), Whom("scheduler"), 0.8 + d.seconds(0.8)
    deaf = Fault("one-way cut", scheduler, 0.0, lasts=lasts + 1.0, other=Whom("worker", 0))
    cut = Fault("partition", head, 0.0, lasts=lasts, other=scheduler)
    pause = Fault("standstill", head, d.seconds(0.3), lasts=LONGEST_STANDSTILL)
    return [d.deaf(lasts + 1.0, 0.1), deaf, cut, pause]
