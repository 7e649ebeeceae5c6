"""The stateless server: shard state lives in state stores on other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from dps.core import ranges
from dps.core.shard import ShardState
from dps.errors import StoreUnavailable, TransportError
from dps.protocol.durability import Durability, NoPersistence, Persistence, ServerContext
from dps.protocol.messages import GetState, LookUp, PutSince, PutState
from dps.protocol.storage.state_store import without
from dps.protocol.transport import Endpoint, answers_of
from dps.protocol.wire import message


@message
@dataclass(frozen=True, slots=True)
class SharedStore(Durability):
    """Shard state lives in a state store on another node (the stateless server).

    An update is acked when the store has a state that contains it; updates that arrive while the
    store is being written share the next write.

    With two stores the loss of one costs nothing: each state is put to both, and acks wait for
    both. When one is lost, or a server has not reached it for a lease, they wait for the other one
    alone, until a second one has a copy again. It gets that from the servers, so not while a shard
    has none; what is buffered for such a shard is in the store that is left alone.

    Parameters
    ----------
    every
        How many updates share a write at most.
    stores
        How many stores keep each state, and each buffered gradient: every one is a node.
    """

    every: int = 16
    stores: int = 1
    needs_store: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.count(self, "every", 1, "updates")
        ranges.count(self, "stores", 1, "nodes")

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Whether a store is one that has the state: a later one may be empty."""
        return any(store in stored for store in stores)

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Whether a host has, or may have got, the state of stores that were lost."""
        return (alone or tried) and not restorable

    def persistence(self, context: ServerContext) -> Persistence:
        """Return what writes one shard's state to the stores."""
        return StorePersistence(self.every, context)


class StorePersistence(NoPersistence):
    """State lives in stores on other nodes; the server itself may be lost."""

    source = "store"
    immediate = False

    def __init__(self, every: int, context: ServerContext) -> None:
        self.window = every
        self._shard = context.shard
        self._timings = context.timings
        self._ask = context.ask_store
        self._stores = context.stores
        self._whole_stores = context.whole_stores
        # What is known to be in each store, and in which epoch it was put there.
        self._there: dict[Endpoint, tuple[ShardState, int]] = {}

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Put the state that the server starts with."""
        await self.commit(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when every store has the state."""
        stores = self._stores()
        self._there = {store: self._there[store] for store in stores if store in self._there}
        puts = (self._keep(store, epoch, state) for store in stores)
        for failed in await asyncio.gather(*puts, return_exceptions=True):
            if failed is not None:
                raise failed

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the newest state of those stores that have all that was acked, and are in reach.

        What a server that was replaced still puts to others is of an earlier epoch, and no more
        acked: that takes all of them.
        """
        looks = [self._index(store, epoch) for store in self._whole_stores()]
        found = await answers_of(looks, self._timings.lease)
        for _, store in sorted(found, key=lambda each: each[0], reverse=True):
            with suppress(TransportError):
                request = GetState(self._shard, epoch)
                state = await self._ask(store, request, self._timings.copy)
                if isinstance(state, ShardState):
                    return state
        raise StoreUnavailable(f"shard {self._shard}: its state cannot be had of any store")

    async def _index(self, store: Endpoint, epoch: int) -> tuple[int, Endpoint]:
        """The index of the state that a store has, which serves no earlier epoch any more."""
        found = await self._ask(store, LookUp(self._shard, epoch), self._timings.call)
        return found.index, store

    async def _keep(self, store: Endpoint, epoch: int, state: ShardState) -> None:
        """Have a store keep the state; of tables only what is new goes there."""
        there = self._there.get(store)
        if there is not None and (there[0].index, there[1]) == (state.index, epoch):
            return  # the put to another one had failed
        self._there.pop(store, None)
        if there is None or not state.tables or there[1] != epoch:
            await self._put(store, PutState(self._shard, epoch, state))
        else:
            try:
                newer, kept = without(there[0], state)
                since = PutSince(self._shard, epoch, newer, there[0].index, kept)
                await self._put(store, since)
            except StoreUnavailable:
                await self._put(store, PutState(self._shard, epoch, state))
        self._there[store] = (state, epoch)

    async def _put(self, store: Endpoint, request: PutState | PutSince) -> None:
        await self._ask(store, request, self._timings.copy)
