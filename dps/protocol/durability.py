"""Owns where a shard's state survives: one class per kind of durability, behind one interface.

Chain replication is not here: a replica with a successor has its operations acknowledged by it
(`dps.protocol.replica`), and what is here comes after the last replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, TypeVar

from dps.core import recovery
from dps.core.shard import ShardState
from dps.errors import CheckpointCorrupt, ConfigurationError, StoreUnavailable
from dps.events import CheckpointFailed, CheckpointRefused, CheckpointWritten, Sink
from dps.protocol.checkpoint import CheckpointFiles
from dps.protocol.group import Group
from dps.protocol.messages import GetState, PutState
from dps.protocol.transport import Clock, Endpoint, Transport

T = TypeVar("T")


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
    """

    source: str
    immediate: bool
    window: int

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Make the state durable with which a server starts."""
        ...

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the updates in `state` may be acked."""
        ...

    async def restore(self, epoch: int) -> ShardState:
        """Return the state to go on from, and keep servers of earlier epochs from changing it."""
        ...


class Nowhere:
    """State survives only in the replicas of the shard, if there are several."""

    source = "initial"
    immediate = True
    window = 64

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Do nothing."""

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Do nothing."""

    async def restore(self, epoch: int) -> ShardState:
        """Refuse: there is nothing to restore from."""
        raise StoreUnavailable("this durability keeps no state to restore from")


class Checkpoints:
    """State is written to files so often that at most `every` acked updates are ever at risk."""

    source = "checkpoint"
    immediate = False
    window = 64

    def __init__(
        self, shard: int, wanted: recovery.Checkpoint, group: str, clock: Clock, emit: Sink
    ) -> None:
        if wanted.path is None:
            raise ConfigurationError("checkpoint: no path was given")
        self._shard = shard
        self._wanted = wanted
        self._clock = clock
        self._emit = emit
        # A folder for each group: epochs start anew, and another run's must not be taken for ours.
        path = f"{wanted.path.rstrip('/')}/{group}"
        self._files = CheckpointFiles(path, shard, wanted.keep)
        self._complete = 0
        self._write: asyncio.Task[None] | None = None
        sync = wanted.mode == "sync"
        # Half the interval is for the updates that come while a write is under way.
        self._due = wanted.every if sync else max(1, wanted.every // 2)
        self._allowed = wanted.every - 1 if sync else wanted.every

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Write the state that the server starts with, so that there always is a checkpoint."""
        await self._publish(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Start a write when one is due; wait for it only where the promise asks for it."""
        if state.version - self._complete >= self._due:
            self._start_writing(epoch, state)
        while state.version - self._complete > self._allowed:
            before = self._complete
            await asyncio.shield(self._start_writing(epoch, state))
            if self._complete == before:
                raise StoreUnavailable(f"shard {self._shard}: checkpoints cannot be written")

    async def restore(self, epoch: int) -> ShardState:
        """Return the newest checkpoint that is whole, recording those that are not."""
        for found in await _in_thread(self._files.found):
            try:
                return await _in_thread(partial(self._files.read, found))
            except CheckpointCorrupt as error:
                self._emit(
                    CheckpointRefused(self._clock.now(), self._shard, found.manifest, str(error))
                )
        raise StoreUnavailable(f"shard {self._shard}: no whole checkpoint in {self._wanted.path}")

    def _start_writing(self, epoch: int, state: ShardState) -> asyncio.Task[None]:
        if self._write is None or self._write.done():
            self._write = asyncio.create_task(self._try_to_publish(epoch, state))
        return self._write

    async def _try_to_publish(self, epoch: int, state: ShardState) -> None:
        try:
            await self._publish(epoch, state)
        except StoreUnavailable as error:
            self._emit(CheckpointFailed(self._clock.now(), self._shard, epoch, str(error)))

    async def _publish(self, epoch: int, state: ShardState) -> None:
        began = self._clock.now()
        nbytes = await _in_thread(partial(self._files.write, epoch, state))
        now = self._clock.now()
        self._complete = state.version
        self._emit(CheckpointWritten(now, self._shard, epoch, state.version, nbytes, now - began))


class Stored:
    """State lives in the state store on another node; the server itself may be lost."""

    source = "store"
    immediate = False

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
        self._find_store = store
        self._store: Endpoint | None = None

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Put the state that the server starts with in the epoch, into the store of that epoch."""
        self._store = await self._find_store()
        await self.commit(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the store has the state."""
        store = self._store or await self._find_store()
        request = PutState(self._shard, epoch, state)
        await self._transport.call(store, request, self._deadline, "store")

    async def restore(self, epoch: int) -> ShardState:
        """Return the state that the store has."""
        store, request = await self._find_store(), GetState(self._shard, epoch)
        state = await self._transport.call(store, request, self._deadline, "store")
        if not isinstance(state, ShardState):
            raise StoreUnavailable(f"shard {self._shard}: the state store has no state of it")
        return state


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
        case recovery.Checkpoint() as wanted:
            return Checkpoints(shard, wanted, group.name, clock, emit)
        case recovery.SharedStore() as wanted:
            return Stored(shard, wanted, group, transport, store)
        case recovery.NoDurability() | recovery.Chain():
            return Nowhere()


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)
