"""The stateless server: shard state lives in state stores on other nodes.

- Written: a server puts each state that it commits to every store (`StorePersistence`), which keeps
  the last one of each shard (`StateStore`).
- Restored: from the newest state of the stores.
- Promised: no acked update is lost while the server lives, or a store that has its state.

When a store is lost (`dps.protocol.coordinator`):

1. Puts to it fail, so servers ack nothing. Workers wait, but buffer nothing: until step 4 the
   shards count as served. A store that only one server cannot reach is not lost: that shard does
   without it (`ReportLink`).
2. The monitor of its host, Dask's scheduler or its lease shows that the node is lost
   (`liveness.py`); a silent node that alone can be a store is waited for. `Coordinator.lose_host`
   then removes the store.
3. `_appoint_keepers` appoints the stores: those that are left, and free store nodes.
4. Every shard enters an epoch with these stores (`ShardController._reconfigure`). Its server puts
   its whole state to each of them before the shard is served again, so no acked update is lost.
   Workers wait or buffer gradients, as in any outage.
5. Without any store no epoch begins, and shards stay served by servers that apply up to `every`
   updates and ack none. So workers wait. Steps 3 and 4 follow as soon as a store node joins.
6. If the server is lost as well, another one restores the state from a store that has every acked
   update (`ShardController._bring_back`); an appointed store that is still empty has none. If
   there is no store at all, a store node must join first. If none has the state, the server uses
   the checkpoints below, or the initial values, and the lost updates are reported.

Store nodes also hold the `Mailboxes`, with any durability.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Annotated

from dps.core.ranges import whole_from
from dps.core.shard import ShardState
from dps.core.tables.table import SparseTable, table_of
from dps.core.updates import Operation
from dps.errors import MailboxClosed, NotServing, StaleEpoch, StoreUnavailable, TransportError
from dps.protocol.messages import ClearMail, Deposit, GetState, LookUp, PutSince, PutState, TakeMail
from dps.protocol.transport import Endpoint, answers_of
from dps.protocol.wire import message
from dps.recovery.durability import Durability, Persistence, ServerContext


@message
@dataclass(frozen=True, slots=True)
class SharedStore(Durability):
    """Shard state lives in a state store on another node (the stateless server).

    An update is acked when the store has a state that contains it; updates that arrive while the
    store is being written share the next write.

    With two stores the loss of one loses nothing: each state is put to both, and acks wait for
    both. When one is lost, or a server has not reached it for a lease, acks wait only for the
    other one while no further node can be a store; a new store gets a copy before the shard is
    served again. Servers send that copy, so a shard that is down gets none; its buffered gradients
    are then only in the remaining store.

    If the only store is lost, nothing is lost while the server lives: it applies up to `every`
    updates, and acks them when another node is the store. Workers wait for that, for up to
    `Timings.unavailable` seconds. If the server is lost before that, the shard restarts from its
    initial values.

    Parameters
    ----------
    every
        The largest number of updates that share a write; a BSP round and a replay are one write.
    stores
        How many stores, each on its own node, keep each state and each buffered gradient.

    Examples
    --------
    >>> Recovery(SharedStore(stores=2), outage=Continue()).stores
    2
    """

    every: Annotated[int, whole_from(1, "updates")] = 16
    stores: Annotated[int, whole_from(1, "nodes")] = 1

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Return whether a present store has the state: a newly chosen one may be empty."""
        return any(store in stored for store in stores)

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Return whether a host has, or may have received, the state of lost stores."""
        return (alone or tried) and not restorable

    def persistence(self, context: ServerContext) -> Persistence:
        """Return the object that writes one shard's state to the stores."""
        return StorePersistence(self.every, context)


class StorePersistence(Persistence):
    """Puts one shard's states to the stores. Used from one event loop."""

    source = "store"
    immediate = False

    def __init__(self, every: int, context: ServerContext) -> None:
        self.window = every
        self._shard = context.shard
        self._timings = context.timings
        self._ask = context.ask_store
        self._keepers = context.keepers
        # What is known to be in each store, and in which epoch it was put there.
        self._there: dict[Endpoint, tuple[ShardState, int]] = {}

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Put the state that the server starts with."""
        await self.commit(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when every store has the state."""
        stores = self._keepers(epoch).stores
        if not stores:
            raise NotServing("the group has no node for the state store")
        self._there = {store: self._there[store] for store in stores if store in self._there}
        puts = (self._keep(store, epoch, state) for store in stores)
        for failed in await asyncio.gather(*puts, return_exceptions=True):
            if failed is not None:
                raise failed

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the newest state in those reachable stores that have every acked update."""
        # A replaced server may still put states of its epoch to stores that are not asked here. It
        # can ack no update: an ack needs all stores, and those that are asked refuse its epoch.
        keepers = self._keepers(epoch)
        calls = [self._index(store, epoch) for store in keepers.stores[: keepers.whole]]
        indices = await answers_of(calls, self._timings.lease)
        for _, store in sorted(indices, key=lambda each: each[0], reverse=True):
            with suppress(TransportError):
                request = GetState(self._shard, epoch)
                state = await self._ask(store, request, self._timings.copy)
                if isinstance(state, ShardState):
                    return state
        raise StoreUnavailable(f"shard {self._shard}: no store returned its state")

    async def _index(self, store: Endpoint, epoch: int) -> tuple[int, Endpoint]:
        """Make a store refuse earlier epochs; return the index of its state."""
        stored: int = await self._ask(store, LookUp(self._shard, epoch), self._timings.call)
        return stored, store

    async def _keep(self, store: Endpoint, epoch: int, state: ShardState) -> None:
        there = self._there.get(store)
        if there is not None and (there[0].index, there[1]) == (state.index, epoch):
            return  # this store has it: the put to another one had failed
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


class StateStore:
    """The last state of each shard, in memory. All calls come from one event loop."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, ShardState]] = {}
        self._epochs: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of state held."""
        return sum(state.nbytes for _, state in self._states.values())

    def put(self, m: PutState) -> None:
        """Keep a state; raises `StaleEpoch` if a later server has used the store."""
        # An older state of the same server is ignored: the one that is here contains its updates.
        self._fence(m.shard, m.epoch)
        epoch, held = self._states.get(m.shard, (0, m.state))
        if epoch < m.epoch or held.index <= m.state.index:
            self._states[m.shard] = (m.epoch, m.state)

    def put_since(self, m: PutSince) -> None:
        """Keep a state that continues the one here; also raises `StoreUnavailable` for another."""
        self._fence(m.shard, m.epoch)
        epoch, base = self._states.get(m.shard, (0, m.state))
        if (epoch, base.index) != (m.epoch, m.base):
            raise StoreUnavailable(f"store: index {m.base} of shard {m.shard} is not here")
        self.put(PutState(m.shard, m.epoch, _with(base, m)))

    def look_up(self, m: LookUp) -> int:
        """Return the index of the state, and fence earlier servers."""
        state = self.get(m)
        return -1 if state is None else state.index

    def get(self, m: GetState | LookUp) -> ShardState | None:
        """Return the state, if there is one, and fence earlier servers."""
        self._fence(m.shard, m.epoch)
        return self._states[m.shard][1] if m.shard in self._states else None

    def clear(self) -> None:
        """Forget everything."""
        self._states.clear()
        self._epochs.clear()

    def _fence(self, shard: int, epoch: int) -> None:
        newest = self._epochs.get(shard, 0)
        if epoch < newest:
            raise StaleEpoch(f"store: shard {shard} is in epoch {newest}, not {epoch}")
        self._epochs[shard] = epoch


def without(base: ShardState, state: ShardState) -> tuple[ShardState, dict[str, int]]:
    """Return a state without the levels that it shares with `base`, and their number by table."""
    kept = {name: _shared(base, name, table) for name, table in state.tables.items()}
    tables = {
        name: SparseTable(table.levels[: len(table.levels) - kept[name]])
        for name, table in state.tables.items()
    }
    return replace(state, tables=tables), kept


def _shared(base: ShardState, name: str, table: SparseTable) -> int:
    """How many of a table's oldest levels are also in `base`."""
    before = reversed(table_of(base.tables, name).levels)
    both = zip(before, reversed(table.levels), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))


def _with(base: ShardState, m: PutSince) -> ShardState:
    tables = {}
    for name, table in m.state.tables.items():
        older = table_of(base.tables, name).levels
        kept = older[len(older) - m.kept[name] :]
        tables[name] = SparseTable((*table.levels, *kept))
    return replace(m.state, tables=tables)


class Mailboxes:
    """Gradients that workers push to shards that are down, in order. Used from one event loop.

    A mailbox takes deposits while its shard is down and is closed by the server that takes over.
    Gradients that it took stay until the shard is served with them. Epochs fence mailboxes: a
    server that was replaced cannot empty its successor's mailbox.
    """

    def __init__(self) -> None:
        self._mail: dict[int, list[tuple[int, Operation]]] = {}
        self._closed: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of gradients held, and of the weights that go with them."""
        return sum(op.nbytes for mail in self._mail.values() for _, op in mail)

    def clear_all(self) -> None:
        """Delete all gradients, but not the epoch up to which each mailbox is closed."""
        # So a client with an old table cannot leave gradients that no server would take.
        self._mail.clear()

    def deposit(self, m: Deposit) -> None:
        """Keep a gradient, once; raises `MailboxClosed` if a server has taken over since."""
        if m.epoch <= self._closed.get(m.shard, 0):
            raise MailboxClosed(f"shard {m.shard} is served again (epoch {m.epoch})")
        mail = self._mail.setdefault(m.shard, [])
        # A client that received no reply deposits its gradient again.
        if all(op.id != m.operation.id for _, op in mail):
            mail.append((m.epoch, m.operation))

    def take(self, m: TakeMail) -> tuple[Operation, ...]:
        """Close the mailbox for this epoch and return what is in it."""
        self._closed[m.shard] = max(m.epoch, self._closed.get(m.shard, 0))
        return tuple(op for epoch, op in self._mail.get(m.shard, ()) if epoch <= m.epoch)

    def clear(self, m: ClearMail) -> None:
        """Forget what was taken in this epoch; raises `StaleEpoch` if it was taken again since."""
        # Deposits of later epochs stay, even if the request comes late or twice.
        closed = self._closed.get(m.shard, 0)
        if m.epoch < closed:
            raise StaleEpoch(f"mailbox of shard {m.shard}: epoch {m.epoch} is over")
        if m.epoch == closed:  # otherwise it was taken from another mailbox
            mail = self._mail.get(m.shard, ())
            self._mail[m.shard] = [kept for kept in mail if kept[0] > m.epoch]
