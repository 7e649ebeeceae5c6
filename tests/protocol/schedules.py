"""Owns random schedules of the counter workload: who fails when, under which recovery strategy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

import fsspec

from dps.core.consistency import ASP, Consistency
from dps.core.recovery import Chain, Checkpoint, Recovery, SharedStore, Wait, with_checkpoint_path
from dps.core.rules import SGD
from dps.events import Detected, Event
from dps.protocol import replica
from dps.protocol.group import Group
from dps.sim.counting import (
    CountingWorker,
    Tally,
    Violation,
    check,
    counters,
    require,
    settled,
    zeros,
)
from dps.sim.loop import run
from dps.sim.network import Network, Weather
from dps.sim.world import COORDINATOR, World
from tests.protocol.worlds import TIMINGS

PUSHES = 10
WORK = (0.02, 0.2)
HORIZON = 60.0
DELAYS = ((0.0002, 0.005), (0.002, 0.02))
LOSSES = {"train": 0.04, "replicate": 0.04, "store": 0.04, "control": 0.02}

Story = Callable[["Schedule"], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """A recovery strategy, and what a schedule of it looks like."""

    recovery: Recovery
    consistency: Consistency = field(default_factory=ASP)
    shards: int = 2
    workers: int = 3
    think: float = 0.04

    @property
    def interval(self) -> float:
        """How many acked updates one restoration may cost."""
        match self.recovery.durability:
            case Checkpoint(every=every) if every is not None:
                return every
            case SharedStore() | Chain():
                return 0
            case _:
                return float("inf")

    @property
    def lasting(self) -> bool:
        return isinstance(self.recovery.durability, Chain | SharedStore)


class Schedule:
    """One run of a case with the faults that its seed draws."""

    def __init__(self, case: Case, group: Group, random: Random) -> None:
        lossy = random.random() < 0.4
        weather = Weather(random.choice(DELAYS), LOSSES if lossy else {})
        self.random = random
        self.case = case
        self.network = Network(random, weather)
        self.world = World(group, zeros(group.layout), self.network, random)
        self.tally = Tally(case.shards)
        self.detected = asyncio.Event()
        self.world.watchers.append(self._watch)
        self.story = self.draw_story()
        self._workers = 0

    async def run(self) -> None:
        """Train while things fail; then everything that was promised must hold."""
        await self.world.start()
        workers = [self.worker() for _ in range(self.case.workers)]
        training = [w.process.run(w.train(self.random, self.case.think)) for w in workers]
        if self.random.random() < 0.3:
            training += await self._replace_worker(workers)
        faults = asyncio.create_task(self.story(self))
        await self._ended([*training, faults])
        self.network.weather = Weather()
        table = await settled(self.world, HORIZON)
        check(self.world, table, self.tally, self.case.interval, self.case.lasting)

    def worker(self) -> CountingWorker:
        first = self._workers * PUSHES
        self._workers += 1
        name = f"worker-{self._workers - 1}"
        cells = range(first, first + PUSHES)
        return CountingWorker(self.world, name, cells, self.tally, self.linear)

    @property
    def linear(self) -> bool:
        """Whether reads show the latest weights: a zombie, or a worker on its own, shows others."""
        waits = isinstance(self.case.recovery.outage, Wait)
        return self.case.lasting and waits and self.story is not zombie

    def draw_story(self) -> Story:
        replicas = self.case.recovery.durability.replicas
        stories: list[Story] = [one, one_after_another, during_return]
        if self.case.lasting:
            stories += [zombie]  # without leases, only these fence off a server that lives on
        if replicas > 1:
            stories += [newcomer, behind]
        if replicas > 2:
            stories += [two_at_once, during_recovery, source_of_copy]
        return self.random.choice(stories)

    # -- what stories are made of ----------------------------------------------------------------

    def shard(self) -> int:
        return self.random.randrange(self.case.shards)

    async def chain(self, shard: int) -> list[str]:
        """Names of the shard's replicas, from head to tail, once it is whole."""
        while True:
            table = await self.world.complete()
            names = [self.world.name_of(member) for member in table.views[shard].chain]
            if all(names):
                return names
            await asyncio.sleep(0.01)  # a loss is not known yet

    def crash(self, name: str) -> None:
        if self.world.is_up(name):
            self.detected.clear()
            self.world.crash(name, self.random.uniform(0.02, 0.6))

    async def pause(self, longest: float) -> None:
        await asyncio.sleep(self.random.uniform(0, longest))

    async def back(self, name: str) -> None:
        """Wait until there is a node of that name again."""
        while not self.world.is_up(name):
            await asyncio.sleep(0.001)

    # -- the rest --------------------------------------------------------------------------------

    async def _replace_worker(self, workers: list[CountingWorker]) -> list[asyncio.Task[None]]:
        """Crash a worker somewhere in its training, and have another one join."""
        await self.pause(0.4)
        self.world.crash(workers[0].name)
        late = self.worker()
        return [late.process.run(late.train(self.random, self.case.think))]

    async def _ended(self, tasks: list[asyncio.Task[None]]) -> None:
        done, hanging = await asyncio.wait(tasks, timeout=HORIZON)
        require(not hanging, f"still running after {HORIZON:g} s: {len(hanging)}")
        for task in done:
            error = None if task.cancelled() else task.exception()
            require(error is None, f"a worker failed: {error!r}")

    def _watch(self, event: Event) -> None:
        if isinstance(event, Detected):
            self.detected.set()


async def one(s: Schedule) -> None:
    """Lose any one node of a shard."""
    shard = s.shard()
    await s.pause(0.4)
    s.crash(s.random.choice(await s.chain(shard)))


async def one_after_another(s: Schedule) -> None:
    """Lose nodes of the same shard, each when the one before has been replaced."""
    shard = s.shard()
    for _ in range(s.random.randint(2, 3)):
        await s.pause(0.2)
        s.crash(s.random.choice(await s.chain(shard)))
        await asyncio.sleep(0.05)


async def zombie(s: Schedule) -> None:
    """Have a head taken for lost that lives and serves, and a worker that does not hear of it."""
    shard = s.shard()
    await s.pause(0.3)
    name = (await s.chain(shard))[0]
    for source, target in ((name, "scheduler"), ("scheduler", name), ("scheduler", "worker-1")):
        s.network.cut(source, target)
    await s.world.bring_up([f"spare-{shard}"])
    await s.pause(3 * TIMINGS.lease)
    s.network.heal()
    s.crash((await s.chain(shard))[0])


async def during_return(s: Schedule) -> None:
    """Lose a node, then the one that takes its place, while it is brought into service."""
    await s.pause(0.4)
    name = (await s.chain(s.shard()))[-1]
    s.crash(name)
    await s.back(name)
    await s.pause(0.05)
    s.crash(name)


async def newcomer(s: Schedule) -> None:
    """Lose the head, then the replica that is being added at the tail."""
    await s.pause(0.4)
    name = (await s.chain(s.shard()))[0]
    s.crash(name)
    await s.back(name)
    await s.pause(0.05)
    s.crash(name)


async def behind(s: Schedule) -> None:
    """Lose a head when its successor is far behind it."""
    shard = s.shard()
    await s.pause(0.3)
    head, successor, *_ = await s.chain(shard)
    s.network.slow(head, successor, 0.1)
    await asyncio.sleep(s.random.uniform(0.05, 0.3))
    s.crash(head)
    s.network.slow(head, successor, 0.005)


async def two_at_once(s: Schedule) -> None:
    """Lose all replicas of a shard but one, almost together."""
    shard = s.shard()
    await s.pause(0.4)
    chain = await s.chain(shard)
    for name in s.random.sample(chain, len(chain) - 1):
        s.crash(name)
        await s.pause(0.03)


async def during_recovery(s: Schedule) -> None:
    """Lose a node, and another one as soon as the coordinator has noticed."""
    shard = s.shard()
    await s.pause(0.4)
    first, second = s.random.sample(await s.chain(shard), 2)
    s.crash(first)
    await s.detected.wait()
    await s.pause(0.02)
    s.crash(second)


async def source_of_copy(s: Schedule) -> None:
    """Lose a node, and the tail while it copies its state to the newcomer."""
    shard = s.shard()
    await s.pause(0.4)
    chain = await s.chain(shard)
    s.crash(chain[0])
    await s.back(chain[0])
    await s.pause(0.05)
    s.crash(chain[-1])


def simulate(name: str, case: Case, seed: int) -> list[tuple[float, str, str, str, str]]:
    """Run the schedule of a seed; return its trace. Raises `Violation` with what to repeat."""
    random = Random(f"{name}/{seed}")
    path = f"memory://schedules/{name}/{seed}"
    group = Group(
        "counting",
        counters(case.shards, PUSHES * (case.workers + 1)),
        SGD(1.0),
        case.consistency,
        with_checkpoint_path(case.recovery, path),
        COORDINATOR,
        TIMINGS,
    )

    async def main() -> list[tuple[float, str, str, str, str]]:
        schedule = Schedule(case, group, random)
        await schedule.run()
        return schedule.network.trace

    inline = random.choice([0, replica.INLINE_BYTES])
    work = random.choice(WORK)
    try:
        with patch.object(replica, "INLINE_BYTES", inline):
            return run(main, random, work)
    except (Violation, RuntimeError, TimeoutError) as error:
        raise Violation(f"{name}, seed {seed}: {error}") from error
    finally:
        with suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(path.removeprefix("memory:/"), recursive=True)
