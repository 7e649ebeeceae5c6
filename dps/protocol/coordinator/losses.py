"""The account of acknowledged updates: how many of them a restored shard lacks, and whose they are.

Only clients know what they were told is durable, and only whoever brings a shard back knows what
its state has. So each client keeps count of its acknowledgements (`Receipts`), the table says what
a shard was restored with (`Restoration`), and the coordinator compares the two (`Losses`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from dps.core.functions import names_of
from dps.protocol.messages import Account, Brought, Loss, Restoration, Statement
from dps.protocol.messages.losses import loss_after


@dataclass(slots=True)
class _Inquiry:
    """A restoration, and what is known of what was acknowledged before it.

    `awaited` are the workers, with their incarnations, that have yet to say; `doubtful` the names
    under which nobody knows what an incarnation was told last, with each such incarnation: they may
    be of different processes, and one does not speak for another. `after` is the version of the
    table before it.
    """

    restoration: Restoration
    after: int
    before: dict[str, int]
    awaited: dict[str, int]
    doubtful: set[tuple[str, int]]

    @property
    def is_open(self) -> bool:
        """Whether somebody has something to say yet that is not known."""
        return bool(self.awaited or self.doubtful)


class _Book:
    """What is known of one shard: what was acked, and of whom that is not known for sure."""

    def __init__(self) -> None:
        self.acked: dict[str, int] = {}
        self.doubtful: set[tuple[str, int]] = set()
        self.inquiries: list[_Inquiry] = []


class Losses:
    """The coordinator's part: it asks workers what they were told, and compares.

    Used from one event loop.

    Parameters
    ----------
    shards
        How many there are.
    calls
        Whether workers may call functions.

    Attributes
    ----------
    found
        What was lost, one entry for each restoration that cost anything.
    revision
        Grows with every change of `found`.
    """

    def __init__(self, shards: int, *, calls: bool) -> None:
        self.revision = 0
        self._calls = calls
        self._found: dict[tuple[int, int], Loss] = {}
        self._books = [_Book() for _ in range(shards)]

    @property
    def found(self) -> tuple[Loss, ...]:
        """The losses found so far, one for each restoration that cost anything."""
        return tuple(self._found.values())

    @property
    def restorations(self) -> tuple[Restoration, ...]:
        """The last restoration of each shard that was restored: what clients compare with."""
        return tuple(book.inquiries[-1].restoration for book in self._books if book.inquiries)

    @property
    def is_settled(self) -> bool:
        """Whether nobody has yet to say what it was told."""
        return not any(i.awaited for book in self._books for i in book.inquiries)

    def restored(
        self,
        shard: int,
        epoch: int,
        brought: Brought,
        at: float,
        *,
        certain: bool,
        after: int,
        active: Mapping[str, int],
        cause: str = "",
    ) -> list[Loss]:
        """Take note that a shard was restored; return losses that are known by that alone.

        Parameters
        ----------
        certain
            As in `Restoration`.
        after
            The version of the table in which it is not yet.
        active
            The workers that take part, with their incarnations: each is asked.
        cause
            As in `Restoration`.
        """
        book = self._books[shard]
        number, there = len(book.inquiries) + 1, brought.applied
        if brought.based_on is not None:
            # What an earlier restoration lost may be back, but not what was acked after that one.
            for earlier in _after(book, brought.based_on):
                kept = earlier.restoration.applied
                there = {name: min(n, kept.get(name, 0)) for name, n in there.items()}
        source = brought.source, brought.version
        told = Restoration(shard, epoch, number, at, *source, there, certain, cause)
        inquiry = _Inquiry(told, after, dict(book.acked), dict(active), set(book.doubtful))
        book.inquiries.append(inquiry)
        # What somebody was told that nobody knows is gone where all is gone that is known.
        book.doubtful = {
            (name, incarnation)
            for name, incarnation in book.doubtful
            if there.get(name, 0) > book.acked.get(name, 0)
        }
        book.acked = {name: min(n, there.get(name, 0)) for name, n in book.acked.items()}
        return self._settle([inquiry])

    def stated(
        self, worker: str, incarnation: int, statement: Statement, *, final: bool = False
    ) -> list[Loss]:
        """Take what a client was told; return losses that are known, or known better, by that.

        It is `final` if this incarnation of the worker has ended with it.
        """
        touched: list[_Inquiry] = []
        for account in statement.accounts:
            touched += self._enter(account)
        for book in self._books:
            for inquiry in (each for each in book.inquiries if each.is_open):
                if final or statement.known > inquiry.after:
                    self._answered(inquiry, worker, incarnation, statement.incarnations)
                    touched.append(inquiry)
        return self._settle(touched)

    def left(self, worker: str, incarnation: int) -> list[Loss]:
        """Take note that a worker was lost, and will not say what it was told last.

        It is lost as well if another process has taken its name.
        """
        doubtful = self._named(worker, [incarnation])
        touched: list[_Inquiry] = []
        for book in self._books:
            book.doubtful |= doubtful
            for inquiry in book.inquiries:
                if inquiry.awaited.pop(worker, None) is not None:
                    inquiry.doubtful |= doubtful
                    touched.append(inquiry)
        return self._settle(touched)

    def has(
        self, shard: int, epoch: int, incarnation: int, counts: Mapping[str, int]
    ) -> list[Loss]:
        """Take what a shard has of a worker that was lost: it was told of no more than that."""
        touched: list[_Inquiry] = []
        for name, count in counts.items():
            touched += self._enter(Account(shard, name, epoch, count, incarnation + 1))
        return self._settle(touched)

    def _named(self, worker: str, incarnations: Collection[int]) -> set[tuple[str, int]]:
        """These incarnations, under each name that the worker's updates have."""
        names = names_of(worker) if self._calls else (worker,)
        return {(name, incarnation) for name in names for incarnation in incarnations}

    def _enter(self, account: Account) -> list[_Inquiry]:
        """Enter an account; return the restorations that came after it."""
        book, name, count = self._books[account.shard], account.name, account.count
        since = _after(book, account.epoch)
        for doubtful in (book.doubtful, *(inquiry.doubtful for inquiry in since)):
            earlier = {(who, n) for who, n in doubtful if who == name and n < account.incarnation}
            doubtful.difference_update(earlier)
        for inquiry in since:
            inquiry.before[name] = max(count, inquiry.before.get(name, 0))
            count = min(count, inquiry.restoration.applied.get(name, 0))
        book.acked[name] = max(count, book.acked.get(name, 0))
        return since

    def _answered(
        self, inquiry: _Inquiry, worker: str, incarnation: int, own: Collection[int]
    ) -> None:
        """A worker has said what it was told before a restoration, as its own incarnations."""
        asked = inquiry.awaited.get(worker)
        if asked is not None and asked <= incarnation:
            del inquiry.awaited[worker]
            if asked not in own:  # it is another process, which does not know
                inquiry.doubtful |= self._named(worker, [asked])
        inquiry.doubtful -= self._named(worker, own)

    def _settle(self, inquiries: Iterable[_Inquiry]) -> list[Loss]:
        changed = []
        for inquiry in inquiries:
            if inquiry.awaited:
                continue
            at, loss = (inquiry.restoration.shard, inquiry.restoration.epoch), _found(inquiry)
            if loss == self._found.get(at):
                continue
            self.revision += 1
            if loss is None:  # there only might have been one
                del self._found[at]
            else:
                self._found[at] = loss
                changed.append(loss)
        return changed


def _after(book: _Book, epoch: int) -> list[_Inquiry]:
    """The restorations in later epochs, the first of them first."""
    later = takewhile(lambda i: i.restoration.epoch > epoch, reversed(book.inquiries))
    return list(later)[::-1]


def _found(inquiry: _Inquiry) -> Loss | None:
    """What a restoration has cost; None: nothing."""
    restoration, before = inquiry.restoration, inquiry.before
    there = {name: restoration.applied.get(name, 0) for name in before}
    workers = {name: n - there[name] for name, n in before.items() if n > there[name]}
    certain = restoration.certain and not inquiry.doubtful
    # The store has whatever was acknowledged, also to those that nobody can ask.
    if not workers and (certain or restoration.source == "store"):
        return None
    return loss_after(restoration, workers, certain)
