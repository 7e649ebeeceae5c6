"""The carrying out of faults: it waits until each is due, and finds out whom it hits."""

from __future__ import annotations

import asyncio
import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence, Set
from contextvars import copy_context
from random import Random
from types import coroutine
from typing import TYPE_CHECKING, Any

from dps.errors import CheckpointCorrupt
from dps.protocol.messages import Dismiss, Scale
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Endpoint
from dps.recovery.checkpoint_files import CheckpointFiles, Published
from dps.virtual.loop import here
from tests.simulator.disk import SCHEME, SimDisk
from tests.simulator.network import Process, Unforeseen, Violation, Weather
from tests.simulator.patches import Patch, require
from tests.simulator.schedules.schedule import Fault, Schedule, Whom
from tests.simulator.schedules.stories import LONGEST_BUSY
from tests.simulator.schedules.strategies import TIMINGS
from tests.simulator.world import World

if TYPE_CHECKING:
    from tests.simulator.simulate import Run

OF_NODES = {"crash", "suspicion", "power loss"}
PATIENCE = 1.0  # how long a fault waits for what it is to come after
WRITE_STEPS = 7  # how often a checkpoint that is written touches the disk, about
GLANCE = 0.01
SLOW_LINK = 0.1
LOSSY_LINK = 0.5
SLOWEST_WORK = 1.0
MAX_STEPS = 40  # of background tasks, until one of them raises
LATEST = 1.0  # seconds after its patience within which a busy process is given up
ROUNDING = 1e-6
BURST = (0.002, 0.01)
STANDSTILL = (0.02, 0.08)

# What a trace says when something happens that a fault may come after.
SIGNS = {
    ("event", "Detected"): "detected",
    ("up", ""): "node back",
    ("sent", "Install"): "copying",
    ("sent", "Extend"): "extending",
    ("sent", "Configure"): "configuring",
    ("event", "Moved"): "moved",
    ("event", "Promoted"): "promoted",
    ("event", "Restored"): "restored",
    ("write", ""): "writing",
    ("sent", "PutState"): "stored",
    ("sent", "PutSince"): "stored",
    ("sent", "TakeMail"): "mail taken",
    ("sent", "Restore"): "restoring",
    ("sent", "EnterWorker"): "entering",
}


class Injector:
    """Carries the faults of one schedule out.

    Parameters
    ----------
    crew
        Has workers come, and the group come up again.

    Attributes
    ----------
    struck
        How many faults of each kind were carried out; one that found nobody to hit was not.
    """

    def __init__(self, world: World, disk: SimDisk, schedule: Schedule, crew: Run) -> None:
        self.struck: Counter[str] = Counter()
        self._world = world
        self._network = world.network
        self._disk = disk
        self._schedule = schedule
        self._random = Random(f"{schedule.case.name}/{schedule.seed}/bursts")
        self._of_monitors = Random(f"{schedule.case.name}/{schedule.seed}/monitors cut off")
        self._crew = crew
        self._touched: set[str] = set()
        self._unseen: set[str] = set()
        self._troubled: Counter[str] = Counter()
        self._victim = ""
        self._copy = ("", "")
        self._restorer = ""
        self._entrant = ""
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._endings: list[asyncio.Task[None]] = []
        self._drains: list[asyncio.Task[None]] = []
        self._outside = copy_context()
        self._network.watchers.append(self._watch)
        disk.on_write = self._note_write
        shards = schedule.case.shards
        disk.may_be_damaged = lambda path: may_be_damaged(path, shards, self._world.cuts)

    def touched(self, process: Process) -> bool:
        """Whether a process may have been kept from its work, so that it may be taken for lost."""
        return bool(self._schedule.weather.loss) or process.address in self._touched

    def may_be_unseen(self, process: Process) -> bool:
        """Whether a fault may have kept the coordinator from seeing that a process lives."""
        return bool(self._schedule.weather.loss) or process.address in self._unseen

    def has_touched_all(self, addresses: Set[str]) -> bool:
        """Whether a fault has touched the processes at each of these addresses."""
        return self._touched >= addresses

    async def run(self) -> None:
        """Carry out one fault after the other; return when all that end have ended."""
        for fault in self._schedule.faults:
            await self._until_due(fault)
            if fault.kind == "resume":
                self._world = await self._crew.resume(fault)
            if fault.kind == "resume" or self._strike(fault):
                self.struck[fault.kind] += 1
                self._network.note("fault", str(fault.whom), str(fault.other or ""), fault.kind)
        for ending in self._endings:
            await ending

    async def heal(self) -> None:
        """End every fault, and bring up what is missing."""
        self._network.note("healed", "", "", "")
        self._network.weather = Weather(self._schedule.weather.delays)
        self._network.heal()
        self._world.resume_all()
        self._disk.repair()
        await self._world.bring_back_missing()

    async def drained(self, within: float) -> None:
        """Wait until every node is empty that was to be, and is shut down."""
        _, hanging = await asyncio.wait(self._drains, timeout=within) if self._drains else ((), ())
        require(not hanging, "stuck", f"{len(hanging)} nodes could not be drained")

    # -- when ------------------------------------------------------------------------------------

    async def _until_due(self, fault: Fault) -> None:
        if fault.after == "whole":
            await self._until_whole()
        elif fault.after != "before":
            sign = self._waiting[fault.after] = asyncio.get_running_loop().create_future()
            await asyncio.wait([sign], timeout=PATIENCE)
        await asyncio.sleep(fault.delay)

    async def _until_whole(self) -> None:
        until = asyncio.get_running_loop().time() + 2 * PATIENCE
        while asyncio.get_running_loop().time() < until:
            table = self._world.table
            members = [member for view in table.views for member in view.chain]
            if table.complete and all(self._world.name_of(member) for member in members):
                return
            await asyncio.sleep(GLANCE)

    def _note_write(self, path: str) -> None:
        """Some files have names that are never the same; their folders do."""
        self._network.note("write", posixpath.basename(posixpath.dirname(path)), "", "")

    def _watch(self, what: str, source: str, target: str, message: str) -> None:
        if message == "Install" and what == "sent":
            self._copy = (source, target)
        elif message == "Restore" and what == "sent":
            self._restorer = target
        elif message == "EnterWorker" and what == "sent":
            self._entrant = source
        if what == "up" and self._troubled[source] > 0:
            self._touch(source)
        trigger = SIGNS.get((what, message))
        sign = self._waiting.pop(trigger, None) if trigger else None
        if sign is not None and not sign.done():
            sign.set_result(None)

    # -- whom ------------------------------------------------------------------------------------

    def _name(self, whom: Whom | None) -> str:
        """The name of the process that is meant; "" if there is none now."""
        if whom is None:
            return ""
        match whom.role:
            case "worker":
                name = f"worker-{whom.number}"
            case "replacement":
                name = self._victim
            case "source" | "newcomer":
                name = self._copy[whom.role == "newcomer"]
            case "restorer":
                name = self._restorer
            case "entrant":
                name = self._entrant
            case "scheduler":
                name = "scheduler"
            case "store":
                name = self._named(_one_of(self._world.table.stores, whom.number))
            case "mailbox":
                name = self._named(_one_of(self._world.table.mailboxes, whom.number))
            case _:
                name = self._named(self._member(whom))
        return name if self._world.process(name) is not None else ""

    def _member(self, whom: Whom) -> Endpoint | None:
        chain = self._world.table.views[whom.number].chain
        if not chain:
            return None
        place = {"head": 0, "middle": len(chain) // 2, "tail": len(chain) - 1}
        return chain[place.get(whom.role, 0)]

    def _named(self, endpoint: Endpoint | None) -> str:
        return self._world.name_of(endpoint) if endpoint is not None else ""

    def _touch(self, *names: str, seen: bool = False) -> None:
        for name in names:
            process = self._world.process(name)
            if process is not None:
                self._touched.add(process.address)
                self._unseen |= set() if seen else {process.address}

    def _touch_machine(self, machine: str) -> None:
        """Take note that the monitor of a machine may not be heard of."""
        here = {process.address for process in self._world.on_machine(machine)}
        self._touched |= here
        self._unseen |= here

    def _is_seen(self, process: Process) -> bool:
        """Whether the coordinator hears of a process from its monitor, as long as that is well."""
        return process.machine in self._world.monitors and not self._network.is_any_cut(
            self._world.monitors[process.machine].process.name
        )

    # -- how -------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> bool:
        """Carry a fault out; return whether there was anybody to hit."""
        if fault.kind == "join":
            self._crew.join()
            return True
        if fault.kind == "scale":
            self._world.ask(Scale(fault.whom.number))
            return True
        if fault.whom.role == "disk":
            return self._strike_disk(fault)
        name = self._name(fault.whom)
        if not name or (name == "scheduler" and fault.kind in OF_NODES):
            return False
        if fault.other is not None:
            other = self._name(fault.other)
            return bool(other) and other != name and self._strike_link(fault, name, other)
        return self._strike_process(fault, name)

    def _strike_process(self, fault: Fault, name: str) -> bool:
        process = self._world.process(name)
        assert process is not None
        if fault.kind == "dismiss":
            self._world.ask(Dismiss(name))
            return True
        if fault.kind == "drain":
            self._drains.append(
                asyncio.create_task(self._drain(name), context=self._outside.copy())
            )
            return True
        if fault.kind == "clock step":  # which is no reason to give anybody up
            process.offset += fault.step
            self._at_the_end(fault, lambda: _set_back(process, fault.step))
            return True
        # A process that is busy for less than the patience is waited for: nothing may come of it.
        patient = fault.kind == "busy" and (fault.lasts or 0) < LONGEST_BUSY + ROUNDING
        seen = fault.kind in ("busy", "pause") and self._is_seen(process)
        if name != "scheduler" and not (patient and seen):
            self._touch(name, seen=seen)
        match fault.kind:
            case "busy":
                self._network.pause(process, busy=True)
                self._ends_with(self._busy(process, fault.lasts or 0))
            case "standstill":
                self._network.pause(process, clock_stands=True)
                self._at_the_end(fault, lambda: self._network.resume(process))
            case "exception":
                process.doomed_in = 1 + int(fault.which * MAX_STEPS)
            case "monitor lost":
                self._touch_machine(process.machine)
                return self._world.lose_monitor(process.machine)
            case "crash":
                self._crash(name, fault.lasts)
            case "power loss":
                self._lose_power(name, fault)
            case "power loss in a write":
                steps = int(fault.which * WRITE_STEPS)
                part = f"shard-{fault.whom.number}/"
                self._disk.crash_after(part, steps, lambda: self._lose_power(name, fault))
            case "late copies":
                self._network.echo(name)
                self._at_the_end(fault, lambda: self._network.echo(name, -1))
            case "return":
                self._world.crash(name)
                self._ends_with(self._later(fault.lasts or 0, lambda: self._crew.again(name)))
            case "twin":
                self._crew.again(name)
                self._touch(name)
                self._ends_with(self._later(fault.lasts or 0, lambda: self._end(process)))
            case "crash in a write":
                steps = int(fault.which * WRITE_STEPS)
                part = f"shard-{fault.whom.number}/"
                self._disk.crash_after(part, steps, lambda: self._crash(name, fault.lasts))
            case "suspicion":
                self._world.suspect(name)
            case "pause":
                self._network.pause(process)
                self._at_the_end(fault, lambda: self._network.resume(process))
            case "slow":
                self._ends_with(self._stutter(process, fault.lasts or 0))
        return True

    def _crash(self, name: str, back_after: float | None) -> None:
        if self._world.process(name) is None:
            return
        self._victim = name
        is_worker = name.startswith("worker")
        self._world.crash(name, None if is_worker else back_after)
        if not is_worker:
            self._ends_with(asyncio.sleep(back_after or 0))
        elif back_after is not None:
            self._ends_with(self._later(back_after, self._crew.join))

    def _lose_power(self, name: str, fault: Fault) -> None:
        """Have all on the machine of a node crash without a sign, and come back after a while."""
        world = self._world
        if world.process(name) is None:
            return
        self._victim = name
        machine, lost = world.lose_power(name)
        self._touched |= {process.address for process in lost}
        self._unseen |= {process.address for process in lost}
        self._disk.lose_power(machine, fault.which)
        self._ends_with(self._power_up(world, lost, fault.lasts or 0))

    async def _power_up(self, world: World, lost: list[Process], after: float) -> None:
        await asyncio.sleep(after)
        workers = [process for process in lost if process.name.startswith("worker")]
        if world is self._world:
            world.power_up(lost, [p.name for p in lost if p not in workers])
        for _ in workers:
            self._crew.join()

    def _end(self, process: Process) -> None:
        """End the process of a worker whose name another one has now."""
        if process.alive:
            self._world.crash_process(process)

    async def _drain(self, name: str) -> None:
        """Have a node emptied, and shut it down as soon as it is said to be."""
        host = self._world.endpoint(name)
        if not await self._world.drain(host):
            return
        table = self._world.table
        held = [view.shard for view in table.views if host in view.chain]
        keeps = host in (*table.stores, *table.mailboxes)
        if held or keeps:
            text = f"{name} is said to be empty, but has shards {held}, or keeps states: {keeps}"
            self._network.report(Violation("drained too early", text))
        elif self._world.name_of(host) == name:
            self._world.crash(name)

    def _strike_link(self, fault: Fault, name: str, other: str) -> bool:
        ends = [end for end in (name, other) if end != "scheduler"]
        self._touch(*ends)
        self._troubled.update(ends)
        undo: list[Callable[[], None]] = [lambda: self._troubled.subtract(ends)]
        network = self._network
        if "scheduler" in (name, other):
            undo += self._perhaps_cut_monitor(ends[0])
        match fault.kind:
            case "one-way cut":
                network.cut(name, other)
                undo.append(lambda: network.mend(name, other))
            case "partition":
                network.cut(name, other)
                network.cut(other, name)
                undo += [lambda: network.mend(name, other), lambda: network.mend(other, name)]
            case "lossy link":
                network.lose(name, other, LOSSY_LINK)
                undo.append(lambda: network.lose(name, other, 0.0))
            case "slow link":
                before = network.mean_delay(name, other)
                network.slow(name, other, SLOW_LINK * (1 + 4 * fault.which))
                undo.append(lambda: network.slow(name, other, min(before, SLOW_LINK)))
        for end in undo:
            self._at_the_end(fault, end)
        return True

    def _perhaps_cut_monitor(self, name: str) -> list[Callable[[], None]]:
        """Have a node's monitor out of the scheduler's reach as well; return how to undo that."""
        process = self._world.process(name)
        if process is None or process.machine not in self._world.monitors:
            return []
        if self._of_monitors.random() < 0.5:
            return []
        self._touch_machine(process.machine)
        monitor = self._world.monitors[process.machine].process.name
        self._network.cut(monitor, "scheduler")
        return [lambda: self._network.mend(monitor, "scheduler")]

    def _strike_disk(self, fault: Fault) -> bool:
        part = f"shard-{fault.whom.number}/"
        match fault.kind:
            case "full disk":
                self._disk.fill(part)
                self._at_the_end(fault, lambda: self._disk.fill(""))
            case "failed rename":
                self._disk.jam(part)
                self._at_the_end(fault, lambda: self._disk.jam(""))
            case "slow disk":
                self._network.work_takes(SLOWEST_WORK * (0.2 + 0.8 * fault.which))
                usual = self._schedule.work
                self._at_the_end(fault, lambda: self._network.work_takes(usual))
            case "torn write":
                self._disk.tear(part)
            case "bit flip":
                return self._disk.flip(part, fault.which)
        return True

    def _at_the_end(self, fault: Fault, undo: Callable[[], None]) -> None:
        if fault.lasts is not None:
            self._ends_with(self._later(fault.lasts, undo))

    def _ends_with(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a fault end with this; no process takes it along that crashes meanwhile."""
        self._endings.append(asyncio.create_task(work, context=self._outside.copy()))

    async def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        await asyncio.sleep(seconds)
        undo()

    async def _busy(self, process: Process, seconds: float) -> None:
        """Keep a process busy; after `patience`, other processes may stop waiting for it."""
        world, scheduler = self._world, self._world.process("scheduler")  # both end with the group
        stood = scheduler.stood if scheduler is not None else 0.0
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        waited = asyncio.get_running_loop().time() - began > TIMINGS.patience + LATEST
        undisturbed = scheduler is not None and scheduler.alive and scheduler.stood == stood
        undisturbed &= scheduler is not None and scheduler.paused_at is None
        # A late copy of a request is taken for a new one: the process seems to have been heard of.
        undisturbed &= not self.struck["late copies"]
        if waited and undisturbed and process.alive and process.busy and world.counts_on(process):
            text = f"{process.name} was busy for {seconds:g} s, and is waited for still"
            self._network.report(Violation("waited too long", text))
        self._network.resume(process)

    async def _stutter(self, process: Process, seconds: float) -> None:
        """Have a process run for moments only."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until and process.alive:
            self._network.pause(process)
            await asyncio.sleep(self._random.uniform(*STANDSTILL))
            self._network.resume(process)
            await asyncio.sleep(self._random.uniform(*BURST))


def _one_of(endpoints: Sequence[Endpoint], number: int) -> Endpoint | None:
    return endpoints[number % len(endpoints)] if endpoints else None


def _set_back(process: Process, step: float) -> None:
    process.offset -= step


# -- which checkpoints may be damaged --------------------------------------------------------------


Place = tuple[int, ...]


def may_be_damaged(path: str, shards: int, cuts: Collection[int] | None) -> bool:
    """Whether a group can go on without the checkpoint that a file belongs to.

    The one before it has to be whole: no more than two may be kept. Those of all shards make one,
    if shards go back together; and what there is of later ones has to be whole then, as one of
    these may become complete, and what is before this one be removed.

    Parameters
    ----------
    shards
        How many there are.
    cuts
        Those that shards may go back to together; None: each goes back by itself.
    """
    folder, name = posixpath.split(path)
    group, shard = posixpath.split(folder)
    fields = name.split(".")[0].split("-")  # after the index, a cut or a digest
    this = tuple(int(f[1:]) for f in (fields[:2] if cuts is None else fields[2:]))
    concerned = [int(shard.removeprefix("shard-"))] if cuts is None else range(shards)
    whole = [_whole(CheckpointFiles(f"{SCHEME}:/{group}", s, 1)) for s in concerned]
    places = {place for of_shard in whole for place in of_shard}
    earlier = [p for p in places if p < this and (cuts is None or p[0] in cuts)]
    later = [of_shard[p] for of_shard in whole for p in of_shard if p > this]
    return bool(earlier) and all(later) and all(s.get(max(earlier), False) for s in whole)


def _whole(files: CheckpointFiles) -> dict[Place, bool]:
    """Whether each checkpoint of a shard is whole, by its cut, or its epoch and index."""
    return {
        (f.epoch, f.index) if f.cut is None else (f.cut,): _is_whole(files, f)
        for f in files.published()
    }


def _is_whole(files: CheckpointFiles, found: Published) -> bool:
    try:
        files.read(found)
    except CheckpointCorrupt:
        return False
    return True


# -- tasks that raise ------------------------------------------------------------------------------


def doomed_tasks() -> Patch:
    """Have background tasks raise `Unforeseen` where their process is doomed to it.

    See `tests.simulator.network.Process.doomed_in`.
    """
    start = Tasks.start

    def start_doomed(self: Tasks, work: Coroutine[Any, Any, None]) -> Any:
        task = start(self, _run(work))
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
        return task

    return Patch(Tasks, "start", start_doomed)


async def _run(work: Coroutine[Any, Any, None]) -> None:
    await _driven(work)


@coroutine
def _driven(work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
    """Run a coroutine; after any of its waits, it raises if its process is doomed."""
    process = here.get()
    try:
        waits_for = work.send(None)
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001 - handed on, whatever it is
                waits_for = work.throw(error)
                continue
            if isinstance(process, Process) and process.doomed_in:
                process.doomed_in -= 1
                if not process.doomed_in:
                    process.doomed = True
                    waits_for = work.throw(Unforeseen(f"in {work!r}"))
                    continue
            waits_for = work.send(value)
    except StopIteration:
        return
    finally:
        work.close()
