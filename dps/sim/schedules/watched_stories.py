"""Faults of schedules whose machines have monitors: processes that are busy, and monitors that end.

They are drawn from a stream of random numbers of their own, so that a seed without them stands for
what it always did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dps.core.consistency import ASP
from dps.protocol.durability import NoDurability
from dps.protocol.lease import STANDSTILL
from dps.sim.schedules.schedule import Fault, Whom
from dps.sim.schedules.strategies import TIMINGS

if TYPE_CHECKING:
    from dps.sim.schedules.stories import Draw

Story = Callable[["Draw"], list[Fault]]

# A process that is busy for less than the patience must cost nothing, whatever its clock.
LONGEST_BUSY = 0.85 * TIMINGS.patience
LONGEST_STANDSTILL = 0.95 * STANDSTILL * TIMINGS.lease


def watched(d: Draw, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Put one to three of these stories among the faults of a schedule, or in their place."""
    stories = _stories(d)
    new: list[Fault] = []
    for _ in range(d.random.randint(1, 3)):
        new += d.random.choice(stories)(d)
    dice = d.random.random()
    if dice < 0.4:
        return tuple(new)
    return (*new, *faults) if dice < 0.7 else (*faults, *new)


def _stories(d: Draw) -> list[Story]:
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
    if d.case.recovery.needs_store:
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
        which = round(d.random.random(), 3)
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
