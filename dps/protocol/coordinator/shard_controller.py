"""Keeps one shard served, by a chain with the wanted number of replicas.

A task takes one step at a time. It makes what is left of a chain enter a new epoch; or it restores
the shard on a free host; or it lengthens the chain; or it continues a move: the newcomer is added
at the tail, then the old holder leaves. After a failed step, the task chooses again by what is
known then. Every change of a shard's members begins a new epoch.
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
from dps.protocol import messages as msg
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator

DONOR_SECONDS = 0.05  # how often to look whether a donor is still active


@dataclass(frozen=True, slots=True)
class _Stopped:
    """A move whose source has left the chain, in epoch `fence`, at the loop's time `at`."""

    move: Move[Endpoint]
    fence: int
    at: float


class ShardController:
    """One shard's members, and the task that looks after them. Used from one event loop."""

    def __init__(self, shard: int, coordinator: Coordinator) -> None:
        self.view = msg.View(shard, 0, (), serving=False)
        self.begun = False  # it was served: its state may be more than the initial values
        self.reserved: Endpoint | None = None  # is about to become a replica
        self.moving: Move[Endpoint] | None = None
        self.seed: msg.Seed | None = None  # the state that a host must be given
        self._coordinator = coordinator
        self._members = coordinator.members
        self._group = coordinator.group
        self._timings = coordinator.group.timings
        self._durability = coordinator.group.recovery.durability.above
        self._last_epoch = 0
        self._forsaken: tuple[Endpoint, ...] = ()
        self.stored: tuple[Endpoint, ...] = ()  # stores that have every acked update
        self.unreached: set[Endpoint] = set()  # stores that the server does without
        # Hosts that may have received the state from a store since the shard was lost, since when.
        self._tried: dict[Endpoint, int] = {}
        self._avoided: dict[Endpoint, float] = {}
        self._awake = asyncio.Event()
        self._step: asyncio.Timeout | None = None
        self._seeded: asyncio.Future[msg.Brought] | None = None
        self._was_tried = False  # whether an attempt to restore it has failed
        self._began_moving = 0.0
        self._stopped: _Stopped | None = None
        coordinator.tasks.keep(self._tend, self._timings.retry)

    def wake(self) -> None:
        """Make the task look for a step to take."""
        self._awake.set()

    def look_again(self) -> None:
        """Abandon the present step, whose conditions have changed, and choose another."""
        if self._step is not None and not self._step.expired():
            self._step.reschedule(asyncio.get_running_loop().time())
        self.wake()

    def unsettle(self, without: Endpoint | None = None) -> None:
        """Stop serving the shard until what is left of its chain has entered a new epoch."""
        self._begin_epoch(tuple(member for member in self.view.chain if member != without))
        self.look_again()

    def forsake(self) -> None:
        """Discard the shard's present state, although its replicas live."""
        self._forsaken = self.view.chain or self._forsaken
        self._begin_epoch(())
        self.look_again()

    def seeded(self, epoch: int, brought: msg.Brought) -> None:
        """Note that initial values or a worker's copy are installed."""
        installed = self._seeded
        if installed is not None and not installed.done() and epoch == self.view.epoch:
            installed.set_result(brought)

    def store_lost(self, host: Endpoint) -> None:
        """Note that a store is lost: it may return, but is empty then."""
        self.stored = tuple(store for store in self.stored if store != host)
        self.unreached.discard(host)

    def do_without(self, store: Endpoint) -> bool:
        """Drop a store that the server cannot reach, if another has the state or can receive it."""
        others = {*self._stores} - {store}
        if store not in self._stores or not (
            others if self.view.chain else others & {*self.stored}
        ):
            return False
        self.unreached.add(store)
        self._avoid(store)
        self.unsettle()
        return True

    @property
    def is_whole(self) -> bool:
        """Whether all replicas serve the shard, and every present store has its state."""
        if not self.view.serving or len(self.view.chain) < self._group.replicas:
            return False
        return self._durability.stores == 0 or set(self.stored) == {*self._coordinator.stores}

    def is_last_copy(self, host: Endpoint) -> bool:
        """Whether the durability makes this shard wait for a host, which may have the only copy."""
        # Replicas that are stopped, or were recently silent, do not count.
        chain = self.view.chain
        others = [m for m in chain if m != host and self._members.is_live(m)]
        alone = host in chain and not others
        restorable = not self.begun or self._is_kept
        return self._durability.is_last_copy(alone, host in self._tried, restorable)

    def can_move_to(self, host: Endpoint) -> bool:
        """Whether a replica may be moved now: the shard is whole, and the host has not failed."""
        whole = self.view.serving and len(self.view.chain) == self._group.replicas
        return whole and not self._lacks_store and not self.is_avoided(host)

    def move(self, move: Move[Endpoint]) -> None:
        """Move a replica soon, unless a host that the move needs is lost before."""
        self.moving, self._began_moving = move, asyncio.get_running_loop().time()
        self.wake()

    def is_avoided(self, host: Endpoint) -> bool:
        """Whether others are to be tried before this host."""
        return self._avoided.get(host, 0.0) > asyncio.get_running_loop().time()

    def _avoid(self, host: Endpoint) -> None:
        """Prefer others for a lease: this host may not reach what it needs."""
        loop = asyncio.get_running_loop()
        self._avoided[host] = loop.time() + self._timings.lease
        loop.call_later(self._timings.lease, self.wake)

    def _begin_epoch(self, chain: tuple[Endpoint, ...]) -> None:
        self.view = msg.View(self.view.shard, self._next_epoch(), chain, serving=False)

    def _next_epoch(self) -> int:
        self._last_epoch += 1
        return self._last_epoch

    # -- step by step ----------------------------------------------------------------------------

    async def _tend(self) -> None:
        # The last run of this task may have failed between a decision and its publication.
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
                # A host did not carry out a request: it is ending or not ready. Retry soon.
                await asyncio.sleep(self._timings.retry)
                self.wake()

    async def _advance_far(self) -> None:
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
        for store in self.unreached:
            if not self.is_avoided(store):
                return await self._use_again(view, store)
        return await self._move_on(view)

    async def _reconfigure(self, view: msg.View) -> bool:
        # A source that stopped for a move may lack later commits of the others, so it returns only
        # if they are all lost.
        stopped = self._stopped.move.source if self._stopped is not None else None
        chain = tuple(member for member in view.chain if member != stopped) or view.chain
        served = replace(view, chain=chain, serving=True)
        silent = any(self._members[member].silent for member in served.chain)
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

    async def _restore(self) -> bool:
        # Hosts that may have received the state from a store that was lost before they served.
        tried = [host for host in self._tried if host in self._members and not self._is_kept]
        host = min(tried, key=self.is_avoided) if tried else self._free_host
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
        self._begin_epoch(())
        view, keepers = self.view, self._keepers
        self._decide(view, host, "restore")
        served = False
        try:
            brought = await self._bring_back(view, host)
            if self.begun and self._group.recovery.uses_mailbox:
                await self._coordinator.workers.admit_active(view, host, early=True)
                # The epoch stays the same: the head only applies buffered gradients.
                take = msg.Configure(view.shard, view.epoch, (host,), kept=True, keepers=keepers)
                await self._call(host, take)
            await self._coordinator.workers.admit_active(view, host)
            # A server uses the keepers that it was given, even lost ones, until the epoch ends.
            served = (self.view, self._keepers) == (view, keepers) and self._is_coming(host)
        except DpsError:
            self._avoid(host)
            raise
        finally:
            if served:
                self._serve(msg.View(view.shard, view.epoch, (host,), serving=True))
                if self.begun:
                    # A failed attempt may have applied unacked gradients to the restored state.
                    certain = not (self._was_tried and self._group.recovery.uses_mailbox)
                    self._coordinator.failovers.restored(self.view, brought, certain=certain)
                self._note_stored(keepers)
                self.begun, self._was_tried = True, False
                self._forsaken, self._stopped, self._tried = (), None, {}
            else:
                self._begin_epoch(self.view.chain)  # the host may have closed this epoch's mailbox
                self._was_tried = True
            await self._coordinator.publish()

    def _decide(self, view: msg.View, head: Endpoint, how: str) -> None:
        now, node = self._coordinator.clock.now(), self._members.node(head)
        self._coordinator.emit(Decided(now, view.shard, view.epoch, node, how))

    def _serve(self, view: msg.View) -> None:
        self.view = view
        if not self._group.recovery.uses_mailbox:
            return

        def is_in_use(mailbox: Endpoint) -> bool:
            return self.view == view and mailbox in self._coordinator.mailboxes

        for mailbox in self._coordinator.mailboxes:
            clear = msg.ClearMail(view.shard, view.epoch)
            self._send(mailbox, clear, partial(is_in_use, mailbox))

    @property
    def _free_host(self) -> Endpoint | None:
        chain, last = self.view.chain, next(iter(self._forsaken), None)
        return self._coordinator.rebalancer.best(self.view.shard, chain, last)

    async def _fence_forsaken(self, host: Endpoint) -> None:
        """Fence live former replicas, which would still answer, before a host has the shard."""
        # The host itself is fenced when it restores the shard or, if it fails, by the next attempt.
        for forsaken in self._forsaken:
            if forsaken != host and forsaken in self._members:
                try:
                    await self._call(forsaken, self._fence((forsaken,)))
                except LeaseExpired:
                    raise  # it may renew its lease and continue to serve
                except NotServing:
                    continue  # it has nothing of the shard
        self._forsaken = tuple(forsaken for forsaken in self._forsaken if forsaken == host)

    def _fence(self, chain: tuple[Endpoint, ...]) -> msg.Configure:
        epoch = self._next_epoch()
        return msg.Configure(self.view.shard, epoch, chain, keepers=self._keepers)

    async def _bring_back(self, view: msg.View, host: Endpoint) -> msg.Brought:
        """Give a host the shard's state, from the best source available."""
        # In this order: workers' copies; the newest cut; a store or checkpoint; the host itself, if
        # an earlier attempt gave it the state; checkpoints below; initial values.
        part, cuts, brought = self._coordinator.part, self._coordinator.cuts, None
        restore = msg.Restore(view.shard, view.epoch, host, self._keepers)
        if self.begun and part is not None:
            install = partial(self._install, view, host)
            brought = await part.restore(view.shard, view.epoch, host, install)
        elif self.begun and cuts is not None:
            cut = cuts.newest
            try:
                brought = await self._call(host, replace(restore, cut=cut))
            except CheckpointCorrupt:  # all shards must use the cut before it
                cuts.refuse(view.shard, cut)
                raise
        elif self._is_kept:
            self._tried.setdefault(host, view.epoch)
            brought = await self._call(host, restore)
        elif host in self._tried:
            try:
                brought = await self._call(host, replace(restore, since=self._tried[host]))
            except StaleEpoch:  # the earlier attempt gave it nothing
                del self._tried[host]
                raise
        elif self.begun and self._group.recovery.durability.has_layer_below:
            brought = await self._call(host, replace(restore, from_below=True))
        return brought or await self._install(view, host)

    @property
    def _is_kept(self) -> bool:
        return self.begun and self._durability.is_restorable(self.stored, self._stores)

    @property
    def _stores(self) -> tuple[Endpoint, ...]:
        """The stores to use: those in reach, if they or the chain have the state; otherwise all."""
        stores = self._coordinator.stores
        reached = tuple(store for store in stores if store not in self.unreached)
        has_state = bool(self.view.chain) or any(store in self.stored for store in reached)
        return reached if reached and has_state else stores

    def _note_stored(self, keepers: msg.Keepers) -> None:
        self.stored = keepers.stores
        self.unreached.difference_update(keepers.stores)

    async def _use_again(self, view: msg.View, store: Endpoint) -> bool:
        """Use a store again that was out of reach, if the shard's server reaches it now."""
        self._avoid(store)  # if this fails, the next attempt comes a lease later
        request = msg.CanReach(view.shard, view.epoch, store)
        await self._coordinator.transport.call(view.chain[-1], request, self._timings.call)
        self.unreached.discard(store)
        if self.view == view:
            self._begin_epoch(view.chain)
            await self._coordinator.publish()
        return True

    @property
    def _stays_durable(self) -> bool:
        """Whether a new tail can continue without writing the state first."""
        same = set(self.stored) == set(self._stores)
        return same and self._durability.seconds is None

    @property
    def _lacks_store(self) -> bool:
        return self._durability.stores > 0 and not self._coordinator.stores

    @property
    def _keepers(self) -> msg.Keepers:
        """The stores and mailboxes of the next epoch; stores that have the state come first."""
        stores = sorted(self._stores, key=lambda store: store not in self.stored)
        whole = sum(store in self.stored for store in stores)
        return msg.Keepers(tuple(stores), self._coordinator.mailboxes, whole)

    async def _install(
        self,
        view: msg.View,
        host: Endpoint,
        donor: str = "",
        stands: Callable[[], bool] | None = None,
    ) -> msg.Brought:
        """Make a worker install its copy on a host, while its offer `stands`, or the driver."""
        installed: asyncio.Future[msg.Brought] = asyncio.get_running_loop().create_future()
        self._seeded = installed
        self.seed = msg.Seed(view.shard, view.epoch, host, self._keepers, donor)
        await self._coordinator.publish()
        pause = self._timings.call if stands is None else DONOR_SECONDS
        try:
            while not (await asyncio.wait([installed], timeout=pause))[0]:
                if stands is None or not stands():
                    self._members.suspect(host.address, "coordinator")
                if stands is not None and not stands():
                    raise NotServing(f"shard {view.shard}: {donor} cannot send its copy")
        finally:
            self._seeded = self.seed = None
        return installed.result()

    async def _extend(self, view: msg.View, host: Endpoint) -> bool:
        longer = msg.View(view.shard, self._next_epoch(), (*view.chain, host), serving=True)
        self.reserved = host
        has_all, joined = False, False
        try:
            await self._call(
                view.chain[-1], msg.Extend(view.shard, view.epoch, host, self._keepers)
            )
            has_all = True
            await self._configure(longer, kept=self._stays_durable)
            joined = self.view == view and self._is_coming(host)
        except DpsError:
            self._members.suspect(host.address, "coordinator")
            self._avoid(host)
            raise
        finally:
            there = has_all and self._is_coming(host)
            self.reserved = None
            if joined:
                self._serve(longer)
            else:
                # Some members may wait for the newcomer's acks, or be in its epoch. It has all that
                # they ack from now on, and may become the last one that has it.
                self._begin_epoch((*self.view.chain, host) if there else self.view.chain)
            await self._coordinator.publish()
        return True

    def _is_coming(self, host: Endpoint) -> bool:
        return self.reserved == host and host in self._members

    # -- moves -----------------------------------------------------------------------------------

    async def _move_on(self, view: msg.View) -> bool:
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

    async def _switch(self, view: msg.View, move: Move[Endpoint], source: Endpoint) -> bool:
        """Remove the old holder: the other replicas have acknowledged all that it has."""
        # It stops before they serve, so that both never answer. It is released only when they
        # serve, because it returns if they are all lost before that. While any of them lives, it
        # does not return once it has stopped, because they may commit updates without it.
        left = tuple(member for member in view.chain if member != source)
        out = self._fence(left)  # operations that it still passes on are of an older epoch
        stopped = _Stopped(move, out.epoch, asyncio.get_running_loop().time())
        switched = False
        try:
            await self._call(source, out)
            if source in self.view.chain:
                self._stopped = stopped
            shorter = msg.View(view.shard, self._next_epoch(), left, serving=True)
            await self._configure(shorter, kept=self._stays_durable)
            switched = self.view == view
        finally:
            if switched:
                self._serve(shorter)
            else:
                self._begin_epoch(self.view.chain)
            await self._coordinator.publish()
        self._end_move()
        return True

    def _end_move(self) -> None:
        stopped, self._stopped = self._stopped, None
        source = stopped.move.source if stopped is not None else None
        if stopped is None or source is None or source in self.view.chain:
            return
        self.moving = None
        if stopped.move.target in self.view.chain:
            now = asyncio.get_running_loop().time()
            moved = Moved(
                self._coordinator.clock.now(),
                self.view.shard,
                self.view.epoch,
                source=self._members.node(source),
                target=self._members.node(stopped.move.target),
                nbytes=self._group.layout.shards[self.view.shard].nbytes,
                seconds=now - self._began_moving,
                pause_seconds=now - stopped.at,
            )
            self._coordinator.emit(moved)
        # Until the host releases its replica, that only costs memory.
        release = msg.Release(self.view.shard, stopped.fence)
        self._send(source, release, lambda: source in self._members)

    # -- requests --------------------------------------------------------------------------------

    async def _configure(self, view: msg.View, kept: bool = False) -> None:
        """Make a view's members enter its epoch, the tail first: each successor is then ready."""
        for member in reversed(view.chain):
            enter = msg.Configure(view.shard, view.epoch, view.chain, kept, self._keepers)
            await self._call(member, enter)

    def _send(self, host: Endpoint, request: Any, is_wanted: Callable[[], bool]) -> None:
        """Repeat a request in the background until it is carried out, or not wanted any more."""

        async def send() -> None:
            while is_wanted():
                with suppress(DpsError):
                    await self._coordinator.transport.call(host, request, self._timings.call)
                    return
                await asyncio.sleep(self._timings.retry)

        self._coordinator.tasks.start(send())

    async def _call(self, host: Endpoint, request: Any) -> Any:
        try:
            return await self._coordinator.transport.call(host, request, self._timings.copy)
        except TransportError:
            # No other check reports a host that was lost before it was added.
            self._members.suspect(host.address, "coordinator")
            raise
