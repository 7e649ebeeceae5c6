"""The invariants: what must hold whatever fails, checked while a schedule runs and at its end.

The auditor sees all processes at once. It is told of each state that a replica accepts and of each
event, knows which nodes were touched by a fault, and so can tell what a failure may cost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from dps.core.consistency import ASP
from dps.core.functions import CALLS
from dps.core.names import STORE_ROLES
from dps.core.shard import ShardState, Step, is_duplicate
from dps.core.updates import UpdateId
from dps.errors import DpsError, NotServing
from dps.events import (
    CheckpointRefused,
    CheckpointWritten,
    CutTaken,
    Detected,
    Event,
    Promoted,
    ReplicaAdded,
    Restored,
    TaskFailed,
    WorkerJoined,
    WorkerLeft,
)
from dps.protocol import wire
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.messages import Renewed, RenewLease, Restore, Table, View, Waiting
from dps.protocol.server.commit_log import CommitLog
from dps.protocol.server.replica import Replica
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.transport import Endpoint
from dps.recovery.durability import NoDurability
from dps.recovery.manifest import Saved
from dps.recovery.partial import PartialCheckpoint
from dps.recovery.worker_cache import WorkerCache
from dps.virtual.loop import here
from tests.simulator.checks.checkpoints import (
    Committed,
    LayerHistory,
    PartsHistory,
    changed,
    layering,
    now,
    numbers,
)
from tests.simulator.checks.placement import check_ring, placing
from tests.simulator.injector import Injector
from tests.simulator.network import Process, Unforeseen, Violation
from tests.simulator.patches import Patch, before, require
from tests.simulator.schedules.schedule import Schedule
from tests.simulator.workload import (
    CELLS,
    WITHHELD,
    RowKeys,
    Tally,
    cells_in,
    check_counts,
    check_slots,
    counted,
    digest,
)
from tests.simulator.world import World
from tests.support.worlds import same_state

# What keeps a server from saving its state in time.
HINDERS = (
    *("full disk", "failed rename", "torn write", "bit flip", "slow disk"),
    *("pause", "slow", "power loss in a write", "crash in a write"),
)


NEWS_SECONDS = 0.5  # within which a coordinator that is well hears from monitors


@dataclass(frozen=True, slots=True)
class _Restoration:
    """What was `acked` when a shard was restored, and what is `there` in the state that it got.

    `based_on` is the epoch in which the shard first had that state.
    """

    based_on: int
    acked: set[int]
    there: set[int]


class _Shard:
    """What is known of one shard: every state that it has had, and who held the last ones."""

    def __init__(self) -> None:
        self.existed: dict[int, int] = {}  # states, and the epoch in which each was there first
        self.ever: set[int] = set()  # updates that were in it when it was served
        self.served: set[int] = set()  # the epochs in which it was
        self.heads: dict[int, str] = {}
        self.versions: dict[int, int] = {}
        self.members: dict[str, Process] = {}
        self.refused = 0
        self.begun = False
        self.dropped: dict[str, float] = {}  # by which servers that started over, and when
        self.seeded: Restored | None = None  # the last restoration, if it needs no host of before
        self.restorations: dict[int, _Restoration] = {}  # by epoch
        self.layer = LayerHistory()
        self.last_chain: tuple[Endpoint, ...] = ()
        self.fell_back: set[str] = set()  # hosts that were restored since from checkpoints below
        self.stores: tuple[Endpoint, ...] = ()  # who had its state when it was last served
        self.lives: dict[Endpoint, int] = {}  # of these stores, when its epoch began


class Auditor:
    """Checks one run.

    Parameters
    ----------
    injector
        Knows which nodes were touched by a fault, so that they may be given up.
    rows
        Where the rows lie that are pushed to as well; None: there are none.
    """

    def __init__(
        self,
        world: World,
        schedule: Schedule,
        tally: Tally,
        injector: Injector,
        rows: RowKeys | None,
    ) -> None:
        case = schedule.case
        self._world = world
        self._case = case
        self._tally = tally
        self._injector = injector
        self._row_keys = rows
        self._shards = [_Shard() for _ in range(case.shards)]
        self._forgets = isinstance(case.recovery.durability, WorkerCache)
        self._in_parts = case.recovery.durability.restores_in_parts
        self._parts = self._histories() if self._in_parts else []
        self._layered = case.recovery.durability.has_layer_below
        self._joined: dict[str, int] = {}  # the incarnation of each worker that takes part
        self._incarnations: dict[str, int] = {}  # the last one of each
        self._saved_incarnations: dict[str, int] = {}
        seconds = case.recovery.durability.seconds
        limits = [(seconds, schedule.work) for _ in self._shards] if seconds else []
        self._committed = [Committed(*each) for each in limits]
        self._workers_cut_short = 0
        self._ended_without: list[set[int]] = [set() for _ in range(case.shards)]
        self._mailboxes: frozenset[str] = frozenset()  # the addresses of those that are used
        self._mail_gone = False
        world.watchers.append(self._recorded)
        world.network.on_answer = self._answered
        world.on_kill = self._killed

    def _histories(self) -> list[PartsHistory]:
        wanted = self._case.recovery.durability
        assert isinstance(wanted, PartialCheckpoint)
        layouts = self._world.group.layout.shards
        return [PartsHistory(layout, wanted, self._tally.processes.total) for layout in layouts]

    # -- a group that ends, and is brought up again ------------------------------------------------

    def ended(self) -> None:
        """The whole group has ended; what workers and mailboxes held back is lost with it."""
        self._tally.ended()
        self._joined = {}
        for shard, buffered in enumerate(self._tally.buffered):
            self._tally.forgiven[shard] |= buffered - self._tally.acked[shard]

    def resumed(self, world: World, saved: Saved) -> None:
        """It is brought up again as another one, from what was saved of it."""
        self._world = world
        world.watchers.append(self._recorded)
        world.on_kill = self._killed
        for shard in self._shards:
            shard.heads, shard.versions, shard.members, shard.begun = {}, {}, {}, False
            shard.seeded, shard.restorations, shard.served = None, {}, set()
            shard.layer, shard.last_chain, shard.stores = LayerHistory(), (), ()
            shard.dropped.clear()
            shard.fell_back.clear()
        for refused in saved.refused:
            self._refused(refused.shard, refused.path, refused.reason)
        for state in saved.states:
            for worker, progress in state.workers.items():
                known = self._saved_incarnations.get(worker, 0)
                self._saved_incarnations[worker] = max(known, progress.incarnation)
        self._incarnations = dict(self._saved_incarnations)
        for number, state in enumerate(saved.states):
            what = f"shard {number}, saved"
            there = self._cells(number, state, self._counted(what, number, state))
            self._ended_without[number] = self._tally.acked[number] - there
        if world.group.restores_together:
            self._check_cut(saved.states)

    def _check_cut(self, states: Sequence[ShardState]) -> None:
        """In one cut every worker that takes part is as far on each shard."""
        reached: dict[str, set[tuple[int, int]]] = {}
        for state in states:
            for worker, progress in state.workers.items():
                if progress.active:
                    at = progress.incarnation, progress.clock
                    reached.setdefault(worker, set()).add(at)
        apart = {worker: sorted(at) for worker, at in reached.items() if len(at) > 1}
        text = f"the group goes on from states that are of no one cut: {apart}"
        require(not apart, "no common cut", text)

    # -- while it runs -----------------------------------------------------------------------------

    def accepted(self, replica: Replica, before: ShardState, step: Step) -> None:
        """A replica made a state its own, in the place of the one before."""
        try:
            self._check_accepted(replica, before, step)
        except Violation as violation:
            self._world.network.report(violation)

    def _check_accepted(self, replica: Replica, before: ShardState, step: Step) -> None:
        state, shard = step.state, self._shards[replica.shard]
        shard.existed.setdefault(self._digest(state), replica.epoch)
        if self._parts:
            both = [self._counted("", replica.shard, each) for each in (before, state)]
            self._parts[replica.shard].accepted(before, state, changed(*both))
        if not step.updates or replica.node.group.name != self._world.group.name:
            return
        what = f"shard {replica.shard} on {replica.node.name}"
        values = self._check_counts(what, replica.shard, state)
        if replica.epoch in shard.served:
            shard.ever |= self._cells(replica.shard, state, values)
        if self._layered:
            cells = self._cells(replica.shard, state, values)
            shard.layer.accepted(replica.epoch, state.version, cells)
        if not isinstance(self._case.consistency, ASP):
            self._check_active(what, step)
            if not self._world.group.restores_together:  # else clocks go back with the shards
                self._check_clocks(what, before, step)
        if replica.is_head:
            epoch, address = replica.epoch, replica.node.me.address
            first = shard.heads.setdefault(epoch, address)
            text = f"shard {replica.shard}, epoch {epoch}: both {first} and {address} are head"
            require(first == address, "two heads", text)
            last = shard.versions.get(epoch, 0)
            text = f"{what}: version {state.version} after {last} in epoch {epoch}"
            require(state.version > last, "version went back", text)
            shard.versions[epoch] = state.version

    def _check_active(self, what: str, step: Step) -> None:
        """Nothing is applied of a worker that was given up; mailboxes are closed to nobody."""
        mailbox = getattr(self._case.recovery.outage, "buffer", "") == "mailbox"
        for update in step.updates:
            progress = step.state.workers[update.id.worker]
            of_now = progress.incarnation == update.id.incarnation and progress.active
            is_call = update.id.worker.endswith(CALLS)
            text = f"{what}: {update.id} was applied, though nobody waits for that worker"
            require(of_now or is_call or (mailbox and update.replayed), "applied too late", text)

    def _check_clocks(self, what: str, before: ShardState, step: Step) -> None:
        """A shard has known of all that a worker did before, also of what was lost.

        Until then it may have shown others, and this worker, weights that were too old.
        """
        for update in step.updates:
            number = update.id.seq
            clock = before.clocks.get(update.id.worker, number)
            text = f"{what}: {update.id} was applied when the worker's clock was {clock}"
            require(update.replayed or clock >= number - 1, "clock behind", text)

    def patches(self) -> list[Patch]:
        """What has the shipped code tell of what it does."""
        keep: Any = Replica.keep

        def keep_and_tell(replica: Replica, op: Any, step: Step) -> Step:
            state = replica.state
            step = keep(replica, op, step)
            if step.outcome == "applied":
                self.accepted(replica, state, step)
            return step

        return [
            Patch(Replica, "keep", keep_and_tell),
            before(CommitLog, "set_committed", self.committed),
            before(Coordinator, "publish", self.published),
            *layering(self.falling_back, self._world.network.report),
            *placing(lambda: self._world.drained, self._world.network.report),
        ]

    def published(self, coordinator: Coordinator) -> None:
        """Who has stopped for a move need not have the shard any more when others serve it.

        What they have then may be lost with them: mail is only now cleared.
        """
        table, self._mail_gone = self._world.table, self.mail_lost
        self._mailboxes = frozenset(box.address for box in table.mailboxes)
        for number, shard in enumerate(self._shards):
            view = self._world.view(number)
            shard.last_chain = view.chain or shard.last_chain
            if view.serving:
                shard.fell_back.clear()
                shard.stores = self._world.stored(number)
                if view.epoch not in shard.served:
                    shard.served.add(view.epoch)
                    # A store that started over unnoticed has lost what it is counted on for.
                    shard.lives = {store: self._world.known_life(store) for store in shard.stores}
                shard.ever |= self._cells_at(view)
                out = [a for a, p in shard.members.items() if self._is_out(p, view)]
                for address in out:
                    del shard.members[address]

    def falling_back(self, host: ShardServer, m: Restore) -> None:
        """A shard is to be restored from the checkpoints below: what is above has to be lost.

        The last replica of a chain is waited for while it is only silent, for longer than any fault
        lasts; a host that holds states in a store may be given up before. A replica that was itself
        restored from these checkpoints, but whose reply was lost, has nothing more.
        """
        shard = self._shards[m.shard]
        if (
            host.node.group.name != self._world.group.name
            or m.epoch < self._world.view(m.shard).epoch
        ):
            return
        if not shard.layer.asked(m.epoch) or self._case.recovery.durability.above.stores:
            return
        alive = [
            member.address
            for member in shard.last_chain
            if self._world.name_of(member)
            and member.address not in shard.fell_back
            and m.shard in self._world.hosts[member.address]._replicas
        ]
        shard.fell_back.add(host.node.me.address)
        if alive:
            text = f"shard {m.shard} goes back to a checkpoint, though {', '.join(alive)} has it"
            self._world.network.report(Violation("a copy above lives", text))

    @property
    def mail_lost(self) -> bool:
        """Whether faults had touched all hosts with the same mail while they had it.

        It is lost with them. They may be the stores' hosts, from the beginning or since mailboxes
        of their own were drained.
        """
        boxes = self._mailboxes
        return self._mail_gone or (bool(boxes) and self._injector.has_touched_all(boxes))

    def _cells_at(self, view: View) -> set[int]:
        """The updates in a shard, as its head has it."""
        replica = self._world.hosts[view.chain[0].address]._replicas.get(view.shard)
        if replica is None:  # it has started over, which the coordinator does not know yet
            return set()
        values = self._counted(f"shard {view.shard}, served", view.shard, replica.state)
        return self._cells(view.shard, replica.state, values)

    def _counted(self, what: str, shard: int, state: ShardState) -> np.ndarray:
        """The counter and cells of a state."""
        layout = self._world.group.layout
        return counted(what, layout, shard, state.values, self._in_parts)

    def _cells(self, shard: int, state: ShardState, values: np.ndarray) -> set[int]:
        """The updates in a state, though some blocks may have lost them."""
        return self._parts[shard].cells(state) if self._parts else cells_in(values)

    def _digest(self, state: ShardState) -> int:
        """What tells two states of a shard apart, as far as a whole one must have existed."""
        return numbers(state) if self._parts else _digest(state, self._forgets)

    def _is_out(self, process: Process, view: View) -> bool:
        """Whether a host that is not in the view has left when it was told to, or was given up.

        One that has started over since has nothing of the shard.
        """
        if process.address in (member.address for member in view.chain):
            return False
        replica = self._world.hosts[process.address]._replicas.get(view.shard)
        has_left = replica is None or replica.node.me not in replica.chain
        return has_left or self._world.has_given_up(process)

    def committed(self, commits: CommitLog, state: ShardState) -> None:
        """A replica has committed a state; a host that was given up can tell nobody of that."""
        world, shard = self._world, commits._replica.shard
        if not self._committed or commits._replica.node.group.name != world.group.name:
            return
        process = here.get()
        if isinstance(process, Process) and not world.has_given_up(process):
            self._committed[shard].note(state.version, process)

    def _renewed(self, request: RenewLease, reply: wire.Frames) -> None:
        """The coordinator has answered a host that asks for its lease."""
        if not self._world.has_ended(request.host):
            return
        answer = self._world.network.courier.decode(reply)
        if isinstance(answer, Renewed) and answer.granted:
            text = f"{request.host.address} is proven to have ended, and was granted a lease"
            self._world.network.report(Violation("renewed, though ended", text))

    def _answered(self, process: Process, request: Any, reply: wire.Frames) -> None:
        """A host has carried out a client's request, or the coordinator that of a host."""
        if isinstance(request, RenewLease):
            return self._renewed(request, reply)
        if process.address not in self._world.hosts:
            return  # it is of a group that has ended
        view = self._world.view(request.shard)
        newer = view.serving and view.epoch > request.epoch
        if not newer or any(process.address == member.address for member in view.chain):
            return
        try:
            waits = isinstance(self._world.network.courier.decode(reply), Waiting)
        except DpsError:
            return  # refused
        if not waits:
            what = f"{type(request).__name__} (shard {request.shard}, epoch {request.epoch})"
            text = f"{process.address} answered {what}, but is out since epoch {view.epoch}"
            self._world.network.report(Violation("answered without a lease", text))

    def _recorded(self, process: Process, event: Event) -> None:
        try:
            self._check_event(process, event)
        except Violation as violation:
            self._world.network.report(violation)

    def _check_event(self, process: Process, event: Event) -> None:
        match event:
            case Restored():
                self._restored(process, event)
            case Promoted() | ReplicaAdded():
                self._shards[event.shard].dropped.pop(event.node, None)
                self._shards[event.shard].members[process.address] = process
            case Detected():
                self._given_up(event)
            case TaskFailed() if not event.error.startswith(Unforeseen.__name__):
                raise Violation("bug", f"in a task of {event.node}: {event.error}")
            case CheckpointRefused():
                self._refused(event.shard, event.path, event.reason)
                self._shards[event.shard].layer.refused(event.path)
            case CheckpointWritten() | CutTaken():
                if isinstance(event, CheckpointWritten):
                    self._shards[event.shard].layer.written(event.epoch, event.version)
                text = f"{type(event).__name__} says that it took {event.seconds:g} s"
                require(event.seconds >= 0, "negative time", text)
            case TaskFailed():
                for shard in self._shards:
                    shard.dropped.setdefault(event.node, now())
            case WorkerJoined():
                self._worker_joined(event)
            case WorkerLeft():
                self._joined.pop(event.worker, None)
                if event.reason == "silent":
                    self._worker_given_up(event)
                self._tally.left(event.worker, event.incarnation)
                if event.was_lost or event.reason == "failed":
                    self._workers_cut_short += 1
                if event.was_lost:
                    self._tally.forgive_buffer(self._tally.own(event.worker))

    def _killed(self, process: Process) -> None:
        """A monitor kills what has been stopped for a while, and no last copy of a state."""
        time = asyncio.get_running_loop().time()
        least = self._world.group.timings.stopped
        stopped = 0.0 if process.busy else time - (process.paused_at or time)
        text = f"{process.name} is killed, though it has been stopped for {stopped:g} s"
        self._require(stopped >= least, "killed too soon", text)
        durability = self._case.recovery.durability
        if durability.above.stores or not durability.above.is_last_copy(True, False, False):
            return
        for number in range(len(self._shards)):
            chain = [member.address for member in self._world.view(number).chain]
            fit = [a for a in chain if a != process.address and self._may_still_serve(a, time)]
            text = f"{process.name} is killed, though it has the last copy of shard {number}"
            self._require(bool(fit) or process.address not in chain, "last copy killed", text)

    def _may_still_serve(self, address: str, time: float) -> bool:
        """Whether a host is not stopped, or was not a moment ago: that may not be known yet."""
        found = [p for p in self._world.processes if p.address == address]
        out = [(p.paused_at if not p.busy else None) if p.alive else p.ended_at for p in found]
        return all(at is None or time - at < NEWS_SECONDS for at in out)

    def _require(self, kept: bool, kind: str, text: str) -> None:
        if not kept:
            self._world.network.report(Violation(kind, text))

    def _refused(self, number: int, path: str, reason: str) -> None:
        """A damaged checkpoint was passed over."""
        # All shards use the cut before, if they go back together.
        together = self._world.group.restores_together
        for shard in self._shards if together else [self._shards[number]]:
            shard.refused += 1
        lied = self._injector.struck["torn write"] + self._injector.struck["bit flip"]
        text = f"{path} is torn ({reason}), but the disk told no lies"
        require(lied > 0, "torn checkpoint", text)

    def _worker_joined(self, event: WorkerJoined) -> None:
        """Incarnations grow, and nobody begins another one without a reason."""
        name, before = event.worker, self._incarnations.get(event.worker, 0)
        text = f"{name} is incarnation {event.incarnation}, after {before}"
        require(event.incarnation > before, "incarnation", text)
        if name in self._joined:
            struck = self._injector.struck
            known = struck["return"] + struck["twin"] + struck["late copies"] > 0
            text = f"{name} entered as {event.incarnation}, and had not left as {before}"
            require(known, "entered twice", text)
            self._tally.forgive_buffer(self._tally.own(name))
            self._workers_cut_short += 1
        self._incarnations[name] = self._joined[name] = event.incarnation
        self._tally.joined[name] = event.incarnation

    def _worker_given_up(self, event: WorkerLeft) -> None:
        """Only a worker that was touched by a fault is given up."""
        process = self._world.process(event.worker)
        wrong = process is None or not process.alive or self._injector.touched(process)
        wrong = wrong or self._injector.struck["late copies"] > 0
        # It may have been an earlier process of this name, and the one of now has yet to enter.
        wrong = wrong or self._tally.processes[event.worker] > 1
        text = f"{event.worker} was given up, but nothing was wrong with it"
        require(wrong, "given up", text)

    def _lost_at(self, shard: _Shard, process: Process) -> float | None:
        """When the last server of a shard ended, if nothing had kept it from saving its state."""
        hindered = any(self._injector.struck[kind] for kind in HINDERS)
        others = [member for member in shard.members.values() if member is not process]
        ended = [
            min(m.ended_at, shard.dropped.get(m.name, m.ended_at))
            for m in others
            if m.ended_at is not None and not m.stood
        ]
        return max(ended) if ended and len(ended) == len(others) and not hindered else None

    def _given_up(self, event: Detected) -> None:
        """Only who was touched by a fault is taken for lost."""
        members = self._shards[event.shard].members
        named = [process for process in members.values() if process.name == event.node]
        unfit = [
            process for process in named if not process.alive or self._injector.touched(process)
        ]
        text = f"shard {event.shard}: {event.node} was given up, but nothing was wrong with it"
        require(bool(unfit) or not named, "given up", text)
        for process in unfit:
            if not process.alive:
                del members[process.address]

    def _restored(self, process: Process, event: Restored) -> None:
        shard = self._shards[event.shard]
        state = self._world.hosts[process.address].replica(event.shard).state
        what = f"shard {event.shard}, restored from {event.source} on {event.node}"
        anew, digested = event.source == "initial", self._digest(state)
        text = f"{what}: version {state.version} as it is there never existed"
        require(anew or digested in shard.existed, "never existed", text)
        values = self._counted(what, event.shard, state)
        relaxed = bool(self._case.filters) or self._in_parts
        check_slots(what, values, state, self._forgets, relaxed)
        there = self._cells(event.shard, state, values)
        if self._parts:
            self._parts[event.shard].restored(what, state)
        based_on = shard.existed.setdefault(digested, event.epoch)
        if event.epoch < self._world.view(event.shard).epoch:
            # It was given up before it was carried out. Nobody is asked in an epoch that is over:
            # nothing is lost by it, and whoever has the shard has it still.
            return
        fell_back = self._layered and event.source == "checkpoint"
        if (anew or fell_back) and shard.begun:
            self._check_all_lost(what, event.shard, process)
        if self._layered:
            self._check_layer(what, event, there)
            shard.layer.accepted(event.epoch, state.version, there)
        if self._committed:
            whole, lost_at = shard.refused == 0, self._lost_at(shard, process)
            self._committed[event.shard].restored(what, state.version, whole, lost_at)
            shard.dropped.clear()
        self._tally.lives[event.shard] += 1
        bound = float("inf") if anew or fell_back else self._bound(shard)
        if self._parts:
            self._note_in_part(event.shard, state, values, there)
        self._check_loss(what, event.shard, there, bound)
        # Lost updates may return in the copies of workers, or in batches that are leased again.
        if self._forgets or self._case.leases:
            self._note_restoration(event, based_on, there)
        shard.members = {process.address: process}
        seeded = event.source in ("initial", "worker") or fell_back
        shard.seeded = event if seeded and shard.begun else None
        shard.begun = True
        if (
            not self._world.group.restores_together
        ):  # else another shard may be on its way to the cut before
            shard.refused = 0

    def _note_in_part(
        self, shard: int, state: ShardState, values: np.ndarray, there: set[int]
    ) -> None:
        """Take note of what is in a state, but was lost to some of its blocks or rows."""
        whole = cells_in(values)
        if self._row_keys is not None:
            whole &= self._row_keys.cells(shard, state)
        self._tally.in_part[shard] = there - whole

    def _bound(self, shard: _Shard) -> float:
        """How many acked updates a restoration may take back.

        A checkpoint holds what was under way when it was written, too: the one before it lacks
        that besides what was promised. Each process has one update under way.
        """
        under_way = self._tally.processes.total() * (WITHHELD if self._case.filters else 1)
        return self._case.interval * (1 + shard.refused) + under_way * shard.refused

    def _check_layer(self, what: str, event: Restored, there: set[int]) -> None:
        """What is lost with every copy above came after the newest complete checkpoint."""
        tally, number, shard = self._tally, event.shard, self._shards[event.shard]
        anew = event.source == "initial" and shard.begun
        require(not anew, "started anew", f"{what}: there is a layer of checkpoints")
        if event.source == "checkpoint":
            kept = shard.layer.kept(event.epoch) & tally.acked[number]
            lost = kept - there - tally.forgiven[number]
            text = f"{what}: {sorted(lost)} are lost, and are in the newest complete checkpoint"
            require(not lost, "lost", text)

    def _check_all_lost(self, what: str, number: int, process: Process) -> None:
        """A shard starts anew only if all who had its state are lost, or were taken for lost.

        Where nothing else has it, a server that is seen alive is not.
        """
        forgets = isinstance(self._case.recovery.durability, NoDurability)
        wrong = self._injector.may_be_unseen if forgets else self._injector.touched
        fit = [
            p.name
            for p in self._shards[number].members.values()
            if (forgets or p is not process) and p.alive and not wrong(p)
            if not self._has_only_begun(number, p)
        ]
        if self._case.recovery.durability.above.stores:
            fit += self._stores_of(number)
        elif isinstance(self._case.recovery.durability, WorkerCache):
            fit += self._readers(number)
        require(not fit, "started anew", f"{what}: {', '.join(fit)} had its state")

    def _stores_of(self, number: int) -> list[str]:
        """The stores that had the state of a shard when it was last served, and still have it.

        They had no fault, or are heard by the coordinator all the same. Who has started over since
        has dropped it, and may have been given the restored one.
        """
        world, found, shard = self._world, [], self._shards[number]
        for store in shard.stores:
            if self._life(store) != shard.lives.get(store, self._life(store)):
                continue
            counted = world.hears(store) and number in world.hosts[store.address]._states._states
            if counted or not self._injector.has_touched_all({store.address}):
                found.append(world.name_of(store))
        return [name for name in found if name]

    def _life(self, store: Endpoint) -> int:
        """How often a host has started over."""
        host = self._world.hosts.get(store.address)
        return host._life if host is not None else 0

    def _has_only_begun(self, number: int, process: Process) -> bool:
        """Whether a host got initial values, a copy or what a layer has, and never served.

        It is asked for nothing then: the state remains with whom it came from, if that one lives.
        What it has of the mail is still in the mailbox, unless that was lost.
        """
        seeded = self._shards[number].seeded
        if seeded is None or seeded.epoch in self._served(number):
            return False
        replica = self._world.hosts[process.address]._replicas.get(number)
        if replica is None:
            return False
        there = sum(is_duplicate(replica.state, update) for update in self._mail_of(number))
        return self._tally.mail_lost() or replica.state.version <= seeded.version + there

    def _readers(self, number: int) -> list[str]:
        """The workers that take part and hold a copy of a shard, and have had no fault."""
        return [
            p.name
            for p, client in self._world.clients.items()
            if p.alive and not self._injector.touched(p)
            if self._joined.get(p.name) == client.incarnation and client.versions()[number] >= 0
        ]

    def _mail_of(self, number: int) -> set[UpdateId]:
        """The updates in the mailbox of a shard."""
        boxes = [self._world.hosts[b.address]._mailboxes for b in self._world.table.mailboxes]
        mail = (op for box in boxes for _, op in box._mail.get(number, ()))
        return {op.id for op in mail if op.kind == "gradient"}

    def _served(self, number: int) -> set[int]:
        """The epoch in which a shard was last served after a restoration."""
        return {r.epoch for r in self._world.losses.restorations if r.shard == number}

    def _check_loss(self, what: str, number: int, there: set[int], bound: float) -> None:
        """A restoration takes back no more acked updates than was promised."""
        tally, shard = self._tally, self._shards[number]
        lost = tally.acked[number] - there - tally.forgiven[number]
        text = f"{what}: {len(lost)} acked updates are lost: {sorted(lost)}"
        require(len(lost) <= bound, "lost", text)
        if bound:
            tally.forgiven[number] |= (shard.ever - there) | lost

    def _note_restoration(self, event: Restored, based_on: int, there: set[int]) -> None:
        """Take note of a restored state, and of what it has to have; it may never be served."""
        restorations, last = self._shards[event.shard].restorations, 0
        if restorations and (last := max(restorations)) not in self._served(event.shard):
            del restorations[last]
        if event.epoch > last:  # else somebody does late what is not wanted any more
            acked = self._tally.acked[event.shard] - self._ended_without[event.shard]
            if self._case.leases:  # updates lost before their acks arrive may be pushed again
                acked = set(self._tally.attempted)
            restorations[event.epoch] = _Restoration(based_on, acked, there)

    def _check_counts(self, what: str, shard: int, state: ShardState) -> np.ndarray:
        """The counters and cells of a state, which holds each update once, and whole."""
        values = self._counted(what, shard, state)
        filtered = bool(self._case.filters)
        check_slots(what, values, state, self._forgets, filtered or self._in_parts)
        check_counts(what, values, state.version, filtered, self._in_parts)
        if self._row_keys is not None:
            self._row_keys.check(what, shard, state, values, self._in_parts)
        return values

    # -- at the end --------------------------------------------------------------------------------

    def check(self, table: Table) -> None:
        """Check a group that is at rest."""
        bugs = self._world.network.bugs
        require(not bugs, "bug", f"bugs: {bugs}")
        self._check_placement(table)
        for view in table.views:
            states = self._world.states(view)
            _check_equal(view, states)
            found = self._check_state(view, states[0])
            missing = self._case.leased - found
            text = f"shard {view.shard} lacks {sorted(missing)} of the leased data"
            require(not missing, "example lost", text)
            self._check_kept(view, found)
            self._check_told(view.shard, found)
            self._check_stored(table, view)

    def _check_placement(self, table: Table) -> None:
        """Replicas are spread evenly over no more hosts than are wanted, once anybody wants it.

        Or they are where the ring has them.
        """
        scaling = self._world.scaling
        if scaling.servers is None:
            return
        if self._case.placement is not None:
            check_ring(scaling, table.views)
            return
        loads = Counter(member.address for view in table.views for member in view.chain)
        even = max(loads.values()) - min(loads.values()) <= 1 and len(loads) <= scaling.servers
        require(even, "uneven", f"{scaling.servers} servers are wanted, but it is {dict(loads)}")

    def _check_stored(self, table: Table, view: View) -> None:
        """As many stores as there may be have what is committed, and as many keep mail."""
        wanted = self._case.recovery.durability.above.stores
        usable = self._world.scaling.usable.values()
        able, number = sum(info.role in STORE_ROLES for info in usable), len(table.mailboxes)
        text = f"{number} mailboxes are used of {able}, and {self._case.recovery.stores} are wanted"
        require(number == min(self._case.recovery.stores, able), "too few mailboxes", text)
        there = sum(info.role == "store" for info in usable)
        number = len(table.stores)
        text = f"{number} stores are used of {there}, and {wanted} are wanted"
        require(not wanted or number == min(wanted, there), "too few stores", text)
        for store in table.stores if wanted else ():
            shard, states = view.shard, self._world.hosts[store.address]._states._states
            committed = (
                self._world.hosts[view.chain[-1].address].replica(shard)._commits.committed.index
            )
            index = states[shard][1].index if shard in states else -1
            text = f"shard {shard}: {store.address} has {index} operations of {committed}"
            require(index >= committed, "not in a store", text)

    def _check_kept(self, view: View, found: set[int]) -> None:
        shard, tally = view.shard, self._tally
        buffered = set() if tally.mail_lost() else tally.buffered[shard]
        lost = (tally.acked[shard] | buffered) - found - tally.forgiven[shard]
        text = f"shard {shard}: {len(lost)} acked updates are lost: {sorted(lost)}"
        require(not lost, "lost", text)
        undone = tally.seen[shard] - found - tally.forgiven[shard]
        require(not undone, "taken back", f"shard {shard}: {sorted(undone)} was read, is lost")

    def _check_told(self, shard: int, found: set[int]) -> None:
        """Acked updates that are gone were reported, and not many more than those.

        A worker's copy may bring back what was lost before: that was reported, and may be again.
        What was acked after a restoration that the copy is older than is reported though it is
        there.
        """
        acked = self._tally.acked[shard] - self._tally.unfinished
        gone = acked - self._ended_without[shard] - found
        restorations = self._shards[shard].restorations
        history = [*(each.acked - each.there for each in restorations.values()), gone]
        ever = set[int]().union(*history)
        if self._case.leases:  # any worker may push a lost batch again, and it may be lost again
            ever, often = gone, sum(map(len, history))
        else:
            often = sum(len(after - before) for before, after in pairwise([set(), *history]))
            often += sum(len(_acked_anew(restorations, epoch)) for epoch in restorations)
        losses = [loss for loss in self._world.losses.reported if loss.shard == shard]
        told = sum(loss.updates for loss in losses)
        back = f" of {len(ever)} that ever were" if ever - gone else ""
        text = f"shard {shard}: {len(gone)} acked updates{back} are lost, but {told} were reported"
        require(bool(losses) or not ever, "lost without a word", text)
        if self._case.filters:
            return  # an update may bring several cells, or none
        if all(loss.exact for loss in losses):
            require(told >= len(ever), "lost without a word", text)
        # One of each worker that was cut short may have been durable, but not acked; buffered ones
        # never are.
        unacked = self._workers_cut_short + len(self._tally.buffered[shard])
        require(told <= often + unacked, "false alarm", text)

    def _check_state(self, view: View, state: ShardState) -> set[int]:
        applied = sum(progress.applied for progress in state.workers.values())
        values = self._check_counts(f"shard {view.shard}", view.shard, state)
        require(
            applied == state.version,
            "counts",
            f"shard {view.shard}: version {state.version}, but the workers' updates are {applied}",
        )
        found = self._cells(view.shard, state, values)
        strange = found - self._tally.attempted
        require(not strange, "never pushed", f"shard {view.shard}: {sorted(strange)}?")
        return found


async def settled(world: World, patience: float) -> Table:
    """Wait until every shard is fully served and its replicas are at rest; return the table."""
    try:
        async with asyncio.timeout(patience):
            while True:
                table = await world.complete()
                if table.leaving:
                    await asyncio.sleep(0.1)
                    continue
                if _alike(world, table) and world.losses.is_settled:
                    return table
                await asyncio.sleep(0.1)
    except TimeoutError:
        text = f"the group did not come to rest within {patience:g} s"
        raise Violation("stuck", text) from None


def _alike(world: World, table: Table) -> bool:
    """Whether all replicas of each shard are there, and have the same operations."""
    try:
        states = [world.states(view) for view in table.views]
    except NotServing:  # a host has started over, which the coordinator does not know yet
        return False
    return all(len({state.index for state in of_shard}) == 1 for of_shard in states)


def _digest(state: ShardState, forgets: bool = False) -> int:
    """What tells two states of a shard apart, in this process; some `forget` what is the rule's."""
    if forgets:
        state = replace(state, steps=0, slots={})
    slots = tuple((name, slot.tobytes()) for name, slot in sorted(state.slots.items()))
    workers = frozenset(state.workers.items())
    numbers = (state.index, state.version, state.steps)
    results = frozenset((name, result.tobytes()) for name, result in state.results.items())
    batches = frozenset(state.batches.items())
    kept = results, batches
    return hash((*numbers, state.values.tobytes(), slots, workers, digest(state), kept))


def _acked_anew(restorations: Mapping[int, _Restoration], epoch: int) -> set[int]:
    """What a restored state has of before an earlier restoration, and was acked only after it.

    The earlier one lacked such an update, and its worker had not been told of it, so it was applied
    again; or one in between had brought it back, and was counted in what the worker was told next.
    The count of a worker's updates in the copy does not tell it from those that were lost.
    """
    this = restorations[epoch]
    passed = [r for e, r in sorted(restorations.items()) if this.based_on < e < epoch]
    anew = [(this.acked & this.there) - each.acked - each.there for each in passed]
    for lost, later in combinations(passed, 2):
        told = {cell // CELLS for cell in this.acked - later.acked}
        back = (lost.acked - lost.there) & later.there & this.there
        anew.append({cell for cell in back if cell // CELLS in told})
    return set[int]().union(*anew)


def _check_equal(view: View, states: Sequence[ShardState]) -> None:
    for member, state in zip(view.chain, states, strict=True):
        same = same_state(states[0], state) and digest(states[0]) == digest(state)
        text = f"shard {view.shard}: {member.address} differs from its head"
        require(same, "replicas differ", text)
