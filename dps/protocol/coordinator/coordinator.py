"""The coordinator: it knows which host holds which replica of which shard, in which epoch.

The coordinator is asked for the routing table, told of hosts, workers and failures, and grants
leases. What follows for a shard is its controller's business
(`dps.protocol.coordinator.shard_controller`); which hosts can be counted on is decided in
`dps.protocol.coordinator.membership`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dps.core.consistency import ASP
from dps.core.functions import CALLS, names_of
from dps.core.names import STORE_ROLES
from dps.core.placement.rebalancing import Move
from dps.core.updates import Operation, UpdateId
from dps.errors import DpsError, NotServing, TrainingStopped
from dps.events import (
    Decided,
    Detected,
    LossReported,
    Moved,
    Sink,
    WorkerJoined,
    WorkerLeft,
)
from dps.protocol.coordinator.failovers import Failovers
from dps.protocol.coordinator.failure_count import FailureCount
from dps.protocol.coordinator.losses import Losses
from dps.protocol.coordinator.membership import Membership
from dps.protocol.coordinator.rebalancer import Rebalancer
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.coordinator.snapshots import Snapshots
from dps.protocol.durability import CoordinatorContext
from dps.protocol.group import Group
from dps.protocol.lease import Leases
from dps.protocol.messages import (
    STOPPED,
    AddHosts,
    Brought,
    CloseGroup,
    Dismiss,
    Done,
    Drain,
    Durable,
    Ending,
    Entered,
    EnterWorker,
    Evict,
    ExitWorker,
    GetIncidents,
    GetTable,
    HostInfo,
    Incidents,
    Loss,
    Push,
    Renewed,
    RenewLease,
    RenewWorker,
    ReportFailure,
    ReportLink,
    Returned,
    Scale,
    Seed,
    Seeded,
    Sighted,
    StopTraining,
    Table,
    View,
    WantCut,
    donor_name,
)
from dps.protocol.monitor import Sighting
from dps.protocol.tasks import Tasks, task_failed
from dps.protocol.transport import Clock, Endpoint, Monitors, Transport, Watched

# Requests that are repeated anyway: one failed reply must not end the process that sends them.
REPEATED = (GetTable, RenewLease, RenewWorker, Sighted)


@dataclass(frozen=True, slots=True)
class _Worker:
    incarnation: int
    address: str
    token: str
    active: bool
    stops: int = 0
    watched: Watched | None = None
    silent: bool = False  # given up, though its process may live


class Coordinator:
    """Decides who serves what. All calls come from one event loop."""

    def __init__(
        self,
        group: Group,
        transport: Transport,
        clock: Clock,
        emit: Sink,
        monitors: Monitors,
    ) -> None:
        self._group = group
        self._transport = transport
        self._clock = clock
        self._emit = emit
        self._monitors = monitors
        self.tasks = Tasks(self.failed)
        self.members = Membership(
            group,
            transport,
            clock,
            monitors,
            self.tasks,
            holds_anything=self._holds_anything,
            holds_only_copy=self._holds_only_copy,
            copies_beside=self._copies_beside,
            on_lost=self._lose_host,
            on_silent=self._suspend_host,
            on_found=self._use_hosts,
        )
        self.stores: tuple[Endpoint, ...] = ()
        self.mailboxes: tuple[Endpoint, ...] = ()
        self.seeds: dict[int, Seed] = {}
        self.part = group.recovery.durability.coordinator_part(
            CoordinatorContext(self._donors, self.publish, clock, emit)
        )
        self._workers = {
            name: _Worker(incarnation, "", "", active=False)
            for name, incarnation in group.incarnations.items()
        }
        self._returned: dict[str, Returned] = {}  # by the Dask task of the training function
        self._worker_leases = Leases[str](group.timings, clock)
        self._controllers = [
            ShardController(shard, group, transport, self)
            for shard in range(len(group.layout.shards))
        ]
        self.scaling = Rebalancer(
            group, self.members, self._controllers, lambda: (*self.stores, *self.mailboxes)
        )
        self._dismissed: set[str] = set()
        self.cuts = (
            Snapshots(group, transport, clock, emit, self._views, self.tasks)
            if group.restores_together
            else None
        )
        self.losses = Losses(len(group.layout.shards), calls=bool(group.functions))
        self.failovers = Failovers(group, clock, emit, self.losses, self.members.node)
        self._failures = FailureCount(clock)
        self._stops = 0
        self._departed = asyncio.Condition()
        self._version = 0
        self._closed = False
        self._published = asyncio.Condition()
        watch = partial(self._worker_leases.watch, self._worker_is_silent)
        self.tasks.keep(watch, group.timings.retry)
        self._services: dict[type, Callable[[Any], Awaitable[Any]]] = {
            GetTable: self._get_table,
            ReportFailure: self._report_failure,
            ReportLink: self._report_link,
            RenewLease: self._renew_lease,
            RenewWorker: self._renew_worker,
            Sighted: self._sighted,
            AddHosts: self._add_hosts,
            Seeded: self._seeded,
            WantCut: self._want_cut,
            Scale: self._scale,
            Drain: self._drain,
            Dismiss: self._dismiss,
            StopTraining: self._stop_training,
            GetIncidents: self._get_incidents,
            CloseGroup: self._close_group,
            EnterWorker: self._enter_worker,
            ExitWorker: self._exit_worker,
            **(self.part.services if self.part is not None else {}),
        }

    async def handle(self, message: Any) -> Any:
        """Carry out one message and return its reply; raises `DpsError` to be sent back."""
        try:
            return await self._services[type(message)](message)
        except DpsError:
            raise
        except Exception as error:
            self.failed(error)
            if isinstance(message, REPEATED):
                raise NotServing(f"the coordinator has failed: {error!r}") from error
            raise

    async def close(self) -> None:
        """Stop deciding."""
        await self.tasks.close()

    def failed(self, error: Exception) -> None:
        """Record an unforeseen exception, and look at all shards again.

        It may have come between two steps that belong together.
        """
        self._emit(task_failed(self._clock, "scheduler", error))
        for controller in self._controllers:
            for host in controller.view.chain:
                if self.members.is_lost(host):
                    controller.unsettle(without=host)
            controller.interrupt()
            controller.wake()

    async def lose(self, address: str, by: str) -> None:
        """Take note that the process at `address` seems to be gone, whatever it was.

        A worker is not waited for any more. A host may live on and serve, so it is given up only
        when its end is proven, or when its lease is over.
        """
        self.members.suspect(address, by)
        for name, worker in list(self._workers.items()):
            if worker.address == address and worker.active:
                await self._remove_worker(name, worker.incarnation, "lost")

    @property
    def workers(self) -> dict[str, tuple[str, bool]]:
        """The address of each worker that there has been, and whether it takes part."""
        return {name: (worker.address, worker.active) for name, worker in self._workers.items()}

    # -- requests --------------------------------------------------------------------------------

    async def _get_table(self, m: GetTable) -> Table:
        try:
            async with asyncio.timeout(m.patience), self._published:
                await self._published.wait_for(lambda: self._version > m.after)
        except TimeoutError:
            pass
        return self._table()

    async def _report_failure(self, m: ReportFailure) -> Table:
        self.members.suspect(m.host.address, "client")
        return self._table()

    async def _report_link(self, m: ReportLink) -> Table:
        controller = self._controllers[m.shard]
        # One that did not answer the coordinator either was busy, or is out of everybody's reach.
        cut = self.members.answered_for(m.host) > m.seconds
        if cut and m.epoch == controller.view.epoch:
            if m.host in controller.view.chain[1:]:
                self.members.exclude(m.host)
            elif controller.do_without(m.host) or self._do_without_mailbox(m.host):
                await self.publish()
        return self._table()

    async def _renew_lease(self, m: RenewLease) -> Renewed:
        self._follow(m.watched)
        granted = await self.members.renew(m.host, m.life, m.watched)
        return Renewed(granted, history=self._failures.history)

    async def _sighted(self, m: Sighted) -> Done:
        names = defaultdict[Watched | None, list[str]](list)
        for name, worker in self._workers.items():
            names[worker.watched].append(name)
        for sighting in m.sightings:
            watched = Watched(m.monitor, sighting.number)
            await self.members.sighted(watched, sighting)
            for name in names[watched]:
                worker = self._workers[name]  # the await may have changed it
                if worker.watched == watched and worker.active:
                    await self._worker_sighted(name, worker, sighting)
        return Done()

    async def _worker_sighted(self, name: str, worker: _Worker, sighting: Sighting) -> None:
        """Wait for a worker that is busy; for one that is stopped, no longer than for others."""
        if sighting.state == "gone":
            await self._remove_worker(name, worker.incarnation, "lost")
        elif sighting.state == "running":
            self._worker_leases.vouch(name)
        elif sighting.seconds >= self._group.timings.stopped:
            await self._worker_is_silent(name)

    def _follow(self, watched: Watched | None) -> None:
        if watched is not None:
            self._monitors.follow(watched.monitor)

    async def _renew_worker(self, m: RenewWorker) -> Renewed:
        await self._tell_of(self.losses.stated(m.worker, m.incarnation, m.statement))
        worker = self._workers.get(m.worker)
        if worker is None or worker.incarnation != m.incarnation or not worker.active:
            return Renewed(granted=False)
        self._worker_leases.grant(m.worker)
        self._follow(m.watched)
        if m.watched != worker.watched:
            self._workers[m.worker] = replace(worker, watched=m.watched)
        return Renewed(granted=True, leaving=m.worker in self._dismissed)

    async def _add_hosts(self, m: AddHosts) -> Done:
        await self.members.add(m.hosts)
        return Done()

    async def _seeded(self, m: Seeded) -> Done:
        self._controllers[m.shard].seeded(m.epoch, m.brought)
        return Done()

    async def _want_cut(self, m: WantCut) -> Done:
        if self.cuts is not None:
            self.cuts.want(m.shard, m.version)
        return Done()

    async def _scale(self, m: Scale) -> Done:
        self.scaling.scale(m.servers)
        self.scaling.consider()
        await self.publish()
        return Done()

    async def _drain(self, m: Drain) -> Done:
        self.scaling.drain(m.host)
        await self._use_hosts()
        return Done()

    async def _dismiss(self, m: Dismiss) -> Done:
        worker = self._workers.get(m.worker)
        if worker is None or worker.active:
            self._dismissed.add(m.worker)
        return Done()

    async def _stop_training(self, m: StopTraining) -> Ending:
        self._stops = max(self._stops, m.number)
        await self.publish()

        def left() -> tuple[str, ...]:
            return tuple(
                name for name, w in self._workers.items() if w.active and w.stops < m.number
            )

        try:
            async with asyncio.timeout(m.patience), self._departed:
                await self._departed.wait_for(lambda: not left())
        except TimeoutError:
            pass
        return Ending(left())

    async def _get_incidents(self, m: GetIncidents) -> Incidents:
        return Incidents(self.losses.found, tuple(self.failovers.found))

    async def _close_group(self, m: CloseGroup) -> Done:
        self._closed = True
        await self.publish()
        return Done()

    async def _enter_worker(self, m: EnterWorker) -> Entered:
        before = self._workers.get(m.worker)
        if before is not None and before.token == m.token:
            return Entered(before.incarnation)
        if m.task in self._returned:
            return Entered(0, self._returned[m.task])
        if m.stops < self._stops:  # it was under way when the training was stopped
            raise TrainingStopped(STOPPED)
        incarnation = before.incarnation + 1 if before else 1
        self._follow(m.watched)
        worker = _Worker(incarnation, m.address, m.token, True, m.stops, m.watched)
        self._workers[m.worker] = worker
        self._worker_leases.grant(m.worker)
        self._emit(WorkerJoined(self._clock.now(), m.worker, incarnation, m.node))
        if before is not None and before.active:  # another process has taken the name
            await self._tell_of(self.losses.left(m.worker, before.incarnation))
        return Entered(incarnation)

    async def _exit_worker(self, m: ExitWorker) -> Done:
        self._dismissed.discard(m.worker)
        worker = self._workers.get(m.worker)
        if m.returned is not None and worker is not None and worker.incarnation == m.incarnation:
            self._returned[m.returned.task] = m.returned
        stated = self.losses.stated(m.worker, m.incarnation, m.statement, final=True)
        await self._tell_of(stated)
        await self._remove_worker(m.worker, m.incarnation, m.reason)
        if m.called:  # it asks for no result again, as one might that is only silent
            await self._evict_from_all(UpdateId(f"{m.worker}{CALLS}", m.incarnation, 0))
        return Done()

    # -- what is known ---------------------------------------------------------------------------

    def _views(self) -> list[View]:
        return [controller.view for controller in self._controllers]

    def _table(self) -> Table:
        views = tuple(self._views())
        complete = all(controller.is_whole for controller in self._controllers)
        seeds = tuple(self.seeds.values())
        wanted = self.part.wanted if self.part is not None else ()
        keepers, leaving = (self.stores, self.mailboxes), self.scaling.leaving
        closed = self._closed
        lost = self.losses.restorations, self.losses.revision
        return Table(
            *(self._version, views, *keepers, seeds, complete, closed, wanted, leaving),
            *(*lost, self._stops, self.failovers.count),
        )

    async def publish(self) -> None:
        """Let everybody who waits for a new table have it."""
        self.scaling.look()
        self._failures.look(sum(view.serving for view in self._views()))
        self.failovers.look(self._views())
        async with self._published:
            self._version += 1
            self._published.notify_all()

    def decided(self, view: View, head: Endpoint, how: str) -> None:
        """Record how a shard is to go on after a change of its members."""
        node = self.members.node(head)
        self._emit(Decided(self._clock.now(), view.shard, view.epoch, node, how))

    def restored(self, view: View, brought: Brought, *, certain: bool) -> None:
        """Find out what was lost with a shard's last state: every worker is asked.

        What is found at once is published with the view.
        """
        active = {name: w.incarnation for name, w in self._workers.items() if w.active}
        found = self.losses.restored(
            *(view.shard, view.epoch, brought, self._clock.now()),
            certain=certain,
            after=self._version,
            active=active,
            cause=self.failovers.restored(view.shard, view.epoch, brought),
        )
        self._failures.restored()
        self._report(found)

    def _report(self, losses: Sequence[Loss]) -> None:
        """Record losses of acknowledged updates."""
        now = self._clock.now()
        for loss in losses:
            what = loss.updates, loss.exact, loss.source, loss.version, loss.cause
            self._emit(LossReported(now, loss.shard, loss.epoch, *what))

    async def _tell_of(self, losses: Sequence[Loss]) -> None:
        """Record losses, and failovers whose cost is known by that, and let everybody know."""
        self._report(losses)
        if losses or (self.failovers.await_cost and self.losses.is_settled):
            await self.publish()

    def load(self, host: Endpoint) -> int:
        """How many replicas a host has, or is about to have."""
        return sum(
            host in (*controller.view.chain, controller.reserved)
            for controller in self._controllers
        )

    def may_hold(self, info: HostInfo, shard: int) -> bool:
        """Whether a host may have a replica of a shard."""
        return self.scaling.may_hold(info, shard)

    def is_reserve(self, host: Endpoint) -> bool:
        """Whether a host is more than the wanted number of servers."""
        return self.scaling.is_reserve(host)

    def preferred(self, shard: int) -> Sequence[Endpoint]:
        """The hosts that are to hold a shard, the first before others; none: all are alike."""
        return self.scaling.preferred(shard)

    def moved(self, view: View, move: Move[Endpoint], seconds: float, pause: float) -> None:
        """Record that a replica has moved."""
        source, target = (self.members.node(host) for host in (move.source, move.target))
        nbytes = self._group.layout.shards[view.shard].nbytes
        now, epoch = self._clock.now(), view.epoch
        self._emit(Moved(now, view.shard, epoch, source, target, nbytes, seconds, pause))

    async def came_to_rest(self) -> None:
        """Have new mailboxes used that had to wait, and begin the next move, if there is one."""
        changed = self._appoint_keepers()
        self.scaling.consider()
        if self.scaling.look() or changed:
            await self.publish()

    # -- hosts that come and go --------------------------------------------------------------------

    async def _use_hosts(self) -> None:
        """There are other hosts to be used than before."""
        self._appoint_keepers()
        for controller in self._controllers:
            controller.wake()
        await self.publish()

    async def _lose_host(self, info: HostInfo, by: str) -> None:
        """Go on without a host, which serves nobody any more."""
        theirs = [
            controller for controller in self._controllers if info.host in controller.view.chain
        ]
        for controller in self._controllers:
            if controller in theirs:
                controller.unsettle(without=info.host)
                controller.interrupt()
                self._detected(controller, info, by)
            if info.host in (controller.reserved, *self.stores, *self.mailboxes):
                controller.interrupt()
            if info.host == controller.reserved:
                controller.reserved = None  # it may be counted on again at once, but has nothing
            controller.store_lost(info.host)
            controller.wake()
        gone = [t.view.shard for t in theirs if t.begun and not t.view.chain]
        if gone and self.cuts is not None:
            self._roll_back(gone[0])
        self._appoint_keepers(lost=info.host)
        await self.publish()

    async def _suspend_host(self, info: HostInfo, by: str) -> None:
        """Make the shards wait all of whose replicas are silent."""
        for controller in self._controllers:
            chain = controller.view.chain
            if info.host in chain and all(map(self.members.is_silent, chain)):
                controller.unsettle()
                controller.interrupt()
                self._detected(controller, info, by)
        await self.publish()

    def _detected(self, controller: ShardController, info: HostInfo, by: str) -> None:
        view = controller.view
        serving = any(not self.members.is_silent(member) for member in view.chain)
        now = self._clock.now()
        self._emit(Detected(now, view.shard, view.epoch, info.node, serving, by=by))
        self.failovers.lost(view.shard, info.node, by)

    def _appoint_keepers(self, lost: Endpoint | None = None) -> bool:
        """Choose who keeps states and mail; return whether that changes.

        Then the shards enter a new epoch: their servers fill a new store, and close a new mailbox.
        While a shard is down no mailbox is added that lacks what is in the others, nor is one left
        that is in use: nobody would look into it again.
        """
        before = self.stores, self.mailboxes
        self.stores = self._choose_stores(lost)
        boxes = [box for box in self.mailboxes if box in self.members and box != lost]
        if not (boxes and self._any_down):
            hosts = self.scaling.usable
            kept = [box for box in boxes if box in hosts and hosts[box].role == "mailbox"]
            able = (*kept, *_of_role(hosts, "mailbox"), *self.stores)
            boxes = list(dict.fromkeys(able))[: self._group.recovery.stores]
        self.mailboxes = tuple(boxes)
        after = self.stores, self.mailboxes
        changed = after != before or lost in (*self.stores, *self.mailboxes)
        if changed and all(after) and self._group.recovery.needs_store:
            self._begin_epochs()
        return changed

    def _begin_epochs(self) -> None:
        """Have all shards enter a new epoch, with other keepers."""
        for controller in self._controllers:
            if controller.view.chain or controller.reserved is not None:
                controller.unsettle()
            controller.interrupt()
            controller.wake()

    def _do_without_mailbox(self, box: Endpoint) -> bool:
        """Use a mailbox no more that a worker cannot reach, until every shard is served.

        Another one has all the mail that is in it, and is in reach of the shards' servers.
        """
        others = [other for other in self.mailboxes if other != box]
        usable = any(
            other in self.members
            and not self.members.is_silent(other)
            and not any(controller.cannot_reach(other) for controller in self._controllers)
            for other in others
        )
        if not usable or box not in self.mailboxes or not self._any_down:
            return False
        self.mailboxes = tuple(others)
        self._begin_epochs()
        return True

    def _choose_stores(self, lost: Endpoint | None) -> tuple[Endpoint, ...]:
        """Those that keep states already before others; drained ones come first, and go last."""
        hosts, number = self.scaling.usable, self._group.recovery.stores
        stores = [store for store in self.stores if store in hosts and store != lost]
        stores += [host for host in _of_role(hosts, "store") if host not in stores]
        return (*self._not_replaced_by(stores[:number]), *stores[:number])

    def _not_replaced_by(self, stores: Sequence[Endpoint]) -> list[Endpoint]:
        """The drained stores that have a state, until these are enough and have all states."""
        begun = [controller for controller in self._controllers if controller.begun]
        copied = all(each.keeps_state_at(store) for each in begun for store in stores)
        if copied and len(stores) == self._group.recovery.stores:
            return []
        return [h for h in self.scaling.drained if any(each.keeps_state_at(h) for each in begun)]

    @property
    def _any_down(self) -> bool:
        """Whether a shard is down, so that it may need what the store and the mailbox have."""
        return any(
            controller.begun and not controller.view.serving for controller in self._controllers
        )

    def _holds_anything(self, host: Endpoint) -> bool:
        """Whether a host has a replica, or keeps states or mail, or is about to."""
        return self.load(host) > 0 or host in (*self.stores, *self.mailboxes)

    def _copies_beside(self, host: Endpoint) -> set[Endpoint]:
        chains = [c.view.chain for c in self._controllers if host in c.view.chain]
        return {other for others in (*chains, self.stores) for other in others} - {host}

    def _holds_only_copy(self, host: Endpoint) -> bool:
        """Whether what a host holds is lost if it is given up, though it should not be."""
        if host in (*self.stores, *self.mailboxes):
            roles = ("store",) if host in self.stores else STORE_ROLES
            able = [h for h, info in self.scaling.usable.items() if info.role in roles]
            nobody_else = not {*able, *self.stores} - {host}
            return nobody_else or (self._any_down and not self._is_kept_without(host))
        return any(controller.is_last_copy(host) for controller in self._controllers)

    def _is_kept_without(self, host: Endpoint) -> bool:
        """Whether hosts that can be heard have every state, and all mail, that a host has."""

        def heard(others: Iterable[Endpoint]) -> list[Endpoint]:
            return [o for o in others if o != host and self.members.is_heard_after(o, host)]

        stores, boxes = heard(self.stores), heard(self.mailboxes)
        states = all(
            not controller.begun
            or any(map(controller.keeps_state_at, stores))
            or bool(heard(controller.view.chain))
            for controller in self._controllers
        )
        return (states or host not in self.stores) and (bool(boxes) or host not in self.mailboxes)

    def refuse_cut(self, shard: int, cut: int) -> None:
        """Have all shards go back to the cut before this one, which is damaged."""
        if self.cuts is not None and self.cuts.newest == cut and self.cuts.refuse(cut):
            self._roll_back(shard)

    def _roll_back(self, shard: int) -> None:
        """Have all shards go back to the newest cut."""
        assert self.cuts is not None
        self.cuts.roll_back(shard)
        for controller in self._controllers:
            if controller.begun:
                controller.forsake()

    # -- workers -----------------------------------------------------------------------------------

    def _donors(self) -> set[str]:
        """The workers that take part."""
        active = {name: worker for name, worker in self._workers.items() if worker.active}
        return {donor_name(name, worker.incarnation) for name, worker in active.items()}

    async def admit_present(self, view: View, host: Endpoint) -> None:
        """Enter every worker in the clock table of a shard before it is served again.

        What was restored may be older than a worker's own join, and nobody would wait for it.
        """
        if isinstance(self._group.consistency, ASP):
            return
        timings = self._group.timings
        ids = [UpdateId(name, w.incarnation, 0) for name, w in self._workers.items() if w.active]
        joins = [
            Push(view.shard, view.epoch, Operation("join", id), False, timings.hold) for id in ids
        ]
        calls = (self._transport.call(host, join, timings.call) for join in joins)
        await asyncio.gather(*calls)

    async def evict_absent(self, shard: int) -> None:
        """Take workers that are gone out of the shard's clock table, wherever that comes from."""
        absent = [
            UpdateId(name, worker.incarnation, 0)
            for name, worker in self._workers.items()
            if not worker.active
        ]
        if absent:
            await self._evict(self._controllers[shard], absent)

    async def _worker_is_silent(self, name: str) -> None:
        self._worker_leases.end(name)
        incarnation = self._workers[name].incarnation
        self.tasks.start(self._remove_worker(name, incarnation, "silent"))

    async def _remove_worker(self, name: str, incarnation: int, reason: str) -> None:
        worker = self._workers.get(name)
        if worker is None or worker.incarnation != incarnation or not worker.active:
            return
        self._workers[name] = replace(worker, active=False, silent=reason == "silent")
        self._worker_leases.end(name)
        left = WorkerLeft(self._clock.now(), name, incarnation, reason)
        self._emit(left)
        if left.was_lost:
            await self._tell_of(self.losses.left(name, incarnation))
        await self._evict_from_all(UpdateId(name, incarnation, 0))
        async with self._departed:
            self._departed.notify_all()

    async def _evict_from_all(self, gone: UpdateId) -> None:
        await asyncio.gather(*(self._evict(controller, [gone]) for controller in self._controllers))

    async def _evict(self, controller: ShardController, workers: Sequence[UpdateId]) -> None:
        view = controller.view
        if view.serving:
            request = Evict(view.shard, view.epoch, tuple(workers))
            try:
                call = self._transport.call(view.chain[0], request, self._group.timings.call)
                durable: Durable = await call
            except DpsError:
                controller.wake()  # the shard is changing; it evicts again when it is settled
            else:
                # What it has of workers that are gone is what they were told, or would have been.
                for gone in workers:
                    if self._may_push_on(gone):
                        continue
                    known = durable.applied
                    counts = {name: known[name] for name in names_of(gone.worker) if name in known}
                    found = self.losses.has(view.shard, view.epoch, gone.incarnation, counts)
                    await self._tell_of(found)

    def _may_push_on(self, gone: UpdateId) -> bool:
        """Whether shards take further updates of a worker that was given up: asynchronous ones."""
        worker = self._workers.get(gone.worker)
        silent = worker is not None and worker.silent and worker.incarnation == gone.incarnation
        return silent and isinstance(self._group.consistency, ASP)


def _of_role(hosts: dict[Endpoint, HostInfo], role: str) -> list[Endpoint]:
    return [host for host, info in hosts.items() if info.role == role]
