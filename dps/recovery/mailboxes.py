"""Mailboxes: a store node keeps the gradients that workers push to a shard while it is down.

They are fenced by epoch: a server that was replaced cannot empty the mailbox of its successor.
"""

from __future__ import annotations

from dps.core.updates import Operation
from dps.errors import MailboxClosed, StaleEpoch
from dps.protocol.messages import ClearMail, Deposit, TakeMail


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

    def deposit(self, m: Deposit) -> None:
        """Keep a gradient, once; raises `MailboxClosed` if a server has taken over since."""
        if m.epoch <= self._closed.get(m.shard, 0):
            raise MailboxClosed(f"shard {m.shard} is served again (epoch {m.epoch})")
        mail = self._mail.setdefault(m.shard, [])
        # A client that was not told that its gradient is here deposits it again.
        if all(op.id != m.operation.id for _, op in mail):
            mail.append((m.epoch, m.operation))

    def take(self, m: TakeMail) -> tuple[Operation, ...]:
        """Close the mailbox for this epoch and return what is in it."""
        self._closed[m.shard] = max(m.epoch, self._closed.get(m.shard, 0))
        return tuple(op for epoch, op in self._mail.get(m.shard, ()) if epoch <= m.epoch)

    def clear(self, m: ClearMail) -> None:
        """Forget what was taken in this epoch; raises `StaleEpoch` if it was taken again since.

        Deposits of later epochs stay, even if the request comes late or twice.
        """
        closed = self._closed.get(m.shard, 0)
        if m.epoch < closed:
            raise StaleEpoch(f"mailbox of shard {m.shard}: epoch {m.epoch} is over")
        if m.epoch == closed:  # else it was taken from another mailbox
            mail = self._mail.get(m.shard, ())
            self._mail[m.shard] = [kept for kept in mail if kept[0] > m.epoch]
