"""Where a shard's state survives: one class per kind of durability, behind one interface.

Chain replication is not here: a replica with a successor has its operations acknowledged by it
(`dps.protocol.server.replica`), and what is here comes after the last replica.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from dps.core import recovery
from dps.core.shard import ShardState
from dps.errors import StoreUnavailable
from dps.events import Sink
from dps.protocol.group import Group
from dps.protocol.messages import GetState, PutSince, PutState
from dps.protocol.storage.checkpoints import Checkpoints
from dps.protocol.storage.snapshot_checkpoints import CutCheckpoints
from dps.protocol.storage.state_store import without
from dps.protocol.transport import Clock, Endpoint, Transport


class Durability(Protocol):
    """Keeps a shard's state where it outlives the server.

    Attributes
    ----------
    source
        What a state from `restore` is called in events.
    immediate
        Whether `commit` never has anything to wait for.
    window
        How many operations may be applied but not yet committed.
    saved
        The version that survives the loss of the server, if it need not be the last acked one.
    """

    source: str
    immediate: bool
    window: int

    @property
    def saved(self) -> int: ...

    def take_over(self, saved: int, version: int) -> None:
        """Go on where that of another replica is, which has given away its state of a version."""
        ...

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Make the state durable with which a server starts."""
        ...

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the updates in `state` may be acked."""
        ...

    async def restore(self, epoch: int) -> ShardState:
        """Return the state to go on from, and keep servers of earlier epochs from changing it."""
        ...

    async def close(self) -> None:
        """Do nothing more by itself."""
        ...


class Nowhere:
    """State survives only in the replicas of the shard, if there are several, or in workers."""

    source = "initial"
    immediate = True
    window = 64
    saved = 0

    def take_over(self, saved: int, version: int) -> None:
        """Do nothing."""

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Do nothing."""

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Do nothing."""

    async def restore(self, epoch: int) -> ShardState:
        """Refuse: there is nothing to restore from."""
        raise StoreUnavailable("this durability keeps no state to restore from")

    async def close(self) -> None:
        """Do nothing."""


class Stored:
    """State lives in the state store on another node; the server itself may be lost."""

    source = "store"
    immediate = False
    saved = 0

    def __init__(
        self,
        shard: int,
        wanted: recovery.SharedStore,
        group: Group,
        transport: Transport,
        store: Callable[[], Awaitable[Endpoint]],
    ) -> None:
        self.window = wanted.every
        self._shard = shard
        self._deadline = group.timings.copy
        self._transport = transport
        self._store = store
        # What is known to be in the store, which one that is, and in which epoch.
        self._there: tuple[ShardState, Endpoint, int] | None = None

    def take_over(self, saved: int, version: int) -> None:
        """Do nothing: what the other replica has acked is in the store."""

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Put the state that the server starts with."""
        await self.commit(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the store has the state; of tables only what is new goes there."""
        store = await self._store()
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

    async def restore(self, epoch: int) -> ShardState:
        """Return the state that the store has."""
        request = GetState(self._shard, epoch)
        state = await self._transport.call(await self._store(), request, self._deadline, "store")
        if not isinstance(state, ShardState):
            raise StoreUnavailable(f"shard {self._shard}: the state store has no state of it")
        return state

    async def _put(self, store: Endpoint, request: PutState | PutSince) -> None:
        await self._transport.call(store, request, self._deadline, "store")

    async def close(self) -> None:
        """Do nothing: the store is written to only by `commit`."""


def durability(
    shard: int,
    group: Group,
    transport: Transport,
    clock: Clock,
    emit: Sink,
    store: Callable[[], Awaitable[Endpoint]],
) -> Durability:
    """Return what carries out the group's choice for one shard."""
    match group.recovery.durability:
        case recovery.Checkpoint(scope="all") as wanted:
            return CutCheckpoints(shard, wanted, group, transport, clock, emit)
        case recovery.Checkpoint() as wanted:
            return Checkpoints(shard, wanted, group.name, clock, emit)
        case recovery.SharedStore() as wanted:
            return Stored(shard, wanted, group, transport, store)
        case recovery.NoDurability() | recovery.Chain() | recovery.WorkerCache():
            return Nowhere()
