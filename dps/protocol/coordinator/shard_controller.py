"""How one shard gets what is wanted: a chain of the wanted length that serves it.

A task takes one step at a time. It makes what is left of a chain enter a new epoch; or it restores
the shard on a free host; or it lengthens the chain; or it continues a move: the newcomer is added
at the tail, then the old holder leaves. A step that fails is retried with what is known then. Every
change of a shard's members begins a new epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dps.core.placement import Move
from dps.errors import (
    CheckpointCorrupt,
    DpsError,
    LeaseExpired,
    NotServing,
    StaleEpoch,
    TransportError,
)
from dps.events import Decided, Moved
from dps.protocol.coordinator.placement import ReplicaPlacement
from dps.protocol.messages import (
    Brought,
    CanReach,
    ClearMail,
    Configure,
    Extend,
    Keepers,
    Release,
    Restore,
    Seed,
    View,
)
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator

DONOR_SECONDS = 0.05  # how often to look whether a donor is still active


@dataclass(frozen=True, slots=True)
class _Stopped:
    """The old holder of a replica that is moved, which has left the epoch: `fence`, at `at`."""

    move: Move[Endpoint]
    holder: Endpoint
    fence: int
    at: float


class ShardController:
    """One shard's members, and the task that looks after them. Used from one event loop.

    The shard has `begun` once it was served: its state is more than the initial values. The host
    that is `reserved` is about to become a replica.
    """

    def __init__(self, shard: int, coordinator: Coordinator) -> None:
        self.view = View(shard, 0, (), serving=False)
        self.begun = False
        self.reserved: Endpoint | None = None
        self.moving: Move[Endpoint] | None = None
        self._coordinator = coordinator
        self._members = coordinator.members
        self._group = coordinator.group
        self._timings = coordinator.group.timings
        self._durability = coordinator.group.recovery.durability.above
        self._last_epoch = 0
        self._last_host: Endpoint | None = None
        self._forsaken: tuple[Endpoint, ...] = ()
        self._stored: tuple[Endpoint, ...] = ()  # the stores that have the state that was acked
        self._unreached: set[Endpoint] = set()  # the stores that the shard is served without
        # Hosts that may have got the state from a store since the shard was lost, from which epoch.
        self._tried: dict[Endpoint, int] = {}
        self._placement = ReplicaPlacement(shard, coordinator, self.wake)
        self._awake = asyncio.Event()
        self._step: asyncio.Timeout | None = None
        self._seeded: asyncio.Event | None = None
        self._brought: Brought | None = None
        self._failed_attempts = 0
        self._began_moving = 0.0
        self._stopped: _Stopped | None = None
        coordinator.tasks.keep(self._tend, self._timings.retry)

    def wake(self) -> None:
        """Look whether there is something to do."""
        self._awake.set()

    def interrupt(self) -> None:
        """Give up the step that is under way: it relies on what has changed."""
        if self._step is not None and not self._step.expired():
            self._step.reschedule(asyncio.get_running_loop().time())

    def look_again(self) -> None:
        """Give up the step that is under way, and choose another."""
        self.interrupt()
        self.wake()

    def unsettle(self, without: Endpoint | None = None, also: Endpoint | None = None) -> None:
        """Stop serving the shard until what is left of its chain has entered a new epoch.

        `also` is a newcomer that becomes its tail.
        """
        chain = tuple(member for member in self.view.chain if member != without)
        chain += (also,) if also is not None else ()
        self.view = View(self.view.shard, self._next_epoch(), chain, serving=False)

    def forsake(self) -> None:
        """Give the shard's present state up, though its replicas live."""
        if self.view.chain:
            self._last_host, self._forsaken = self.view.chain[0], self.view.chain
        self.view = View(self.view.shard, self._next_epoch(), (), serving=False)
        self.look_again()

    def seeded(self, epoch: int, brought: Brought) -> None:
        """Note that the initial values are installed, or a worker's copy."""
        if self._seeded is not None and epoch == self.view.epoch:
            self._brought = brought
            self._seeded.set()

    def store_lost(self, host: Endpoint) -> None:
        """Note that no state is kept on a host: it may come back, but empty."""
        self._stored = tuple(store for store in self._stored if store != host)
        self._unreached.discard(host)

    def do_without(self, store: Endpoint) -> bool:
        """Drop a store that the shard's server cannot reach, if another can be used.

        Another one has the state, or receives it from the server.
        """
        others = {*self._stores} - {store}
        if store not in self._stores or not (
            others if self.view.chain else others & {*self._stored}
        ):
            return False
        self._unreached.add(store)
        self._placement.avoid(store)
        self.unsettle()
        self.look_again()
        return True

    def cannot_reach(self, store: Endpoint) -> bool:
        """Whether the shard's server cannot reach a store."""
        return store in self._unreached

    @property
    def is_whole(self) -> bool:
        """Whether the shard is served, with as many copies as it is to have."""
        if not self.view.serving or len(self.view.chain) < self._group.replicas:
            return False
        return self._durability.stores == 0 or set(self._stored) == {*self._coordinator.stores}

    def is_last_copy(self, host: Endpoint) -> bool:
        """Whether a host has the only copy of a state that must not be lost with one host.

        A replica does not count that is stopped, or that was silent lately.
        """
        chain = self.view.chain
        others = [m for m in chain if m != host and self._members.is_live(m)]
        alone = host in chain and not others
        restorable = not self.begun or self._is_kept
        return self._durability.is_last_copy(alone, host in self._tried, restorable)

    def keeps_state_at(self, host: Endpoint) -> bool:
        """Whether the shard's state may be restored from what a host keeps."""
        return host in self._stored

    def can_move_to(self, host: Endpoint) -> bool:
        """Whether a replica may be moved now: the shard is whole, and the host has not failed."""
        whole = self.view.serving and len(self.view.chain) == self._group.replicas
        return whole and not self._lacks_store and not self._placement.is_avoided(host)

    def move(self, move: Move[Endpoint]) -> None:
        """Move a replica, unless something that this needs is lost meanwhile."""
        self.moving, self._began_moving = move, asyncio.get_running_loop().time()
        self.wake()

    def _next_epoch(self) -> int:
        self._last_epoch += 1
        return self._last_epoch

    # -- step by step ----------------------------------------------------------------------------

    async def _tend(self) -> None:
        # A task before this one may have failed between a decision and its announcement.
        await self._coordinator.publish()
        self.wake()
        while True:
            await self._awake.wait()
            self._awake.clear()
            try:
                await self._advance_far()
            except TimeoutError:
                self.wake()
            except DpsError:
                # A host did not do as asked: it is going, or is not ready. Look again soon.
                await asyncio.sleep(self._timings.retry)
                self.wake()

    async def _advance_far(self) -> None:
        """Take every step there is to take; raises `TimeoutError` when it is interrupted."""
        try:
            async with asyncio.timeout(None) as self._step:
                while await self._advance():
                    pass
                await self._coordinator.workers.evict_absent(self)
                await self._coordinator.came_to_rest()
        finally:
            self._step = None

    async def _advance(self) -> bool:
        """Take one step towards what is wanted; return whether there may be another to take."""
        view = self.view
        if view.chain and not view.serving:
            return await self._reconfigure(view)
        if not view.chain:
            return await self._restore()
        if len(view.chain) < self._group.replicas:
            host = self._free_host
            return host is not None and await self._extend(view, host)
        for store in self._unreached:
            if not self._placement.is_avoided(store):
                return await self._use_again(view, store)
        return await self._move_on(view)

    async def _reconfigure(self, view: View) -> bool:
        """Make what is left of a chain enter the new epoch, then serve."""
        served = replace(view, chain=self._remaining, serving=True)
        silent = any(self._members.is_silent(member) for member in served.chain)
        if silent or self._lacks_store:
            return False
        keepers = self._keepers
        self._decide(view, served.chain[0], "reconfigure")
        await self._configure(served)
        if self.view == view and self._keepers == keepers:
            self._note_stored(keepers)
            self._serve(served)
            await self._coordinator.publish()
            self._end_move()
        return True

    @property
    def _remaining(self) -> tuple[Endpoint, ...]:
        """The members of the chain that will serve.

        One that stopped for a move may lack what the others have committed since, so it comes back
        only if they are all lost.
        """
        stopped = self._stopped.holder if self._stopped is not None else None
        others = tuple(member for member in self.view.chain if member != stopped)
        return others or self.view.chain

    async def _restore(self) -> bool:
        """Bring a shard without any replica back on a free host."""
        host = self._holder or self._free_host
        if host is None or self._lacks_store:
            return False
        self.reserved = host
        try:
            await self._fence_forsaken(host)
            await self._restore_on(host)
        finally:
            self.reserved = None
        return True

    async def _restore_on(self, host: Endpoint) -> None:
        self.unsettle()
        view, keepers = self.view, self._keepers
        self._decide(view, host, "restore")
        served = False
        try:
            brought = await self._bring_back(view, host)
            await self._coordinator.workers.admit_active(view, host)
            # A server that was told of lost keepers uses them for as long as the epoch lasts.
            served = (self.view, self._keepers) == (view, keepers) and self._is_coming(host)
        except DpsError:
            self._placement.avoid(host)
            raise
        finally:
            if served:
                self._serve(View(view.shard, view.epoch, (host,), serving=True))
                if self.begun:
                    # An earlier attempt may have applied mail to what is now taken for what it was.
                    mail = self._failed_attempts and self._group.recovery.uses_mailbox
                    self._coordinator.failovers.restored(self.view, brought, certain=not mail)
                self.begun, self._forsaken = True, ()
                self._note_stored(keepers)
                self._stopped = None
                self._failed_attempts = 0
                self._tried = {}
            else:
                self.unsettle()  # the host may have closed the mailbox for its epoch
                self._failed_attempts += 1
            await self._coordinator.publish()

    def _decide(self, view: View, head: Endpoint, how: str) -> None:
        now, node = self._coordinator.clock.now(), self._members.node(head)
        self._coordinator.emit(Decided(now, view.shard, view.epoch, node, how))

    def _serve(self, view: View) -> None:
        """Let clients use the shard, which has what was in its mailbox, and clear that."""
        self.view = view
        if self._group.recovery.uses_mailbox:
            clear = ClearMail(view.shard, view.epoch)
            for mailbox in self._coordinator.mailboxes:
                self._send(clear, partial(self._while_at, view, mailbox))

    def _while_at(self, view: View, mailbox: Endpoint) -> Endpoint | None:
        return mailbox if self.view == view and mailbox in self._coordinator.mailboxes else None

    @property
    def _free_host(self) -> Endpoint | None:
        return self._placement.best(self.view.chain, self._last_host)

    @property
    def _holder(self) -> Endpoint | None:
        """A host that may have got the state from a store that was lost before it served."""
        there = [host for host in self._tried if host in self._members]
        return min(there, key=self._placement.is_avoided) if there and not self._is_kept else None

    async def _fence_forsaken(self, host: Endpoint) -> None:
        """Before another host has the shard, take others out of the epoch that clients know.

        They live, and their leases are not over, so they would go on to answer. The host itself is
        out when it restores the shard; if it does not, the next one has to fence it.
        """
        for forsaken in self._forsaken:
            if forsaken != host and forsaken in self._members:
                shard, epoch = self.view.shard, self._next_epoch()
                fence = Configure(shard, epoch, (forsaken,), forsaken, keepers=self._keepers)
                try:
                    await self._call(forsaken, fence)
                except LeaseExpired:
                    raise  # it may renew its lease, and serve on
                except NotServing:
                    continue  # it has nothing of the shard
        self._forsaken = tuple(forsaken for forsaken in self._forsaken if forsaken == host)

    async def _bring_back(self, view: View, host: Endpoint) -> Brought:
        part, cuts = self._coordinator.part, self._coordinator.cuts
        restore = Restore(view.shard, view.epoch, host, self._keepers)
        if self.begun and part is not None:
            install = partial(self._install, view, host)
            brought: Brought = await part.restore(view.shard, view.epoch, host, install)
        elif self.begun and cuts is not None:
            cut = cuts.newest
            try:
                brought = await self._call(host, replace(restore, cut=cut))
            except CheckpointCorrupt:  # all shards have to do with the one before
                self._coordinator.refuse_cut(view.shard, cut)
                raise
        elif self._is_kept:
            self._tried.setdefault(host, view.epoch)
            brought = await self._call(host, restore)
        elif host in self._tried:
            try:
                brought = await self._call(host, replace(restore, since=self._tried[host]))
            except StaleEpoch:  # the earlier attempt has brought nothing to it
                del self._tried[host]
                raise
        elif self.begun and self._group.recovery.durability.has_layer_below:
            brought = await self._call(host, replace(restore, from_below=True))
        else:
            brought = await self._install(view, host)
        return brought

    @property
    def _is_kept(self) -> bool:
        return self.begun and self._durability.is_restorable(self._stored, self._stores)

    @property
    def _stores(self) -> tuple[Endpoint, ...]:
        """The stores to use: those that the server reaches, if any of them has the state."""
        stores = self._coordinator.stores
        reached = tuple(store for store in stores if store not in self._unreached)
        has_state = bool(self.view.chain) or any(store in self._stored for store in reached)
        return reached if reached and has_state else stores

    def _note_stored(self, keepers: Keepers) -> None:
        """Note that the stores of an epoch have what the shard is served with."""
        self._stored = keepers.stores
        self._unreached.difference_update(keepers.stores)

    async def _use_again(self, view: View, store: Endpoint) -> bool:
        """Use a store again that was out of reach, if the shard's server reaches it now."""
        self._placement.avoid(store)  # else it is asked again after a while
        request = CanReach(view.shard, view.epoch, store)
        await self._coordinator.transport.call(view.chain[-1], request, self._timings.call)
        self._unreached.discard(store)
        if self.view == view:
            self.unsettle()
            await self._coordinator.publish()
        return True

    @property
    def _stays_durable(self) -> bool:
        """Whether a new tail can continue without anything being written."""
        same = set(self._stored) == set(self._stores)
        return same and self._durability.seconds is None

    @property
    def _lacks_store(self) -> bool:
        return self._durability.stores > 0 and not self._coordinator.stores

    @property
    def _keepers(self) -> Keepers:
        """The stores and mailboxes of the next epoch; stores that have the state come first."""
        stores = sorted(self._stores, key=lambda store: store not in self._stored)
        whole = sum(store in self._stored for store in stores)
        return Keepers(tuple(stores), self._coordinator.mailboxes, whole)

    async def _install(
        self,
        view: View,
        host: Endpoint,
        donor: str = "",
        stands: Callable[[], bool] | None = None,
    ) -> Brought:
        """Publish that a host must be given the state, and wait until it has it.

        Raises `NotServing` if a worker's copy is wanted that does not stand any more.
        """
        self._seeded = installed = asyncio.Event()
        seed = Seed(view.shard, view.epoch, host, self._keepers, donor)
        self._coordinator.seeds[view.shard] = seed
        await self._coordinator.publish()
        try:
            patience = self._timings.call if stands is None else DONOR_SECONDS
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience):
                        await installed.wait()
                        break
                gone = stands is not None and not stands()
                if stands is None or gone:
                    self._members.suspect(host.address, "coordinator")
                if gone:
                    raise NotServing(f"shard {view.shard}: {donor} cannot give its copy")
        finally:
            self._seeded = None
            del self._coordinator.seeds[view.shard]
        assert self._brought is not None
        return self._brought

    async def _extend(self, view: View, host: Endpoint) -> bool:
        """Add a replica at the tail of a chain."""
        longer = View(view.shard, self._next_epoch(), (*view.chain, host), serving=True)
        self.reserved = host
        has_all, joined = False, False
        try:
            await self._call(view.chain[-1], Extend(view.shard, view.epoch, host, self._keepers))
            has_all = True
            await self._configure(longer, kept=self._stays_durable)
            joined = self.view == view and self._is_coming(host)
        except DpsError:
            self._members.suspect(host.address, "coordinator")
            self._placement.avoid(host)
            raise
        finally:
            there = has_all and self._is_coming(host)
            self.reserved = None
            if joined:
                self._serve(longer)
            else:
                # Some members may count on the newcomer, or be in its epoch. Nothing is acked any
                # more that it does not have: it may be the last one that has it.
                self.unsettle(also=host if there else None)
            await self._coordinator.publish()
        return True

    def _is_coming(self, host: Endpoint) -> bool:
        return self.reserved == host and host in self._members

    # -- moves -----------------------------------------------------------------------------------

    async def _move_on(self, view: View) -> bool:
        """Take the next step of a move, if there is one and nothing was lost that it needs."""
        move = self.moving
        if move is None:
            return False
        source, target = move.source, move.target
        if target in view.chain and source is not None and len(view.chain) > self._group.replicas:
            return await self._switch(view, move, source)
        info = self._members.hosts.get(target)
        able = info is not None and self._coordinator.rebalancer.may_hold(info, view.shard)
        if able and target not in view.chain and source in view.chain and self.can_move_to(target):
            return await self._extend(view, target)
        self.moving = None
        return True

    async def _switch(self, view: View, move: Move[Endpoint], source: Endpoint) -> bool:
        """Remove the old holder: the others have acknowledged all that it has.

        It stops before they serve, so that both never answer, but has to come back if they are lost
        before that: so it is let go only then. Once it has stopped there is no way back, because
        the others may commit something without it at any time.
        """
        left = tuple(member for member in view.chain if member != source)
        fence = self._next_epoch()  # nothing that it still passes on is of their epoch
        stopped = _Stopped(move, source, fence, asyncio.get_running_loop().time())
        switched = False
        try:
            out = Configure(view.shard, fence, left, source, keepers=self._keepers)
            await self._call(source, out)
            if source in self.view.chain:
                self._stopped = stopped
            shorter = View(view.shard, self._next_epoch(), left, serving=True)
            await self._configure(shorter, kept=self._stays_durable)
            switched = self.view == view
        finally:
            if switched:
                self._serve(shorter)
            else:
                self.unsettle()
            await self._coordinator.publish()
        self._end_move()
        return True

    def _end_move(self) -> None:
        """Release the host that stopped for a move, now that others serve."""
        stopped, self._stopped = self._stopped, None
        if stopped is None or stopped.holder in self.view.chain:
            return
        self.moving = None
        if stopped.move.target in self.view.chain:
            self._record_move(stopped)
        # Until the host does it, that only costs memory.
        release = Release(self.view.shard, stopped.fence)
        self._send(release, lambda: stopped.holder if stopped.holder in self._members else None)

    def _record_move(self, stopped: _Stopped) -> None:
        now = asyncio.get_running_loop().time()
        self._coordinator.emit(
            Moved(
                self._coordinator.clock.now(),
                self.view.shard,
                self.view.epoch,
                source=self._members.node(stopped.move.source),
                target=self._members.node(stopped.move.target),
                nbytes=self._group.layout.shards[self.view.shard].nbytes,
                seconds=now - self._began_moving,
                pause_seconds=now - stopped.at,
            )
        )

    # -- requests --------------------------------------------------------------------------------

    async def _configure(self, view: View, kept: bool = False) -> None:
        """Make the members of a view enter its epoch: the tail first, so that each can pass on."""
        for member in reversed(view.chain):
            enter = Configure(
                view.shard, view.epoch, view.chain, member, kept, keepers=self._keepers
            )
            await self._call(member, enter)

    def _send(self, request: Any, whom: Callable[[], Endpoint | None]) -> None:
        """Repeat a request in the background until it is carried out, or `whom` returns None."""

        async def send() -> None:
            while (host := whom()) is not None:
                with suppress(DpsError):
                    await self._coordinator.transport.call(host, request, self._timings.call)
                    return
                await asyncio.sleep(self._timings.retry)

        self._coordinator.tasks.start(send())

    async def _call(self, host: Endpoint, request: Any) -> Any:
        try:
            return await self._coordinator.transport.call(host, request, self._timings.copy)
        except TransportError:
            # If it was lost before it was added, nothing else will report that.
            self._members.suspect(host.address, "coordinator")
            raise
