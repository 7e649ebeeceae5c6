"""The coordinator: it knows which host holds which replica of which shard, in which epoch.

It grants leases, learns of hosts, workers and failures, and publishes the routing table. Its parts
decide what follows, each in a module of this package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from inspect import isawaitable
from typing import Any

from dps.core.names import STORE_ROLES
from dps.errors import DpsError, NotServing
from dps.events import Detected, Sink
from dps.protocol import messages as msg
from dps.protocol.coordinator.data_leases import DataLeases
from dps.protocol.coordinator.liveness import Membership
from dps.protocol.coordinator.losses import Failovers, Losses
from dps.protocol.coordinator.placement import Rebalancer
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.coordinator.snapshots import Snapshots
from dps.protocol.coordinator.workers import Workers
from dps.protocol.group import Group
from dps.protocol.tasks import Tasks, task_failed
from dps.protocol.transport import Clock, Endpoint, Monitors, Transport, Watched
from dps.recovery.durability import CoordinatorContext

# Requests that senders repeat anyway: one failed reply must not end the sender.
REPEATED = (msg.GetTable, msg.RenewLease, msg.RenewWorker, msg.Sighted)


class Coordinator:
    """Decides which hosts serve what. All calls come from one event loop."""

    def __init__(
        self, group: Group, transport: Transport, clock: Clock, emit: Sink, monitors: Monitors
    ) -> None:
        self.group = group
        self.transport = transport
        self.clock = clock
        self.emit = emit
        self.monitors = monitors
        self.tasks = Tasks(self.failed)
        self.stores: tuple[Endpoint, ...] = ()
        self.mailboxes: tuple[Endpoint, ...] = ()
        self.version = 0  # of the table
        self.members = Membership(self)
        self.part = group.recovery.durability.coordinator_part(
            CoordinatorContext(lambda: self.workers.donors, self.publish, clock, emit)
        )
        self.controllers = [ShardController(s, self) for s in range(len(group.layout.shards))]
        self.rebalancer = Rebalancer(self)
        self.cuts = Snapshots(self) if group.restores_together else None
        self.workers = Workers(self)
        self.data = DataLeases(self)
        self.losses = Losses(self)
        self.failovers = Failovers(self)
        self._closed = False
        self._published = asyncio.Condition()
        self._services: dict[type, Callable[[Any], Any]] = {
            msg.GetTable: self._get_table,
            msg.ReportFailure: self._report_failure,
            msg.ReportLink: self._report_link,
            msg.RenewLease: self._renew_lease,
            msg.Sighted: self._sighted,
            msg.AddHosts: lambda m: self.members.add(m.hosts),
            msg.Seeded: lambda m: self.controllers[m.shard].seeded(m.epoch, m.brought),
            msg.Scale: self._scale,
            msg.Drain: self._drain,
            msg.GetIncidents: lambda m: (self.losses.reported, self.failovers.reported),
            msg.CloseGroup: self._close_group,
            **self.workers.services,
            **self.data.services,
            **(self.part.services if self.part is not None else {}),
            **({msg.WantCut: self.cuts.want} if self.cuts is not None else {}),
        }

    async def handle(self, message: Any) -> Any:
        """Carry out one message and return its reply; raises `DpsError` to be sent back."""
        try:
            reply = self._services[type(message)](message)
            return await reply if isawaitable(reply) else reply
        except DpsError:
            raise
        except Exception as error:
            self.failed(error)
            if isinstance(message, REPEATED):
                raise NotServing(f"the coordinator has failed: {error!r}") from error
            raise

    def failed(self, error: Exception) -> None:
        """Record an exception, and look at all shards: it may have interrupted a change."""
        self.emit(task_failed(self.clock, "scheduler", error))
        for controller in self.controllers:
            for host in controller.view.chain:
                if self.members[host].given_up:
                    controller.unsettle(without=host)
            controller.look_again()

    async def lose(self, address: str, by: str) -> None:
        """Stop waiting for the workers of a process that seems to be gone."""
        # Its hosts are given up only when their end is proven or their lease is over.
        self.members.suspect(address, by)
        await self.workers.lose(address)

    # -- requests --------------------------------------------------------------------------------

    async def _get_table(self, m: msg.GetTable) -> msg.Table:
        with suppress(TimeoutError):
            async with asyncio.timeout(m.patience), self._published:
                await self._published.wait_for(lambda: self.version > m.after)
        return self._table()

    async def _report_failure(self, m: msg.ReportFailure) -> msg.Table:
        self.members.suspect(m.host.address, "client")
        return self._table()

    async def _report_link(self, m: msg.ReportLink) -> msg.Table:
        controller = self.controllers[m.shard]
        # A host that is silent to the coordinator too is busy, or unreachable for all.
        cut = self.members.leases.answered_for(m.host) > m.seconds
        if cut and m.epoch == controller.view.epoch:
            if m.host in controller.view.chain[1:]:
                if m.host in self.members:
                    self.members[m.host].excluded = True
            elif controller.do_without(m.host) or self._do_without_mailbox(m.host):
                await self.publish()
        return self._table()

    async def _renew_lease(self, m: msg.RenewLease) -> msg.Renewed:
        self.follow(m.watched)
        granted = await self.members.renew(m.host, m.life, m.watched)
        return msg.Renewed(granted, history=self.failovers.history)

    async def _sighted(self, m: msg.Sighted) -> None:
        for sighting in m.sightings:
            await self.members.sighted(Watched(m.monitor, sighting.number), sighting)
        await self.workers.sighted(m)

    async def _scale(self, m: msg.Scale) -> None:
        self.rebalancer.scale(m.servers)
        self.rebalancer.consider()
        await self.publish()

    async def _drain(self, m: msg.Drain) -> None:
        self.rebalancer.drain(m.host)
        await self.use_hosts()

    async def _close_group(self, m: msg.CloseGroup) -> None:
        self._closed = True
        await self.publish()

    def follow(self, watched: Watched | None) -> None:
        """Receive the reports of the monitor that watches a process, if one does."""
        if watched is not None:
            self.monitors.follow(watched.monitor)

    # -- the table -------------------------------------------------------------------------------

    @property
    def views(self) -> list[msg.View]:
        """The replicas of each shard."""
        return [controller.view for controller in self.controllers]

    def _table(self) -> msg.Table:
        return msg.Table(
            version=self.version,
            views=tuple(self.views),
            stores=self.stores,
            mailboxes=self.mailboxes,
            seeds=tuple(each.seed for each in self.controllers if each.seed is not None),
            complete=all(controller.is_whole for controller in self.controllers),
            closed=self._closed,
            wanted=self.part.wanted if self.part is not None else (),
            leaving=self.rebalancer.leaving,
            restorations=self.losses.restorations,
            losses=self.losses.revision,
            stops=self.workers.stops,
            failovers=self.failovers.count,
        )

    async def publish(self) -> None:
        """Publish a new table."""
        self.rebalancer.look()
        self.failovers.look(self.views)
        async with self._published:
            self.version += 1
            self._published.notify_all()

    async def came_to_rest(self) -> None:
        """After a shard settles, use new mailboxes that had to wait, and begin the next move."""
        changed = self._appoint_keepers()
        self.rebalancer.consider()
        if self.rebalancer.look() or changed:
            await self.publish()

    # -- hosts that join and are lost --------------------------------------------------------------

    async def use_hosts(self) -> None:
        """Use the present hosts, after their set has changed."""
        self._appoint_keepers()
        for controller in self.controllers:
            controller.wake()
        await self.publish()

    async def lose_host(self, info: msg.HostInfo, by: str) -> None:
        """Continue without a host, which no longer serves."""
        was_keeper = info.host in self.keepers
        self.stores = tuple(store for store in self.stores if store != info.host)
        self.mailboxes = tuple(box for box in self.mailboxes if box != info.host)
        served = [each for each in self.controllers if info.host in each.view.chain]
        for controller in self.controllers:
            if controller in served:
                controller.unsettle(without=info.host)
                self._detected(controller, info, by)
            if was_keeper or info.host == controller.reserved:
                controller.look_again()
            if info.host == controller.reserved:
                controller.reserved = None  # it may be used again at once, but is empty
            controller.store_lost(info.host)
            controller.wake()
        gone = [each.view.shard for each in served if each.begun and not each.view.chain]
        if gone and self.cuts is not None:
            self.cuts.roll_back(gone[0])
        self._appoint_keepers(was_keeper)
        await self.publish()

    async def suspend_host(self, info: msg.HostInfo, by: str) -> None:
        """Stop serving the shards whose replicas are all silent."""
        for controller in self.controllers:
            chain = controller.view.chain
            if info.host in chain and all(self.members[each].silent for each in chain):
                controller.unsettle()
                self._detected(controller, info, by)
        await self.publish()

    def _detected(self, controller: ShardController, info: msg.HostInfo, by: str) -> None:
        view = controller.view
        serving = any(not self.members[member].silent for member in view.chain)
        now = self.clock.now()
        self.emit(Detected(now, view.shard, view.epoch, info.node, serving, by=by))
        self.failovers.lost(view.shard, info.node, by)

    def holds_only_copy(self, host: Endpoint) -> bool:
        """Whether to wait for a host: only it has some state or gradients, or can be a store."""
        if host in self.keepers:
            roles = ("store",) if host in self.stores else STORE_ROLES
            able = [h for h, info in self.rebalancer.usable.items() if info.role in roles]
            is_alone = not {*able, *self.stores} - {host}
            return is_alone or (self.any_down and not self._is_kept_without(host))
        return any(controller.is_last_copy(host) for controller in self.controllers)

    def _is_kept_without(self, host: Endpoint) -> bool:
        """Whether other reachable hosts have every state and buffered gradient of a host."""
        heard_after = self.members.leases.is_heard_after

        def heard(others: Iterable[Endpoint]) -> list[Endpoint]:
            return [other for other in others if other != host and heard_after(other, host)]

        stores, boxes = heard(self.stores), heard(self.mailboxes)
        states = all(
            not controller.begun
            or any(store in controller.stored for store in stores)
            or bool(heard(controller.view.chain))
            for controller in self.controllers
        )
        return (states or host not in self.stores) and (bool(boxes) or host not in self.mailboxes)

    # -- stores and mailboxes ----------------------------------------------------------------------

    @property
    def keepers(self) -> tuple[Endpoint, ...]:
        """The hosts that keep states or gradients now."""
        return (*self.stores, *self.mailboxes)

    @property
    def any_down(self) -> bool:
        """Whether a shard is down, so that it may need what the stores and mailboxes have."""
        return any(each.begun and not each.view.serving for each in self.controllers)

    def _appoint_keepers(self, one_was_lost: bool = False) -> bool:
        """Choose stores and mailboxes; return whether they have changed, or one is empty again."""
        # If so, the shards enter a new epoch, in which their servers fill every store and close the
        # mailboxes. Without a store, shards that are served stay served, and ack nothing. While a
        # shard is down, no mailbox is added, as it would lack the gradients in the others, and none
        # that is in use is dropped, as no server would read it again.
        before, hosts = (self.stores, self.mailboxes), self.rebalancer.usable
        number = self.group.recovery.stores
        # Drained stores come first and are dropped last; then come stores that are in use.
        kept = [store for store in self.stores if store in hosts]
        stores = list(dict.fromkeys((*kept, *_of_role(hosts, "store"))))[:number]
        self.stores = (*self._not_replaced_by(stores), *stores)
        boxes = [box for box in self.mailboxes if box in self.members]
        if not (boxes and self.any_down):
            kept = [box for box in boxes if box in hosts and hosts[box].role == "mailbox"]
            able = (*kept, *_of_role(hosts, "mailbox"), *self.stores)
            boxes = list(dict.fromkeys(able))[:number]
        self.mailboxes = tuple(boxes)
        changed = one_was_lost or (self.stores, self.mailboxes) != before
        if changed and self.stores and boxes and self.group.recovery.stores:
            self._begin_epochs()
        return changed

    def _begin_epochs(self) -> None:
        for controller in self.controllers:
            if controller.view.chain or controller.reserved is not None:
                controller.unsettle()
            controller.look_again()

    def _do_without_mailbox(self, box: Endpoint) -> bool:
        """Drop a mailbox that a worker cannot reach, until every shard is served."""
        # Another mailbox, which has the same gradients, must be in reach of the shards' servers.
        others = [other for other in self.mailboxes if other != box]
        usable = any(
            other in self.members
            and not self.members[other].silent
            and not any(other in controller.unreached for controller in self.controllers)
            for other in others
        )
        if not usable or box not in self.mailboxes or not self.any_down:
            return False
        self.mailboxes = tuple(others)
        self._begin_epochs()
        return True

    def _not_replaced_by(self, stores: Sequence[Endpoint]) -> list[Endpoint]:
        """The drained stores that have a state, until `stores` are enough and have all states."""
        begun = [controller for controller in self.controllers if controller.begun]
        copied = all(store in each.stored for each in begun for store in stores)
        if copied and len(stores) == self.group.recovery.stores:
            return []
        usable = self.rebalancer.usable
        drained = [host for host in self.members.hosts if host not in usable]
        return [host for host in drained if any(host in each.stored for each in begun)]


def _of_role(hosts: dict[Endpoint, msg.HostInfo], role: str) -> list[Endpoint]:
    return [host for host, info in hosts.items() if info.role == role]
