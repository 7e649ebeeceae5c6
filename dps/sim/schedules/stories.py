"""Stories of what goes wrong together, and mixes of faults, as they are drawn for a schedule."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dps.sim.schedules.schedule import (
    Fault,
    Kind,
    Role,
    Trigger,
    Whom,
)
from dps.sim.schedules.strategies import Case

Story = Callable[["Draw"], list[Fault]]


class Draw:
    """What the faults of one schedule are drawn with."""

    def __init__(self, case: Case, random: Random) -> None:
        self.case = case
        self.random = random
        self.replicas = case.recovery.durability.replicas

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
        if self.case.recovery.needs_store:
            stories += [store_out]
        if self.case.recovery.durability.stores > 1:
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

    def replica(self, shard: int) -> Whom:
        """Any replica of a shard, by its role."""
        roles: list[Role] = ["head", "middle", "tail"]
        return Whom(self.random.choice(roles[: self.replicas]), shard)

    def worker(self) -> Whom:
        """Any worker."""
        return Whom("worker", self.random.randrange(self.case.workers))

    def host(self, shard: int) -> Whom:
        """Any node that serves for a shard."""
        if self.case.recovery.needs_store and self.random.random() < 0.3:
            roles: list[Role] = ["store", "mailbox"]
            return Whom(self.random.choice(roles), shard)
        return self.replica(shard)

    def crash(self, whom: Whom, within: float, after: Trigger = "before") -> Fault:
        """Have a process crash; in 1 of 20 it stays down."""
        back = 0.02 + self.seconds(0.6)
        lasts = None if self.random.random() < 0.05 else back
        return Fault("crash", whom, self.seconds(within), after, lasts)

    def change(self, after: Trigger = "before") -> Fault:
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

    def pause(self, whom: Whom, within: float, after: Trigger = "before") -> Fault:
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
    moments: list[Trigger] = ["copying", "extending", "configuring", "moved"]
    roles: list[Role] = ["source", "newcomer", "head", "tail"]
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
    kinds: list[Kind] = ["partition", "one-way cut"]
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
    kinds: list[Kind] = ["pause", "slow"]
    stall = Fault(d.random.choice(kinds), d.host(shard), d.seconds(0.3), lasts=d.seconds(0.5))
    return [stall, d.crash(d.replica(shard), 0.6)]


def late_worker(d: Draw) -> list[Fault]:
    """Lose a worker somewhere in its training, have another one join, and lose a node."""
    return [d.crash(d.worker(), 0.4), d.crash(d.replica(d.shard()), 0.3)]


def bad_disk(d: Draw) -> list[Fault]:
    """Have a disk fail, and then the server that counts on what is there."""
    shard = d.shard()
    kinds: list[Kind] = ["full disk", "failed rename", "torn write", "bit flip"]
    kind, which = d.random.choice(kinds), round(d.random.random(), 3)
    bad = Fault(kind, Whom("disk", shard), 0.1 + d.seconds(0.3), lasts=d.seconds(0.5), which=which)
    return [bad, d.crash(Whom("head", shard), 0.5)]


def torn_by_crash(d: Draw) -> list[Fault]:
    """Lose a server between two steps of writing a checkpoint, and perhaps the next one too."""
    whom, faults = Whom("head", d.shard()), []
    for _ in range(d.random.randint(1, 2)):
        which, back = round(d.random.random(), 3), 0.02 + d.seconds(0.3)
        faults.append(Fault("crash in a write", whom, d.seconds(0.3), lasts=back, which=which))
    return faults


def nothing_above(d: Draw) -> list[Fault]:
    """Lose every copy of a shard above the layer of checkpoints, almost together."""
    shard, durability = d.shard(), d.case.recovery.durability
    roles: list[Role] = ["tail", "head", "middle"]
    copies = [Whom(role, shard) for role in roles[: d.replicas]]
    if durability.needs_store:
        copies.insert(d.random.randint(0, 1), Whom("store", shard))
        copies += [Whom("store", shard + other) for other in range(1, durability.stores)]
    first, *others = copies
    return [d.crash(first, 0.6), *(d.crash(whom, 0.02) for whom in others)]


def nothing_above_and_bad_disk(d: Draw) -> list[Fault]:
    """Have a disk fail under a layer, then lose every copy above it; and again."""
    faults = [bad_disk(d)[0], *nothing_above(d)]
    return faults if d.random.random() < 0.5 else [*faults, *nothing_above(d)]


def layer_stuck(d: Draw) -> list[Fault]:
    """Have nothing written for a while, in which acks go on, and perhaps lose some copy above."""
    shard = d.shard()
    kinds: list[Kind] = ["full disk", "failed rename", "slow disk"]
    kind, which = d.random.choice(kinds), round(d.random.random(), 3)
    bad = Fault(kind, Whom("disk", shard), d.seconds(0.2), lasts=0.5 + d.seconds(1.0), which=which)
    return [bad, d.crash(d.host(shard), 0.5)] if d.random.random() < 0.5 else [bad]


def store_out(d: Draw) -> list[Fault]:
    """Have the store or a mailbox fail, stand still or be out of reach, and lose a server too."""
    shard = d.shard()
    roles: list[Role] = ["store", "mailbox"]
    whom, dice = Whom(d.random.choice(roles), shard), d.random.random()
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
    faults = [d.crash(_any_store(d), 0.5), d.crash(Whom("head", d.shard()), 0.05)]
    d.random.shuffle(faults)
    return faults


def store_after_store(d: Draw) -> list[Fault]:
    """Lose a store and, as soon as a new one is up, one that has what it lacks, and a server."""
    first, other = Whom("store", 0), Whom("store", 0)
    moments: list[Trigger] = ["node back", "configuring", "stored"]
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


def _any_store(d: Draw) -> Whom:
    return Whom("store", d.random.randrange(d.case.recovery.durability.stores))


def mix(d: Draw) -> list[Fault]:
    """One to four faults of any kinds."""
    triggers: list[Trigger] = ["before"] * 6
    triggers += ["detected", "node back", "copying", "configuring", "promoted", "restored", "whole"]
    durability = d.case.recovery.durability
    if durability.writes_checkpoints:
        triggers += ["writing"]
    if d.case.recovery.needs_store:
        triggers += ["stored", "mail taken"]
    faults = []
    for i in range(d.random.randint(1, 4)):
        after: Trigger = d.random.choice(triggers) if i else "before"
        faults.append(d.random.choice(MIXED)(d, after))
    return faults


def _any_crash(d: Draw, after: Trigger) -> Fault:
    return d.crash(d.replica(d.shard()), 0.4 if after == "before" else 0.05, after)


def _any_pause(d: Draw, after: Trigger) -> Fault:
    whom = d.host(d.shard()) if d.random.random() < 0.9 else Whom("scheduler")
    return d.pause(whom, 0.3, after)


def _any_slow(d: Draw, after: Trigger) -> Fault:
    return Fault("slow", d.host(d.shard()), d.seconds(0.3), after, d.seconds(0.6))


def _any_link(d: Draw, after: Trigger) -> Fault:
    kinds: list[Kind] = ["partition", "one-way cut", "lossy link", "slow link"]
    shard = d.shard()
    ends = [d.host(shard), d.worker() if d.random.random() < 0.5 else d.host(shard)]
    if d.random.random() < 0.3:
        ends[1] = Whom("scheduler")
    d.random.shuffle(ends)
    kind = d.random.choice(kinds)
    return Fault(kind, ends[0], d.seconds(0.3), after, d.seconds(1.2), ends[1])


def _any_worker(d: Draw, after: Trigger) -> Fault:
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
