"""What the store's node holds: the shards' states, and mailboxes for shards that are down.

Both are fenced by epoch: once a later server has taken over a shard, an earlier one that comes back
can neither overwrite its state nor empty its mailbox.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from dps.core.shard import ShardState
from dps.core.tables.table import SparseTable, table_of
from dps.core.updates import Operation
from dps.errors import MailboxClosed, StaleEpoch, StoreUnavailable
from dps.protocol.messages import (
    ClearMail,
    Deposit,
    Done,
    GetState,
    LookUp,
    Mail,
    PutSince,
    PutState,
    StoredAt,
    TakeMail,
)


def without(base: ShardState, state: ShardState) -> tuple[ShardState, dict[str, int]]:
    """Return a state without the levels that it shares with `base`, and how many of each table."""
    kept = {name: _shared(base, name, table) for name, table in state.tables.items()}
    tables = {
        name: SparseTable(table.levels[: len(table.levels) - kept[name]])
        for name, table in state.tables.items()
    }
    return replace(state, tables=tables), kept


def _shared(base: ShardState, name: str, table: SparseTable) -> int:
    """How many of the oldest levels of a table are those that it has in `base`."""
    before = reversed(table_of(base.tables, name).levels)
    both = zip(before, reversed(table.levels), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], both))


def _with(base: ShardState, m: PutSince) -> ShardState:
    """Undo `without`."""
    tables = {}
    for name, table in m.state.tables.items():
        older = table_of(base.tables, name).levels
        kept = older[len(older) - m.kept[name] :]
        tables[name] = SparseTable((*table.levels, *kept))
    return replace(m.state, tables=tables)


class StateStore:
    """The last state of each shard, in memory. All calls come from one event loop."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[int, ShardState]] = {}
        self._epochs: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of state held."""
        return sum(state.nbytes for _, state in self._states.values())

    def put(self, m: PutState) -> Done:
        """Keep a state; raises `StaleEpoch` if a later server has used the store.

        An older state of the same server was overtaken on the way: what is here contains it.
        """
        self._fence(m.shard, m.epoch)
        epoch, held = self._states.get(m.shard, (0, m.state))
        if epoch < m.epoch or held.index <= m.state.index:
            self._states[m.shard] = (m.epoch, m.state)
        return Done()

    def put_since(self, m: PutSince) -> Done:
        """Keep a state that goes on from the one that is here; errors as for `put`.

        Raises
        ------
        StoreUnavailable
            What is here is another one: the whole state has to be put.
        """
        self._fence(m.shard, m.epoch)
        epoch, base = self._states.get(m.shard, (0, m.state))
        if (epoch, base.index) != (m.epoch, m.base):
            raise StoreUnavailable(f"store: index {m.base} of shard {m.shard} is not here")
        return self.put(PutState(m.shard, m.epoch, _with(base, m)))

    def look_up(self, m: LookUp) -> StoredAt:
        """Return of which index the state is, and fence earlier servers off."""
        state = self.get(m)
        return StoredAt(-1 if state is None else state.index)

    def get(self, m: GetState | LookUp) -> ShardState | None:
        """Return the state, if there is one, and fence earlier servers off."""
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


class Mailboxes:
    """Buffered gradients per shard, in order. All calls come from one event loop.

    A mailbox takes deposits while its shard is down and is closed by the server that takes over.
    What was taken stays until the shard is served with it.
    """

    def __init__(self) -> None:
        self._mail: dict[int, list[tuple[int, Operation]]] = {}
        self._closed: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of gradients held, and of the weights that go with them."""
        return sum(op.nbytes for mail in self._mail.values() for _, op in mail)

    def clear_all(self) -> None:
        """Forget all mail, but not until when each mailbox is closed.

        A client with an old table leaves nothing here that nobody would look for.
        """
        self._mail.clear()

    def deposit(self, m: Deposit) -> Done:
        """Keep a gradient, once; raises `MailboxClosed` if a server has taken over since."""
        if m.epoch <= self._closed.get(m.shard, 0):
            raise MailboxClosed(f"shard {m.shard} is served again (epoch {m.epoch})")
        mail = self._mail.setdefault(m.shard, [])
        # A client that was not told that its gradient is here deposits it again.
        if all(op.id != m.operation.id for _, op in mail):
            mail.append((m.epoch, m.operation))
        return Done()

    def take(self, m: TakeMail) -> Mail:
        """Close the mailbox for this epoch and return what is in it."""
        self._closed[m.shard] = max(m.epoch, self._closed.get(m.shard, 0))
        return Mail(tuple(op for epoch, op in self._mail.get(m.shard, ()) if epoch <= m.epoch))

    def clear(self, m: ClearMail) -> Done:
        """Forget what was taken in this epoch; raises `StaleEpoch` if it was taken again since.

        Deposits of later epochs stay, even if the request comes late or twice.
        """
        closed = self._closed.get(m.shard, 0)
        if m.epoch < closed:
            raise StaleEpoch(f"mailbox of shard {m.shard}: epoch {m.epoch} is over")
        if m.epoch == closed:  # else it was taken from another mailbox
            mail = self._mail.get(m.shard, ())
            self._mail[m.shard] = [kept for kept in mail if kept[0] > m.epoch]
        return Done()
