"""The drawing of what came to the simulator later, from streams of random numbers of its own.

Wide schedules have clocks that jump, machines that lose their power, requests that arrive long
after they were sent, workers that come back under their names, disks that are slow, and groups that
end as a whole and go on from their checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from dps.core.consistency import ASP
from dps.core.outage import Continue
from dps.sim.schedules.schedule import Fault, Kind, Role, Schedule, Trigger, Whom
from dps.sim.schedules.strategies import Case

if TYPE_CHECKING:
    from dps.sim.schedules.stories import Draw


Story = Callable[["Draw"], list[Fault]]

ON_MACHINES = 0.4  # how many of the schedules have several nodes on one machine
SHAPED = 0.4
WITH_KEEPERS = 0.15
WITH_DRAINED_STORE = 0.2
WITH_STORE_OUT_OF_REACH = 0.3
LONGER_THAN_ANYBODY_WAITS = 33.0  # seconds; see Timings.unavailable


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
    stories = _stories(d)
    faults = d.random.choice(stories)(d)
    if d.random.random() < 0.3:
        faults += d.random.choice(stories)(d)
    return tuple(faults if d.random.random() < 0.5 else [*faults, *drawn.faults])


def of_keepers(d: Draw) -> tuple[Fault, ...] | None:
    """For some, a story of what the store and the mailbox keep, in place of all others."""
    stories = [moved_from_a_slow_store] if d.case.recovery.durability.needs_store else []
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


def _stories(d: Draw) -> list[Story]:
    durability = d.case.recovery.durability
    stories: list[Story] = [zombie_of_a_stepped_clock, stepped, scheduler_stands_still]
    stories += [late, late_after_a_loss, returning, twin, dark, dark] + [moved_and_lost] * 2
    if durability.reads == "any":
        stories += [head_is_told_late] * 4
    if isinstance(d.case.recovery.outage, Continue) and d.case.recovery.outage.buffer == "worker":
        stories += [held_too_long] * 2
    if durability.seconds is not None:
        stories += [moved_and_lost_later] * 4
    if durability.writes_checkpoints:
        stories += [resumed] * 4 + [dark_writer] * 2 + [slow_disk, restored_twice]
        if durability.restores_together:
            stories += [gone_back_twice] * 2
    if d.case.recovery.needs_store:
        stories += [dark_store, restored_twice]
    if not isinstance(d.case.consistency, ASP):
        stories += [lost_on_entering, twin, late_worker_back]
    return stories


def _step(d: Draw, whom: Whom, back: bool, after: Trigger = "before") -> Fault:
    which = d.random.uniform(0, 0.5) if back else d.random.uniform(0.5, 1)
    lasts = d.seconds(2.0) + 0.1 if d.random.random() < 0.5 else None
    return Fault("clock step", whom, d.seconds(0.3), after, lasts, which=round(which, 3))


def _power_loss(d: Draw, whom: Whom, within: float, after: Trigger = "before") -> Fault:
    back = 0.1 + d.seconds(1.0)
    return Fault("power loss", whom, d.seconds(within), after, back, which=_which(d))


def _which(d: Draw) -> float:
    return round(d.random.random(), 3)


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
            back, which = 0.1 + d.seconds(0.5), _which(d)
            kind: Kind = "power loss in a write"
            whom, within = Whom("head", shard), d.seconds(0.3)
            faults.append(Fault(kind, whom, within, lasts=back, which=which))
    return faults


def dark_store(d: Draw) -> list[Fault]:
    """Have the machine of the store or the mailbox lose its power, and lose a server."""
    roles: list[Role] = ["store", "mailbox"]
    first = _power_loss(d, Whom(d.random.choice(roles), 0), 0.4)
    return [first, d.crash(Whom("head", d.shard()), 1.0)]


def slow_disk(d: Draw) -> list[Fault]:
    """Have writes take long, and then lose the server."""
    shard = d.shard()
    slow = Fault("slow disk", Whom("disk", shard), d.seconds(0.2), lasts=1.0, which=_which(d))
    return [slow, d.crash(Whom("head", shard), 1.0)]


def restored_twice(d: Draw) -> list[Fault]:
    """Give a host up while it restores a shard, which goes on there when it has started over."""
    shard = d.shard()
    lasts = 0.5 + d.seconds(0.5)
    slow = Fault("slow disk", Whom("disk", shard), 0.0, lasts=2.0, which=_which(d))
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
    slow = Fault("slow disk", Whom("disk", shard), 0.0, lasts=3.0, which=_which(d))
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
    moments: list[Trigger] = ["extending", "configuring", "moved"]
    return [slow, moved, d.crash(Whom("newcomer"), 0.1, d.random.choice(moments))]


def store_drained(d: Draw) -> list[Fault]:
    """Drain a store, and lose a server, or also a store, at any moment while another one is filled.

    Those that are drained come first in the table, and the one that is filled last.
    """
    stores, shard = d.case.recovery.stores, d.shard()
    head, filled = Whom("head", shard), Whom("store", stores)
    moments: list[Trigger] = ["before", "configuring", "stored", "stored"]
    faults = [Fault("drain", Whom("store", d.random.randrange(stores)), d.seconds(0.4))]
    if d.random.random() < 0.6:
        kinds: list[Kind] = ["slow link", "partition"]
        kind, lasts, which = d.random.choice(kinds), 0.1 + d.seconds(0.6), _which(d)
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
    role: Role = "store" if d.random.random() < 0.8 else "mailbox"
    cut = _out_of_reach(d, Whom(role, number), head, 0.5, LONGER_THAN_ANYBODY_WAITS)
    lost = Fault("crash", head, d.seconds(0.3), lasts=0.02 + d.seconds(0.3))
    return d.random.choice([[cut], [cut, lost], [cut, lost], [lost, cut, lost]])


def other_store_lost(d: Draw) -> list[Fault]:
    """Cut a server off from one store, and lose the other one, and then the server."""
    head, cut_off = Whom("head", d.shard()), d.random.randrange(2)
    cut = _out_of_reach(d, Whom("store", cut_off), head, 0.3, 2.0 + d.seconds(1.0))
    back = 0.02 + d.seconds(0.3)
    lost = Fault("crash", Whom("store", 1 - cut_off), 0.0, lasts=back)
    server = Fault("crash", head, d.seconds(0.1), lasts=0.02 + d.seconds(0.3))
    if d.random.random() < 0.5:  # the other one alone has what is acked
        return [cut, replace(lost, delay=1.1 + d.seconds(0.8)), server]
    return [replace(lost, delay=d.seconds(0.5)), replace(cut, delay=d.seconds(0.3)), server]


def _out_of_reach(d: Draw, keeper: Whom, head: Whom, within: float, lasts: float) -> Fault:
    return Fault("partition", keeper, d.seconds(within), lasts=lasts, other=head)


def moved_and_lost(d: Draw) -> list[Fault]:
    """Move replicas, and lose who got them, and perhaps who had them."""
    moments: list[Trigger] = ["extending", "configuring", "moved"]
    roles: list[Role] = ["head", "tail", "newcomer", "source"]
    faults = [d.change()]
    for _ in range(d.random.randint(1, 2)):
        whom = Whom(d.random.choice(roles), d.shard())
        lose = d.crash if d.random.random() < 0.5 else _lose_power(d)
        faults.append(lose(whom, 0.05, d.random.choice(moments)))
    return faults


def moved_and_lost_later(d: Draw) -> list[Fault]:
    """Move replicas, and lose who got one when what was pushed before should be saved."""
    lost = d.crash(Whom("newcomer"), 0.5, "moved")
    return [d.change(), replace(lost, delay=round(lost.delay + 0.3, 3))]


def _lose_power(d: Draw) -> Callable[[Whom, float, Trigger], Fault]:
    return lambda whom, within, after: _power_loss(d, whom, within, after)


def gone_back_twice(d: Draw) -> list[Fault]:
    """Have all shards go back, and again, because one finds its part of the cut damaged."""
    damaged = d.shard()
    lost = (damaged + 1) % d.case.shards
    flip = Fault("bit flip", Whom("disk", damaged), 0.2 + d.seconds(0.4), which=_which(d))
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
        faults.append(Fault("resume", whole, 0.1 + d.seconds(0.8), lasts=back, which=_which(d)))
    return [*faults, d.crash(d.replica(d.shard()), 0.8)] if d.random.random() < 0.5 else faults


def one_dark(d: Draw) -> list[Fault]:
    """Have one machine lose its power."""
    return [_power_loss(d, d.replica(d.shard()), 0.5)]
