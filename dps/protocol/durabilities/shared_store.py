"""The stateless server: shard state lives in a state store on another node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dps.core.shard import ShardState
from dps.errors import StoreUnavailable, require
from dps.protocol.durability import Durability, NoPersistence, Persistence, ServerContext
from dps.protocol.messages import GetState, PutSince, PutState
from dps.protocol.storage.state_store import without
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message


@message
@dataclass(frozen=True, slots=True)
class SharedStore(Durability):
    """Shard state lives in a state store on another node (the stateless server).

    An update is acked when the store has a state that contains it; updates that arrive while the
    store is being written share the next write, at most `every` of them.
    """

    every: int = 16
    needs_store: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.every >= 1, f"shared_store: every={self.every}, expected at least 1 update")

    def is_restorable(self, stored: Endpoint | None, store: Endpoint | None) -> bool:
        """Whether the store is the one that has the state: a later one may be empty."""
        return stored is not None and stored == store

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Whether a host has, or may have got, the state of a store that was lost."""
        return (alone or tried) and not restorable

    def persistence(self, context: ServerContext) -> Persistence:
        """Return what writes one shard's state to the store."""
        return StorePersistence(self.every, context)


class StorePersistence(NoPersistence):
    """State lives in the state store on another node; the server itself may be lost."""

    source = "store"
    immediate = False

    def __init__(self, every: int, context: ServerContext) -> None:
        self.window = every
        self._shard = context.shard
        self._deadline = context.timings.copy
        self._transport = context.transport
        self._store = context.store
        # What is known to be in the store, which one that is, and in which epoch.
        self._there: tuple[ShardState, Endpoint, int] | None = None

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Put the state that the server starts with."""
        await self.commit(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the store has the state; of tables only what is new goes there."""
        store = self._store()
        there, self._there = self._there, None
        if there is None or not state.tables or there[1:] != (store, epoch):
            await self._put(store, PutState(self._shard, epoch, state))
        else:
            try:
                newer, kept = without(there[0], state)
                since = PutSince(self._shard, epoch, newer, there[0].index, kept)
                await self._put(store, since)
            except StoreUnavailable:
                await self._put(store, PutState(self._shard, epoch, state))
        self._there = (state, store, epoch)

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the state that the store has."""
        request = GetState(self._shard, epoch)
        state = await self._transport.call(self._store(), request, self._deadline, "store")
        if not isinstance(state, ShardState):
            raise StoreUnavailable(f"shard {self._shard}: the state store has no state of it")
        return state

    async def _put(self, store: Endpoint, request: PutState | PutSince) -> None:
        await self._transport.call(store, request, self._deadline, "store")
