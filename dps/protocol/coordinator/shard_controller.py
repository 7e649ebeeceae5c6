"""How one shard is brought to what is wanted: served by a chain of the wanted length.

A task takes one step after another: have what is left of a chain enter a new epoch, else restore
the shard on a free host, else lengthen its chain, else go on with a move: the newcomer is added at
the tail, then the old holder leaves. Whatever fails is tried again with what is known then. Every
change of a shard's members begins a new epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dps.core.placement import Move
from dps.errors import (
    CheckpointCorrupt,
    DpsError,
    LeaseExpired,
    NotServing,
    StaleEpoch,
    TransportError,
)
from dps.protocol.coordinator.placement import ReplicaPlacement
from dps.protocol.coordinator.port import CoordinatorPort
from dps.protocol.group import Group
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
from dps.protocol.transport import Endpoint, Transport

DONOR_SECONDS = 0.05  # how often to look whether a donor still takes part


@dataclass(frozen=True, slots=True)
class _Stopped:
    """The old holder of a replica that is moved, which has left the epoch: `fence`, at `at`."""

    move: Move[Endpoint]
    holder: Endpoint
    fence: int
    at: float


class ShardController:
    """One shard's members, and the task that looks after them. Used from one event loop.

    Attributes
    ----------
    view
        Who serves the shard.
    begun
        Whether the shard has ever been served: its state is more than the initial values.
    reserved
        A host that is about to become a replica.
    moving
        The move that is under way, if one is.
    """

    def __init__(
        self, shard: int, group: Group, transport: Transport, port: CoordinatorPort
    ) -> None:
        self.view = View(shard, 0, (), serving=False)
        self.begun = False
        self.reserved: Endpoint | None = None
        self.moving: Move[Endpoint] | None = None
        self._group = group
        self._durability = group.recovery.durability
        self._transport = transport
        self._port = port
        self._last_epoch = 0
        self._last_host: Endpoint | None = None
        self._forsaken: tuple[Endpoint, ...] = ()
        self._stored: tuple[Endpoint, ...] = ()  # the stores that have the state that was acked
        self._unreached: set[Endpoint] = set()  # the stores that the shard is served without
        # Who was to get the state from the store since the shard was lost, and from which epoch on.
        self._tried: dict[Endpoint, int] = {}
        self._placement = ReplicaPlacement(shard, port, group.timings.lease, self.wake)
        self._awake = asyncio.Event()
        self._step: asyncio.Timeout | None = None
        self._seeded: asyncio.Event | None = None
        self._brought: Brought | None = None
        self._failed_attempts = 0
        self._began_moving = 0.0
        self._stopped: _Stopped | None = None
        port.tasks.keep(self._tend, group.timings.retry)

    def wake(self) -> None:
        """Look whether there is something to do."""
        self._awake.set()

    def interrupt(self) -> None:
        """Have the step given up that is under way: it counts on what is no longer so."""
        if self._step is not None and not self._step.expired():
            self._step.reschedule(asyncio.get_running_loop().time())

    def unsettle(self, without: Endpoint | None = None, also: Endpoint | None = None) -> None:
        """Let nobody use the shard until what is left of its chain has entered a new epoch.

        `also` is a newcomer that is to be its tail.
        """
        chain = tuple(member for member in self.view.chain if member != without)
        chain += (also,) if also is not None else ()
        self.view = View(self.view.shard, self._next_epoch(), chain, serving=False)

    def forsake(self) -> None:
        """Give the shard's present state up, though its replicas live."""
        if self.view.chain:
            self._last_host, self._forsaken = self.view.chain[0], self.view.chain
        self.view = View(self.view.shard, self._next_epoch(), (), serving=False)
        self.interrupt()
        self.wake()

    def seeded(self, epoch: int, brought: Brought) -> None:
        """Take note that the initial values are installed, or a worker's copy."""
        if self._seeded is not None and epoch == self.view.epoch:
            self._brought = brought
            self._seeded.set()

    def store_lost(self, host: Endpoint) -> None:
        """Take note that no state is kept on a host: it may come back, but empty."""
        self._stored = tuple(store for store in self._stored if store != host)
        self._unreached.discard(host)

    def do_without(self, store: Endpoint) -> bool:
        """Do without a store that the shard's server cannot reach, if another can be used.

        Another one has the state, or is given it by the server.
        """
        others = {*self._stores} - {store}
        if store not in self._stores or not (
            others if self.view.chain else others & {*self._stored}
        ):
            return False
        self._unreached.add(store)
        self._placement.avoid(store)
        self.unsettle()
        self.interrupt()
        self.wake()
        return True

    def cannot_reach(self, store: Endpoint) -> bool:
        """Whether the shard's server has reported that it cannot reach a store."""
        return store in self._unreached

    @property
    def is_whole(self) -> bool:
        """Whether the shard is served, with as many copies as it is to have."""
        if not self.view.serving or len(self.view.chain) < self._group.replicas:
            return False
        return not self._durability.needs_store or set(self._stored) == set(self._port.stores)

    def is_last_copy(self, host: Endpoint) -> bool:
        """Whether a host has the only copy of a state that must not be lost with one host.

        A replica does not count that is stopped, or of which nothing was heard lately.
        """
        chain = self.view.chain
        others = [m for m in chain if m != host and self._port.members.is_live(m)]
        alone = host in chain and not others
        restorable = not self.begun or self._is_kept
        return self._durability.is_last_copy(alone, host in self._tried, restorable)

    def keeps_state_at(self, host: Endpoint) -> bool:
        """Whether the shard's state may be restored from what a host keeps."""
        return host in self._stored

    def can_move_to(self, host: Endpoint) -> bool:
        """Whether a replica may be moved now: nothing is wrong with the shard, nor was with it."""
        whole = self.view.serving and len(self.view.chain) == self._group.replicas
        return whole and not self._lacks_store and not self._placement.is_avoided(host)

    def move(self, move: Move[Endpoint]) -> None:
        """Move a replica, unless something that this needs is lost meanwhile."""
        self.moving, self._began_moving = move, asyncio.get_running_loop().time()
        self.wake()

    def _next_epoch(self) -> int:
        """A number that no configuration of this shard has had."""
        self._last_epoch += 1
        return self._last_epoch

    # -- step by step ----------------------------------------------------------------------------

    async def _tend(self) -> None:
        # A task before this one may have failed between a decision and its announcement.
        await self._port.publish()
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
                await asyncio.sleep(self._group.timings.retry)
                self.wake()

    async def _advance_far(self) -> None:
        """Take every step there is to take; raises `TimeoutError` when it is interrupted."""
        try:
            async with asyncio.timeout(None) as self._step:
                while await self._advance():
                    pass
                await self._port.evict_absent(self.view.shard)
                await self._port.came_to_rest()
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
        """Have what is left of a chain enter the new epoch, then serve."""
        served = replace(view, chain=self._going_on, serving=True)
        silent = any(self._port.members.is_silent(member) for member in served.chain)
        if silent or self._lacks_store:
            return False
        keepers = self._keepers
        self._port.decided(view, served.chain[0], "reconfigure")
        await self._configure(served)
        if self.view == view and self._keepers == keepers:
            self._note_stored(keepers)
            self._serve(served)
            await self._port.publish()
            self._end_move()
        return True

    @property
    def _going_on(self) -> tuple[Endpoint, ...]:
        """Who of the chain is to serve on.

        Whoever stopped for a move may lack what the others have committed since: it comes back only
        if they are all lost.
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
        self._port.decided(view, host, "restore")
        served = False
        try:
            brought = await self._bring_back(view, host)
            await self._port.admit_present(view, host)
            # Who is told of lost keepers uses them for as long as the epoch lasts.
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
                    self._port.restored(self.view, brought, certain=not mail)
                self.begun, self._forsaken = True, ()
                self._note_stored(keepers)
                self._stopped = None
                self._failed_attempts = 0
                self._tried = {}
            else:
                self.unsettle()  # the host may have closed the mailbox for its epoch
                self._failed_attempts += 1
            await self._port.publish()

    def _serve(self, view: View) -> None:
        """Let everybody use the shard, with what was in its mailbox: nobody needs that any more."""
        self.view = view
        if self._group.recovery.uses_mailbox:
            clear = ClearMail(view.shard, view.epoch)
            for mailbox in self._port.mailboxes:
                self._send(clear, partial(self._while_at, view, mailbox))

    def _while_at(self, view: View, mailbox: Endpoint) -> Endpoint | None:
        return mailbox if self.view == view and mailbox in self._port.mailboxes else None

    @property
    def _free_host(self) -> Endpoint | None:
        return self._placement.best(self.view.chain, self._last_host)

    @property
    def _holder(self) -> Endpoint | None:
        """Who may have got the state from a store that was lost before the shard was served."""
        there = [host for host in self._tried if host in self._port.members]
        return min(there, key=self._placement.is_avoided) if there and not self._is_kept else None

    async def _fence_forsaken(self, host: Endpoint) -> None:
        """Before another host has the shard, take others out of the epoch in which clients know it.

        They live, and their leases are not over: but for this they would go on to answer. What the
        host itself has is out when it restores the shard; if it does not, the next one is to know.
        """
        for forsaken in self._forsaken:
            if forsaken != host and forsaken in self._port.members:
                alone = (forsaken,)
                fence = self.view.shard, self._next_epoch(), alone, forsaken
                request = Configure(*fence, keepers=self._keepers)
                try:
                    await self._call(forsaken, request)
                except LeaseExpired:
                    raise  # it may renew its lease, and serve on
                except NotServing:
                    continue  # it has nothing of the shard
        self._forsaken = tuple(forsaken for forsaken in self._forsaken if forsaken == host)

    async def _bring_back(self, view: View, host: Endpoint) -> Brought:
        part = self._port.part
        if self.begun and part is not None:
            install = partial(self._install, view, host)
            restored: Brought = await part.restore(view.shard, view.epoch, host, install)
            return restored
        if self.begun and self._port.cuts is not None:
            return await self._restore_cut(view, host, self._port.cuts.newest)
        if self._is_kept:
            self._tried.setdefault(host, view.epoch)
            return await self._restored(host, Restore(view.shard, view.epoch, host, self._keepers))
        if host in self._tried:
            return await self._restore_got(view, host)
        if self.begun and self._durability.has_layer_below:
            request = Restore(view.shard, view.epoch, host, self._keepers, from_below=True)
            return await self._restored(host, request)
        return await self._install(view, host)

    async def _restore_cut(self, view: View, host: Endpoint, cut: int) -> Brought:
        """Go back to a cut; if it is damaged here, all shards have to do with the one before."""
        try:
            restore = Restore(view.shard, view.epoch, host, self._keepers, cut)
            return await self._restored(host, restore)
        except CheckpointCorrupt:
            self._port.refuse_cut(view.shard, cut)
            raise

    async def _restore_got(self, view: View, host: Endpoint) -> Brought:
        """Go on from what an earlier attempt has brought to a host, if it has come that far."""
        since = self._tried[host]
        try:
            restore = Restore(view.shard, view.epoch, host, self._keepers, since=since)
            return await self._restored(host, restore)
        except StaleEpoch:
            del self._tried[host]
            raise

    @property
    def _is_kept(self) -> bool:
        """Whether the shard's state can be restored from where its durability keeps it."""
        return self.begun and self._durability.is_restorable(self._stored, self._stores)

    @property
    def _stores(self) -> tuple[Endpoint, ...]:
        """The stores to use: those in reach of the shard's server, if any of them has its state."""
        reached = tuple(store for store in self._port.stores if store not in self._unreached)
        has_state = bool(self.view.chain) or any(store in self._stored for store in reached)
        return reached if reached and has_state else self._port.stores

    def _note_stored(self, keepers: Keepers) -> None:
        """Take note that the stores of an epoch have what the shard is served with."""
        self._stored = keepers.stores
        self._unreached.difference_update(keepers.stores)

    async def _use_again(self, view: View, store: Endpoint) -> bool:
        """Use a store again that was out of reach, if the shard's server reaches it now."""
        self._placement.avoid(store)  # else it is asked again after a while
        request = CanReach(view.shard, view.epoch, store)
        await self._transport.call(view.chain[-1], request, self._group.timings.call)
        self._unreached.discard(store)
        if self.view == view:
            self.unsettle()
            await self._port.publish()
        return True

    @property
    def _stays_durable(self) -> bool:
        """Whether a new tail can go on where the old one is, without anything being written."""
        same = set(self._stored) == set(self._stores)
        return same and self._durability.seconds is None

    @property
    def _lacks_store(self) -> bool:
        return self._durability.needs_store and not self._port.stores

    @property
    def _keepers(self) -> Keepers:
        """Who keeps states and mail in the next epoch; who has the state comes first."""
        stores = sorted(self._stores, key=lambda store: store not in self._stored)
        whole = sum(store in self._stored for store in stores)
        return Keepers(tuple(stores), self._port.mailboxes, whole)

    async def _restored(self, host: Endpoint, request: Restore) -> Brought:
        brought: Brought = await self._call(host, request)
        return brought

    async def _install(
        self,
        view: View,
        host: Endpoint,
        donor: str = "",
        stands: Callable[[], bool] | None = None,
    ) -> Brought:
        """Ask whoever has the state to install it, and wait until that is done.

        Raises
        ------
        NotServing
            It is a worker's, which does not stand any more.
        """
        self._seeded = asyncio.Event()
        self._port.seeds[view.shard] = Seed(view.shard, view.epoch, host, self._keepers, donor)
        await self._port.publish()
        try:
            patience = self._group.timings.call if stands is None else DONOR_SECONDS
            while not await _is_set(self._seeded, patience):
                gone = stands is not None and not stands()
                if stands is None or gone:
                    self._port.members.suspect(host.address, "coordinator")
                if gone:
                    raise NotServing(f"shard {view.shard}: {donor} cannot give its copy")
        finally:
            self._seeded = None
            del self._port.seeds[view.shard]
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
            self._port.members.suspect(host.address, "coordinator")
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
            await self._port.publish()
        return True

    def _is_coming(self, host: Endpoint) -> bool:
        """Whether a host has not been lost since it was reserved."""
        return self.reserved == host and host in self._port.members

    # -- moves -----------------------------------------------------------------------------------

    async def _move_on(self, view: View) -> bool:
        """Take the next step of a move, if there is one and nothing was lost that it needs."""
        move = self.moving
        if move is None:
            return False
        source, target = move.source, move.target
        if target in view.chain and source is not None and len(view.chain) > self._group.replicas:
            return await self._switch(view, move, source)
        info = self._port.members.hosts.get(target)
        able = info is not None and self._port.may_hold(info, view.shard)
        if able and target not in view.chain and source in view.chain and self.can_move_to(target):
            return await self._extend(view, target)
        self.moving = None
        return True

    async def _switch(self, view: View, move: Move[Endpoint], source: Endpoint) -> bool:
        """Have the old holder leave: whoever is left has acknowledged all that it has.

        It stops before they go on, so that nobody is answered by both, but has to come back if they
        are lost before they serve: so it is let go only then. Once it has stopped there is no other
        way than on, since the others may commit something without it at any time.
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
            await self._port.publish()
        self._end_move()
        return True

    def _end_move(self) -> None:
        """Let whoever stopped for a move go, now that others serve."""
        stopped, self._stopped = self._stopped, None
        if stopped is None or stopped.holder in self.view.chain:
            return
        self.moving = None
        if stopped.move.target in self.view.chain:
            now = asyncio.get_running_loop().time()
            took = now - self._began_moving, now - stopped.at
            self._port.moved(self.view, stopped.move, *took)
        self._let_go(stopped.holder, stopped.fence)

    def _let_go(self, host: Endpoint, fence: int) -> None:
        """Have a host forget a replica; until it does, that only costs memory."""
        release = Release(self.view.shard, fence)
        self._send(release, lambda: host if host in self._port.members else None)

    # -- requests --------------------------------------------------------------------------------

    async def _configure(self, view: View, kept: bool = False) -> None:
        """Have the members of a view enter its epoch: the tail first, so that each can pass on."""
        entered = view.shard, view.epoch, view.chain
        for member in reversed(view.chain):
            await self._call(member, Configure(*entered, member, kept, self._keepers))

    def _send(self, request: Any, whom: Callable[[], Endpoint | None]) -> None:
        """Have a request carried out that nobody waits for, while there is somebody to do it."""

        async def send() -> None:
            while (host := whom()) is not None:
                with suppress(DpsError):
                    await self._transport.call(host, request, self._group.timings.call)
                    return
                await asyncio.sleep(self._group.timings.retry)

        self._port.tasks.start(send())

    async def _call(self, host: Endpoint, request: Any) -> Any:
        try:
            return await self._transport.call(host, request, self._group.timings.copy)
        except TransportError:
            # It may have been lost before it was added, so that nobody will tell of it again.
            self._port.members.suspect(host.address, "coordinator")
            raise


async def _is_set(event: asyncio.Event, patience: float) -> bool:
    """Wait until an event happens, for so many seconds at most."""
    try:
        async with asyncio.timeout(patience):
            return await event.wait()
    except TimeoutError:
        return False
