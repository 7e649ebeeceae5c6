"""Owns membership: which host holds which replica of which shard, in which epoch.

The coordinator keeps one wanted state (every shard served by a chain of the wanted length) and one
task per shard that brings the actual state towards it, step by step: reconfigure what is left of a
chain, else restore the shard on a free host, else lengthen its chain. Whatever fails is tried again
with what is known then. Every change of a shard's members begins a new epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dps.core.recovery import Chain, NoDurability, WorkerCache
from dps.core.updates import UpdateId
from dps.errors import DpsError, NotServing, TransportError
from dps.events import Detected, Rebuilt, Sink, WorkerJoined, WorkerLeft
from dps.protocol.group import Group
from dps.protocol.messages import (
    AddHosts,
    CloseGroup,
    Configure,
    Done,
    Entered,
    EnterWorker,
    Evict,
    ExitWorker,
    Extend,
    GetTable,
    HostInfo,
    Offer,
    Ping,
    ReportFailure,
    Restore,
    Seed,
    Seeded,
    Table,
    View,
    Wanted,
)
from dps.protocol.rebuild import Offers, donor_name
from dps.protocol.transport import Clock, Endpoint, Transport

# A client's report is checked with patience: a busy host must not be taken for a dead one.
PING = 2.0


@dataclass(slots=True)
class _Shard:
    """What the coordinator knows of one shard, and how its task is woken and interrupted."""

    view: View
    last_epoch: int = 0
    begun: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    step: asyncio.Timeout | None = None
    reserved: Endpoint | None = None
    seeded: asyncio.Event | None = None

    def next_epoch(self) -> int:
        """A number that no configuration of this shard has had."""
        self.last_epoch += 1
        return self.last_epoch

    def unsettle(self) -> None:
        """Let nobody use the shard until what is left of its chain has entered a new epoch."""
        self.view = View(self.view.shard, self.next_epoch(), self.view.chain, serving=False)

    def interrupt(self) -> None:
        """Have the step given up that is under way: it counts on a host that is lost."""
        if self.step is not None and not self.step.expired():
            self.step.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class _Worker:
    incarnation: int
    address: str
    active: bool


class Coordinator:
    """Decides who serves what. All calls come from one event loop."""

    def __init__(self, group: Group, transport: Transport, clock: Clock, emit: Sink) -> None:
        self._group = group
        self._transport = transport
        self._clock = clock
        self._emit = emit
        self._hosts: dict[Endpoint, HostInfo] = {}
        self._store: Endpoint | None = None
        self._workers: dict[str, _Worker] = {}
        self._shards = [
            _Shard(View(shard, 0, (), False)) for shard in range(len(group.layout.shards))
        ]
        self._seeds: dict[int, Seed] = {}
        self._offers = Offers()
        self._version = 0
        self._closed = False
        self._published = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._tend(shard)) for shard in self._shards]
        self._services: dict[type, Callable[[Any], Awaitable[Any]]] = {
            GetTable: self._get_table,
            ReportFailure: self._report_failure,
            AddHosts: self._add_hosts,
            Seeded: self._seeded,
            Offer: self._offer,
            CloseGroup: self._close_group,
            EnterWorker: self._enter_worker,
            ExitWorker: self._exit_worker,
        }

    async def handle(self, message: Any) -> Any:
        """Carry out one message and return its reply; raises `DpsError` to be sent back."""
        return await self._services[type(message)](message)

    async def close(self) -> None:
        """Stop deciding."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def lose(self, address: str, by: str) -> None:
        """Take note that the process at `address` is gone, whatever it was."""
        gone = [host for host in self._hosts if host.address == address]
        for host in gone:
            self._lose_host(host, by)
        for name, worker in list(self._workers.items()):
            if worker.address == address and worker.active:
                await self._remove_worker(name, worker.incarnation, "lost")
        if gone:
            await self._publish()

    # -- requests --------------------------------------------------------------------------------

    async def _get_table(self, m: GetTable) -> Table:
        try:
            async with asyncio.timeout(m.patience), self._published:
                await self._published.wait_for(lambda: self._version > m.after)
        except TimeoutError:
            pass
        return self._table()

    async def _report_failure(self, m: ReportFailure) -> Table:
        if m.host in self._hosts:
            await self._check(m.host, "client")
        return self._table()

    async def _add_hosts(self, m: AddHosts) -> Done:
        for info in m.hosts:
            if info.role == "store":
                self._store = info.host
            else:
                self._hosts[info.host] = info
        self._wake_all()
        await self._publish()
        return Done()

    async def _seeded(self, m: Seeded) -> Done:
        shard = self._shards[m.shard]
        if shard.seeded is not None and m.epoch == shard.view.epoch:
            shard.seeded.set()
        return Done()

    async def _offer(self, m: Offer) -> Done:
        await self._offers.take(m)
        return Done()

    async def _close_group(self, m: CloseGroup) -> Done:
        self._closed = True
        await self._publish()
        return Done()

    async def _enter_worker(self, m: EnterWorker) -> Entered:
        before = self._workers.get(m.worker)
        incarnation = before.incarnation + 1 if before else 1
        self._workers[m.worker] = _Worker(incarnation, m.address, active=True)
        self._emit(WorkerJoined(self._clock.now(), m.worker, incarnation, m.node))
        return Entered(incarnation)

    async def _exit_worker(self, m: ExitWorker) -> Done:
        await self._remove_worker(m.worker, m.incarnation, m.reason)
        return Done()

    # -- what is known ---------------------------------------------------------------------------

    def _table(self) -> Table:
        views = tuple(shard.view for shard in self._shards)
        complete = all(v.serving and len(v.chain) == self._group.replicas for v in views)
        seeds, wanted = tuple(self._seeds.values()), tuple(self._offers.wanted.values())
        return Table(self._version, views, self._store, seeds, complete, self._closed, wanted)

    async def _publish(self) -> None:
        async with self._published:
            self._version += 1
            self._published.notify_all()

    def _wake_all(self) -> None:
        for shard in self._shards:
            shard.wake.set()

    def _lose_host(self, host: Endpoint, by: str) -> None:
        node = self._hosts.pop(host).node
        for shard in self._shards:
            view = shard.view
            if host in view.chain:
                chain = tuple(member for member in view.chain if member != host)
                epoch = shard.next_epoch()
                shard.view = View(view.shard, epoch, chain, serving=False)
                shard.interrupt()
                now = self._clock.now()
                self._emit(Detected(now, view.shard, epoch, node, serving=bool(chain), by=by))
            if host == shard.reserved:
                shard.interrupt()
            shard.wake.set()

    async def _remove_worker(self, name: str, incarnation: int, reason: str) -> None:
        worker = self._workers.get(name)
        if worker is None or worker.incarnation != incarnation or not worker.active:
            return
        self._workers[name] = replace(worker, active=False)
        self._emit(WorkerLeft(self._clock.now(), name, incarnation, reason))
        await asyncio.gather(*(self._evict(shard, name, incarnation) for shard in self._shards))

    async def _evict(self, shard: _Shard, name: str, incarnation: int) -> None:
        view = shard.view
        if view.serving:
            request = Evict(view.shard, view.epoch, UpdateId(name, incarnation, 0))
            try:
                await self._transport.call(view.chain[0], request, self._group.timings.call)
            except DpsError:
                shard.wake.set()  # the shard is changing; it evicts again when it is settled

    async def _check(self, host: Endpoint, by: str) -> None:
        """Give a host up that does not answer."""
        try:
            await self._transport.call(host, Ping(), PING)
        except TransportError:
            # It may interrupt whoever asked for it, but must not end half-way itself.
            await asyncio.shield(self.lose(host.address, by))

    # -- towards what is wanted --------------------------------------------------------------------

    async def _tend(self, shard: _Shard) -> None:
        while True:
            await shard.wake.wait()
            shard.wake.clear()
            try:
                await self._advance_far(shard)
            except TimeoutError:
                shard.wake.set()
            except DpsError:
                # A host did not do as asked: it is going, or is not ready. Look again soon.
                await asyncio.sleep(self._group.timings.retry)
                shard.wake.set()

    async def _advance_far(self, shard: _Shard) -> None:
        """Take every step there is to take; raises `TimeoutError` when it is interrupted."""
        try:
            async with asyncio.timeout(None) as shard.step:
                while await self._advance(shard):
                    pass
                await self._evict_absent(shard)
        finally:
            shard.step = None

    async def _advance(self, shard: _Shard) -> bool:
        """Take one step towards what is wanted; return whether there may be another to take."""
        view = shard.view
        if view.chain and not view.serving:
            return await self._reconfigure(shard, view)
        if not view.chain:
            return await self._restore(shard, view)
        if len(view.chain) < self._group.replicas:
            return await self._extend(shard, view)
        return False

    async def _reconfigure(self, shard: _Shard, view: View) -> bool:
        """Have what is left of a chain enter the new epoch, then serve."""
        await self._configure(view)
        if shard.view == view:
            shard.view = replace(view, serving=True)
            await self._publish()
        return True

    async def _restore(self, shard: _Shard, view: View) -> bool:
        """Bring a shard without any replica back on a free host."""
        host = self._free_host(shard)
        if host is None or (self._group.recovery.needs_store and self._store is None):
            return False
        shard.unsettle()
        view = shard.view
        shard.reserved = host
        served = False
        try:
            await self._bring_back(shard, view, host)
            served = host in self._hosts
        finally:
            shard.reserved = None
            if served:
                shard.view = View(view.shard, view.epoch, (host,), serving=True)
                shard.begun = True
            else:
                shard.unsettle()  # the host may have closed the mailbox for its epoch
            await self._publish()
        return True

    async def _bring_back(self, shard: _Shard, view: View, host: Endpoint) -> None:
        durability = self._group.recovery.durability
        if not shard.begun or isinstance(durability, NoDurability | Chain):
            await self._have_seeded(shard, Seed(view.shard, view.epoch, host))
        elif isinstance(durability, WorkerCache):
            await self._rebuild(shard, view, host)
        else:
            await self._call(host, Restore(view.shard, view.epoch, host))

    async def _rebuild(self, shard: _Shard, view: View, host: Endpoint) -> None:
        """Have the worker with the freshest copy install it; without any, start from the first."""
        self._offers.ask(Wanted(view.shard, view.epoch, host))
        try:
            await self._publish()
            offer = await self._offers.best(view.shard, self._donors)
            seed = Seed(view.shard, view.epoch, host, offer.donor if offer else "")
            await self._have_seeded(shard, seed, offer)
        finally:
            self._offers.close(view.shard)
        if offer is not None:
            now = self._clock.now()
            age = now - offer.at
            self._emit(Rebuilt(now, view.shard, view.epoch, offer.donor, offer.version, age))

    def _donors(self) -> set[str]:
        """The workers that take part."""
        active = {name: worker for name, worker in self._workers.items() if worker.active}
        return {donor_name(name, worker.incarnation) for name, worker in active.items()}

    async def _have_seeded(self, shard: _Shard, seed: Seed, offer: Offer | None = None) -> None:
        """Ask whoever has the state to install it, and wait until that is done.

        Raises
        ------
        NotServing
            It was a worker's, which left, or does not offer it any more.
        """
        shard.seeded = asyncio.Event()
        self._seeds[seed.shard] = seed
        await self._publish()
        try:
            while not await _is_set(shard.seeded, self._group.timings.call if not offer else 0.05):
                if offer is None:
                    await self._check(seed.host, "coordinator")
                elif not (self._offers.stands(offer) and offer.donor in self._donors()):
                    await self._check(seed.host, "coordinator")
                    raise NotServing(f"shard {seed.shard}: {offer.donor} cannot give its copy")
        finally:
            shard.seeded = None
            del self._seeds[seed.shard]

    async def _extend(self, shard: _Shard, view: View) -> bool:
        """Add a replica at the tail of a chain that is too short."""
        host = self._free_host(shard)
        if host is None:
            return False
        longer = View(view.shard, shard.next_epoch(), (*view.chain, host), serving=True)
        shard.reserved = host
        joined = False
        try:
            await self._call(view.chain[-1], Extend(view.shard, view.epoch, host))
            await self._configure(longer)
            joined = shard.view == view and host in self._hosts
        except DpsError:
            await self._check(host, "coordinator")
            raise
        finally:
            shard.reserved = None
            if joined:
                shard.view = longer
            else:
                shard.unsettle()  # some members may count on the newcomer, or be in its epoch
            await self._publish()
        return True

    async def _configure(self, view: View) -> None:
        """Have the members of a view enter its epoch: the tail first, so that each can pass on."""
        for member in reversed(view.chain):
            await self._call(member, Configure(view.shard, view.epoch, view.chain, member))

    def _free_host(self, shard: _Shard) -> Endpoint | None:
        """The best host for one more replica: meant for this shard, else with the fewest."""
        candidates = [
            (host, info)
            for host, info in self._hosts.items()
            if host not in shard.view.chain and info.home in (-1, shard.view.shard)
        ]
        if not candidates:
            return None

        def rank(candidate: tuple[Endpoint, HostInfo]) -> tuple[bool, int, bool, str]:
            host, info = candidate
            load = sum(host in (*s.view.chain, s.reserved) for s in self._shards)
            meant_for_other_role = (info.role == "replica") != bool(shard.view.chain)
            return info.home not in (shard.view.shard,), load, meant_for_other_role, info.node

        return min(candidates, key=rank)[0]

    async def _evict_absent(self, shard: _Shard) -> None:
        """A state that was restored may count on workers that have left since it was saved."""
        for name, worker in list(self._workers.items()):
            if not worker.active:
                await self._evict(shard, name, worker.incarnation)

    async def _call(self, host: Endpoint, request: Any) -> None:
        try:
            await self._transport.call(host, request, self._group.timings.copy)
        except TransportError:
            # It may have been lost before it was added, so that nobody will tell of it again.
            await self._check(host, "coordinator")
            raise


async def _is_set(event: asyncio.Event, patience: float) -> bool:
    """Wait until an event happens, for so many seconds at most."""
    try:
        async with asyncio.timeout(patience):
            return await event.wait()
    except TimeoutError:
        return False
