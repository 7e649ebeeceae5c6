"""The running of one schedule: the counter workload under its faults, then every check.

A schedule that breaks a promise is shrunk to the faults that it takes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from dps.core.filters.chain import checked, checked_of_pulls
from dps.core.rules.rule import SGD, UpdateRule
from dps.core.rules.wrappers import EVERY
from dps.protocol import compression
from dps.protocol import executor as offload
from dps.protocol.group import Group
from dps.protocol.messages import Table
from dps.recovery.layered import Layered
from dps.recovery.manifest import find_saved, write_run
from dps.recovery.strategy import with_checkpoint_path
from dps.virtual.loop import Deadlock
from tests.simulator.checks.audit import Auditor, settled
from tests.simulator.checks.checkpoints import caught_up
from tests.simulator.disk import SCHEME, SimDisk, disk
from tests.simulator.injector import Injector, doomed_tasks
from tests.simulator.network import Line, Network, Violation, run
from tests.simulator.patches import patched, require
from tests.simulator.schedules.schedule import Fault, Schedule
from tests.simulator.schedules.strategies import JOINING, TIMINGS
from tests.simulator.workload import (
    CELLS,
    MARK,
    CountingWorker,
    Recorded,
    RowKeys,
    Tally,
    counters,
    mark,
    zeros,
)
from tests.simulator.world import COORDINATOR, World, run_of

HORIZON = 20.0  # seconds after the last fault within which everything must be well again
LEASED = 0.3  # seconds for each batch of leased data, besides
SKEW = 0.05
CALENDAR = 100.0
PATH = "counting"  # the disk on which checkpoints are
NAME = "g"  # of the group; of one that was brought up again, with the number of times
BLACKOUT = 0.75  # from here on, all machines lose their power when a group ends


@dataclass(slots=True)
class Record:
    """What came of a schedule.

    Attributes
    ----------
    violation
        The promise that was broken; None: every one was kept.
    struck
        How many faults of each kind were carried out.
    operations
        How many requests the workers made.
    trace
        All that happened, in order.
    """

    schedule: Schedule
    violation: Violation | None = None
    struck: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    trace: list[Line] = field(default_factory=list)


def simulate(schedule: Schedule) -> Record:
    """Run a schedule; the same one always comes to the same record."""
    record = Record(schedule)

    async def main() -> None:
        await Run(schedule, files, record).to_the_end()

    files = disk(PATH)
    random = Random(f"{schedule.case.name}/{schedule.seed}/work")
    threshold, offload.INLINE_BYTES = offload.INLINE_BYTES, 1 << 20 if schedule.inline else 0
    worth, compression.WORTH_CACHING = compression.WORTH_CACHING, 1
    try:
        run(main, random, schedule.work)
    except Violation as violation:
        record.violation = violation
    except (Deadlock, TimeoutError) as error:
        record.violation = Violation("stuck", str(error) or "the group did not start")
    finally:
        offload.INLINE_BYTES, compression.WORTH_CACHING = threshold, worth
        files.erase()
    return record


def shrink(record: Record) -> Record:
    """Leave out all that the violation does not need; return the record of what remains.

    Faults are left out in halves first, then one by one, then the bad weather. What remains must
    break the same kind of promise: with any other, it would be another story.
    """
    smallest = record
    part = len(record.schedule.faults)
    while part:
        begin = 0
        while begin < len(smallest.schedule.faults):
            count = len(smallest.schedule.faults)
            rest = [i for i in range(count) if not begin <= i < begin + part]
            less = _same(record, smallest.schedule.only(rest))
            if less is None:
                begin += part
            else:
                smallest = less
        part //= 2
    return _same(record, smallest.schedule.calmed()) or smallest


def _same(record: Record, schedule: Schedule) -> Record | None:
    """What comes of a schedule, if it breaks the same promise."""
    again = simulate(schedule)
    known = record.violation
    assert known is not None
    same = again.violation is not None and again.violation.kind == known.kind
    return again if same else None


class Run:
    """One run of a schedule."""

    def __init__(self, schedule: Schedule, files: SimDisk, record: Record) -> None:
        case = schedule.case
        recovery = with_checkpoint_path(case.recovery, f"{SCHEME}://{PATH}")
        rule: UpdateRule = Recorded(1.0) if schedule.shaped else SGD(1.0)
        cells = CELLS * (case.workers + JOINING)
        # Filters withhold dense parts only, and functions change no rows: these would not agree.
        tables = schedule.tables and not (case.filters or case.calls)
        layout = counters(case.shards, cells, tables, schedule.shaped)
        self._row_keys = RowKeys(layout, cells) if tables else None
        filters = checked({EVERY: case.filters} if case.filters else {}, layout.names, rule)
        group = Group(NAME, layout, rule, case.consistency, recovery, COORDINATOR, TIMINGS)
        functions = {MARK: mark} if case.calls else {}
        given = {EVERY: case.pull_filters} if case.pull_filters else {}
        of_pulls = checked_of_pulls(given, layout.names)
        group = replace(group, filters=filters, servers=case.servers, functions=functions)
        group = replace(group, pull_filters=of_pulls, placement=case.placement)
        self._case = case
        self._schedule = schedule
        self._record = record
        self._network = Network(self._stream("network"), schedule.weather)
        self._network.watchers.append(self._watch)
        self._network.reads_late = schedule.wide
        self._clocks = self._stream("clocks")
        self._files = files
        notices, places = self._stream("notices"), self._places
        self._world = World(group, zeros(layout), self._network, notices, **places)
        self._world.tells = schedule.told
        self._injector = Injector(self._world, files, schedule, self)
        self._tally = Tally(case.shards, lambda: self._auditor.mail_lost, case.leases)
        watched = self._world, schedule, self._tally, self._injector
        self._auditor = Auditor(*watched, self._row_keys)
        self._over = asyncio.Event()
        self._training: list[asyncio.Task[None]] = []
        self._workers = 0
        self._lives: Counter[str] = Counter()
        self._generation = 0
        self._absent: list[str] | None = None  # who is to come when the group is up again
        record.trace, record.struck = self._network.trace, self._injector.struck

    async def to_the_end(self) -> None:
        """Train while things fail; stop at the first promise that is broken."""
        with patched(doomed_tasks(), *self._auditor.patches()):
            work = asyncio.create_task(self._all())
            broken = self._network.broken
            broken.add_done_callback(lambda _: work.cancel())
            try:
                await asyncio.wait([work])
                if broken.done():
                    raise broken.result()
                work.result()
            finally:
                self._record.operations = self._tally.operations

    async def _all(self) -> None:
        if any(fault.kind == "resume" for fault in self._schedule.faults):
            self._leave_description(self._world)
        await self._world.start(self._schedule.extra)
        for _ in range(self._case.workers):
            self.join()
        await self._injector.run()
        await self._injector.heal()
        self._over.set()
        await self._injector.drained(HORIZON)
        await self._ended()
        await self._rest()  # what is due must be written although no update follows
        await self._push_once_more()
        self._auditor.check(await self._rest())

    async def _rest(self) -> Table:
        """Wait until all shards are served and at rest, and a layer has what is due."""
        if isinstance(durability := self._case.recovery.durability, Layered):
            await settled(self._world, HORIZON)
            await caught_up(self._world, durability.below, HORIZON)
        return await settled(self._world, HORIZON)

    def join(self) -> None:
        """Have one more worker join, if there are cells for it."""
        if self._workers < self._case.workers + JOINING - 1:
            self._start(self._next_name())

    def again(self, worker: str) -> None:
        """Start another process under the name of a worker."""
        self._tally.forgive_buffer(self._tally.own(worker))
        self._start(worker)

    async def resume(self, fault: Fault) -> World:
        """End the group, and bring it up from its checkpoints, as is done after a loss of all."""
        before, self._absent = self._world, self._world.workers
        before.end(leave_hosts=fault.which < 0.5)
        if fault.which >= BLACKOUT:
            for machine in before.machines:
                self._files.lose_power(machine)
        self._files.tear("")  # what a new group writes first is all that it has
        self._auditor.ended()
        await asyncio.sleep(fault.lasts or 0)
        saved = find_saved(f"{SCHEME}://{PATH}")
        self._generation += 1
        run = saved.run
        group = replace(
            before.group,
            name=f"{NAME}{self._generation}",
            layout=run.layout,
            rule=run.rule,
            consistency=run.consistency,
            recovery=run.recovery,
            filters=run.filters,
            servers=run.servers,
            pull_filters=run.pull_filters,
            placement=run.placement,
            incarnations=saved.incarnations,
        )
        notices = self._stream(f"notices {self._generation}")
        self._world = World(group, (), self._network, notices, saved.states, **self._places)
        self._world.tells = self._schedule.told
        self._auditor.resumed(self._world, saved)
        self._leave_description(self._world)
        await self._world.start(self._schedule.extra)
        absent, self._absent = self._absent, None
        for name in dict.fromkeys(absent):
            self._start(name)
        return self._world

    @property
    def _places(self) -> dict[str, Any]:
        return {"machines": self._schedule.machines, "watched": self._schedule.watched}

    def _leave_description(self, world: World) -> None:
        """Put beside the checkpoints what is needed to go on from them."""
        now = asyncio.get_running_loop().time()
        run = run_of(world.group, self._generation, now)
        world.driver.do(lambda: write_run(run))

    def _start(self, name: str) -> None:
        """Start a worker, as soon as there is a group for it."""
        if self._absent is None:
            self._training.append(self._worker(name))
        else:
            self._absent.append(name)

    def _next_name(self) -> str:
        self._workers += 1
        return f"worker-{self._workers - 1}"

    def _worker(self, name: str) -> asyncio.Task[None]:
        case, lives = self._case, self._lives
        lives[name] += 1
        purpose = name if lives[name] == 1 else f"{name}, life {lives[name]}"
        world, tally = self._world, self._tally
        worker = CountingWorker(world, name, tally, case, self._row_keys)
        training = worker.train(self._stream(purpose), self._schedule.think, self._over)
        task = worker.process.run(training)
        task.add_done_callback(self._ended_well)
        return task

    def _ended_well(self, task: asyncio.Task[None]) -> None:
        """Stop at once when a worker fails: the others may wait for it."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Violation):
            self._network.report(error)
        elif error is not None:
            self._network.report(Violation("failed", f"a worker failed: {error!r}"))

    async def _push_once_more(self) -> None:
        """When all is well again, a worker that comes gets its updates in."""
        self._training = [self._worker(self._next_name())]
        await self._ended()

    async def _ended(self) -> None:
        leased = len(self._case.leased)  # one worker that is left computes all of them
        within = HORIZON + LEASED * leased + max(CELLS, leased) * self._schedule.think
        _, hanging = await asyncio.wait(self._training, timeout=within)
        text = f"{len(hanging)} workers still not done {within:g} s after the faults"
        require(not hanging, "stuck", text)

    def _watch(self, what: str, source: str, target: str, message: str) -> None:
        if what == "up" and self._schedule.skewed:
            process = self._world.process(source)
            assert process is not None
            process.rate = self._clocks.uniform(1 - SKEW, 1 + SKEW)
            process.offset = self._clocks.uniform(-CALENDAR, CALENDAR)

    def _stream(self, purpose: str) -> Random:
        return Random(f"{self._case.name}/{self._schedule.seed}/{purpose}")
