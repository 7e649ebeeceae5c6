"""The account of acknowledged updates: how many of them a restored shard lacks, and whose they are.

Only clients know what they were told is durable, and only whoever brings a shard back knows what
its state has. So each client keeps count of its acknowledgements (`Receipts`), the table says what
a shard was restored with (`Restoration`), and the coordinator compares the two (`Losses`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from dps.core.shard import ShardState
from dps.protocol.calls import names_of
from dps.protocol.wire import message

_SOURCES = {
    "initial": "its initial values",
    "store": "the state store",
    "worker": "a worker's copy",
}


@message
@dataclass(frozen=True, slots=True)
class Loss:
    """Updates that were acknowledged, and that a shard has lost.

    Attributes
    ----------
    shard
        Which shard it was.
    time
        When the shard was restored, in seconds since the Unix epoch.
    updates
        How many are lost; of a worker's own losses, of that worker's updates.
    exact
        Whether that is their number. If not, there are at least so many: a worker that had pushed
        them was lost too, and nobody knows what it had been told last.
    source
        What the shard was restored from: "initial" values, "checkpoint", "store" or "worker".
    version
        How many updates the restored state has.
    epoch
        The shard's epoch since then.
    workers
        The name of each worker that lost updates, and how many.
    """

    shard: int
    time: float
    updates: int
    exact: bool
    source: str
    version: int
    epoch: int
    workers: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def restored_from(self) -> str:
        """What the shard was restored from, in words."""
        return _SOURCES.get(self.source, f"its checkpoint at version {self.version}")

    def __str__(self) -> str:
        if not self.updates:
            many = "may have lost acknowledged updates of a worker that was lost too"
        else:
            some = "" if self.exact else "at least "
            plural = "update" if self.updates == 1 else "updates"
            many = f"has lost {some}{self.updates} acknowledged {plural}"
        return f"shard {self.shard} {many}: it was restored from {self.restored_from}"


@message
@dataclass(frozen=True, slots=True)
class Restoration:
    """What a shard that had been served was brought back with, in `epoch`.

    `number` counts the shard's restorations, `applied` the updates of each worker, or caller of
    functions, in the state, but for those that an earlier restoration had lost and that are back
    with an older copy. It is not `certain` if some of these may have entered in an earlier
    attempt to bring the shard back, and so are none of those that the worker was told of.
    """

    shard: int
    epoch: int
    number: int
    at: float
    source: str
    version: int
    applied: dict[str, int] = field(hash=False)
    certain: bool


@message
@dataclass(frozen=True, slots=True)
class Brought:
    """What a shard is brought back with; reply to `Restore`, and part of `Seeded`.

    `based_on` is the epoch in which it was read, if it is a worker's copy.
    """

    source: str
    version: int
    applied: dict[str, int] = field(hash=False)
    based_on: int | None = None


@message
@dataclass(frozen=True, slots=True)
class Account:
    """The last acknowledgement in `epoch`: the shard then had `count` updates under this `name`.

    It was given to an `incarnation`, and the count has all that earlier ones were told of.
    """

    shard: int
    name: str
    epoch: int
    count: int
    incarnation: int


@message
@dataclass(frozen=True, slots=True)
class Statement:
    """All that a client was told is durable, as of version `known` of the table.

    It covers the `incarnations` of the worker that this client has been, and no others: another
    process may have the same name.
    """

    known: int
    incarnations: tuple[int, ...]
    accounts: tuple[Account, ...]


@message
@dataclass(frozen=True, slots=True)
class GetLosses:
    """To the coordinator: ask for all losses so far. Reply: LossList."""


@message
@dataclass(frozen=True, slots=True)
class LossList:
    """The losses of a group, one for each restoration that cost any."""

    losses: tuple[Loss, ...]


def brought(source: str, state: ShardState, based_on: int | None = None) -> Brought:
    """What a shard is brought back with that is given this state."""
    applied = {name: p.applied for name, p in state.workers.items() if p.applied}
    return Brought(source, state.version, applied, based_on)


class Receipts:
    """What one client was told is durable, and what of it was lost since. Used from one event loop.

    Parameters
    ----------
    together
        Whether shards go back together. An update that one of them has acknowledged is sent to it
        again if it goes back before all have, and is not lost: it counts when all have.
    on_loss
        Called with each loss, and again if it turns out to be larger.
    """

    def __init__(self, together: bool, on_loss: Callable[[Loss], None]) -> None:
        self._together = together
        self._on_loss = on_loss
        self._counts: dict[tuple[int, str], Account] = {}
        self._staged: dict[tuple[int, str], Account] = {}
        self._kept: dict[Account, None] = {}  # of before a restoration, until they are sent
        self._last: dict[int, Restoration] = {}
        self._losses: dict[tuple[int, int], Loss] = {}

    @property
    def losses(self) -> tuple[Loss, ...]:
        """This client's updates that were lost, one entry for each restoration that cost any."""
        return tuple(self._losses.values())

    @property
    def accounts(self) -> tuple[Account, ...]:
        """What the coordinator is to be told."""
        return (*self._kept, *self._counts.values())

    def sent(self, accounts: Iterable[Account]) -> None:
        """Take note that the coordinator has these."""
        for account in accounts:
            self._kept.pop(account, None)

    def acked(self, account: Account) -> None:
        """Take note of an acknowledgement."""
        if self._together:
            self._staged[account.shard, account.name] = account
        else:
            self._enter([account])

    def all_acked(self) -> None:
        """Take note that every shard has acknowledged what was sent to all of them."""
        staged, self._staged = self._staged, {}
        self._enter(staged.values())

    def heard(self, restorations: Iterable[Restoration]) -> bool:
        """Compare with what shards were restored with; return whether any is new."""
        new = [r for r in restorations if r.number > self._number(r.shard)]
        for restoration in new:
            # Of one that was not heard of, only what is left of it by now is known here.
            next_one = restoration.number == self._number(restoration.shard) + 1
            certain = restoration.certain and next_one
            self._last[restoration.shard] = replace(restoration, certain=certain)
        concerned = {restoration.shard for restoration in new}
        self._enter([a for a in self._counts.values() if a.shard in concerned])
        return bool(new)

    def _number(self, shard: int) -> int:
        return self._last[shard].number if shard in self._last else 0

    def _enter(self, accounts: Iterable[Account]) -> None:
        """Take how many updates under a name a shard has acknowledged in an epoch."""
        found: dict[tuple[int, int], Loss] = {}
        for account in accounts:
            at, last = (account.shard, account.name), self._last.get(account.shard)
            if last is None or account.epoch >= last.epoch:
                self._counts[at] = account
                continue
            there = last.applied.get(account.name, 0)
            self._kept[account] = None
            left = min(account.count, there)
            self._counts[at] = replace(account, epoch=last.epoch, count=left)
            if account.count > there:
                known = self._losses.get((account.shard, last.epoch))
                workers = {**(known.workers if known else {}), account.name: account.count - there}
                loss = _loss(last, workers, last.certain)
                found[account.shard, last.epoch] = self._losses[account.shard, last.epoch] = loss
        for loss in found.values():
            self._on_loss(loss)


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
        """
        book = self._books[shard]
        number, there = len(book.inquiries) + 1, brought.applied
        if brought.based_on is not None:
            # What an earlier restoration lost may be back, but not what was acked after that one.
            for earlier in _after(book, brought.based_on):
                kept = earlier.restoration.applied
                there = {name: min(n, kept.get(name, 0)) for name, n in there.items()}
        told = Restoration(
            shard, epoch, number, at, brought.source, brought.version, there, certain
        )
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
    return _loss(restoration, workers, certain)


def _loss(restoration: Restoration, workers: dict[str, int], certain: bool) -> Loss:
    r = restoration
    total = sum(workers.values())
    return Loss(r.shard, r.at, total, certain, r.source, r.version, r.epoch, workers)
