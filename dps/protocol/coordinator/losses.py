"""What failures cost: which acknowledged updates a restored shard lacks, and how long it was down.

Only clients know what was acknowledged to them, and only the process that restores a shard knows
what its state has. So each client counts its acknowledgements (`Receipts`), the table lists what
each shard was restored with (`Restoration`), and the coordinator compares the two (`Losses`). A
failover is recorded when its cost is known (`Failovers`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from dps.core.checkpoint_interval import FailureHistory
from dps.core.functions import names_of
from dps.events import Failover, LossReported
from dps.protocol.messages import Account, Brought, Loss, Restoration, Statement, View, loss_after
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator

KEPT = 100  # failovers
_OF_A_REPLICA = Brought("replica", 0, {})


@dataclass(slots=True)
class _Inquiry:
    """A restoration, and the updates that were acknowledged `before` it, by name."""

    restoration: Restoration
    after: int  # the last version of the table without it
    before: dict[str, int]
    awaited: dict[str, int]  # the workers that have not stated theirs yet, and their incarnations
    # Names and incarnations whose last acknowledgements are unknown. Two incarnations may be
    # different processes, and one does not speak for the other.
    doubtful: set[tuple[str, int]]


@dataclass(slots=True)
class _Book:
    """What was acknowledged of one shard, and the names for which that is doubtful."""

    acked: dict[str, int] = field(default_factory=dict)
    doubtful: set[tuple[str, int]] = field(default_factory=set)
    inquiries: list[_Inquiry] = field(default_factory=list)

    def after(self, epoch: int) -> list[_Inquiry]:
        """The restorations in later epochs, the first of them first."""
        later = takewhile(lambda i: i.restoration.epoch > epoch, reversed(self.inquiries))
        return list(later)[::-1]


class Losses:
    """Asks workers what was acknowledged to them, and compares. Used from one event loop.

    Losses are recorded when they become known, or known better. The `revision` grows with every
    change of `found`.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.revision = 0
        self._coordinator = coordinator
        self._calls = bool(coordinator.group.functions)
        self._found: dict[tuple[int, int], Loss] = {}
        self._books = [_Book() for _ in coordinator.group.layout.shards]

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
        """Whether no worker has to state what was acknowledged to it."""
        return not any(i.awaited for book in self._books for i in book.inquiries)

    def of(self, shard: int, epoch: int) -> Loss | None:
        """Return what a restoration cost, if anything is known."""
        return self._found.get((shard, epoch))

    def restored(self, view: View, brought: Brought, *, certain: bool, cause: str) -> None:
        """Note that a shard was restored (see `Restoration`), and ask every active worker.

        What is known at once is published with the view.
        """
        book, there = self._books[view.shard], brought.applied
        if brought.based_on is not None:
            # What an earlier restoration lost may be back, but not what was acked after that one.
            for earlier in book.after(brought.based_on):
                kept = earlier.restoration.applied
                there = {name: min(n, kept.get(name, 0)) for name, n in there.items()}
        restoration = Restoration(
            shard=view.shard,
            epoch=view.epoch,
            number=len(book.inquiries) + 1,
            at=self._coordinator.clock.now(),
            source=brought.source,
            version=brought.version,
            applied=there,
            certain=certain,
            cause=cause,
        )
        inquiry = _Inquiry(
            restoration,
            after=self._coordinator.version,
            before=dict(book.acked),
            awaited=self._coordinator.workers.active,
            doubtful=set(book.doubtful),
        )
        book.inquiries.append(inquiry)
        # An unknown acknowledgement is lost if everything that is known of its name is lost.
        book.doubtful = {
            (name, incarnation)
            for name, incarnation in book.doubtful
            if there.get(name, 0) > book.acked.get(name, 0)
        }
        book.acked = {name: min(n, there.get(name, 0)) for name, n in book.acked.items()}
        self._settle([inquiry])

    async def stated(
        self, worker: str, incarnation: int, statement: Statement, *, final: bool = False
    ) -> None:
        """Enter a client's statement; `final`: this incarnation of the worker ends with it."""
        touched: list[_Inquiry] = []
        for account in statement.accounts:
            touched += self._enter(account)
        for book in self._books:
            for inquiry in (each for each in book.inquiries if each.awaited or each.doubtful):
                if final or statement.known > inquiry.after:
                    self._answered(inquiry, worker, incarnation, statement.incarnations)
                    touched.append(inquiry)
        await self._publish(touched)

    async def left(self, worker: str, incarnation: int) -> None:
        """Note that a worker was lost, or another process took its name: it states no more."""
        doubtful = self._named(worker, [incarnation])
        touched: list[_Inquiry] = []
        for book in self._books:
            book.doubtful |= doubtful
            for inquiry in book.inquiries:
                if inquiry.awaited.pop(worker, None) is not None:
                    inquiry.doubtful |= doubtful
                    touched.append(inquiry)
        await self._publish(touched)

    async def has(self, view: View, incarnation: int, counts: Mapping[str, int]) -> None:
        """Note what a shard has of a lost worker: no more than that was acknowledged to it."""
        touched: list[_Inquiry] = []
        for name, count in counts.items():
            touched += self._enter(Account(view.shard, name, view.epoch, count, incarnation + 1))
        await self._publish(touched)

    def _named(self, worker: str, incarnations: Collection[int]) -> set[tuple[str, int]]:
        """These incarnations, under each name that the worker's updates have."""
        names = names_of(worker) if self._calls else (worker,)
        return {(name, incarnation) for name in names for incarnation in incarnations}

    def _enter(self, account: Account) -> list[_Inquiry]:
        """Enter an account; return the restorations that came after it."""
        book, name, count = self._books[account.shard], account.name, account.count
        since = book.after(account.epoch)
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
        """Note that a worker, which was its `own` incarnations, has stated all from before."""
        asked = inquiry.awaited.get(worker)
        if asked is not None and asked <= incarnation:
            del inquiry.awaited[worker]
            if asked not in own:  # it is another process, which does not know
                inquiry.doubtful |= self._named(worker, [asked])
        inquiry.doubtful -= self._named(worker, own)

    async def _publish(self, inquiries: Iterable[_Inquiry]) -> None:
        """Publish losses that have become known, and failovers whose cost has."""
        known = self._settle(inquiries)
        if known or (self._coordinator.failovers.await_cost and self.is_settled):
            await self._coordinator.publish()

    def _settle(self, inquiries: Iterable[_Inquiry]) -> bool:
        """Record losses that have become known; return whether any have."""
        changed = []
        for inquiry in inquiries:
            if inquiry.awaited:
                continue
            at, loss = (inquiry.restoration.shard, inquiry.restoration.epoch), _cost(inquiry)
            if loss == self._found.get(at):
                continue
            self.revision += 1
            if loss is None:  # there only might have been one
                del self._found[at]
            else:
                self._found[at] = loss
                changed.append(loss)
        for loss in changed:
            event = LossReported(
                self._coordinator.clock.now(),
                shard=loss.shard,
                epoch=loss.epoch,
                updates=loss.updates,
                exact=loss.exact,
                source=loss.source,
                version=loss.version,
                cause=loss.cause,
            )
            self._coordinator.emit(event)
        return bool(changed)


def _cost(inquiry: _Inquiry) -> Loss | None:
    """What a restoration has cost; None: nothing."""
    restoration, before = inquiry.restoration, inquiry.before
    there = {name: restoration.applied.get(name, 0) for name in before}
    workers = {name: n - there[name] for name, n in before.items() if n > there[name]}
    certain = restoration.certain and not inquiry.doubtful
    # The store has whatever was acknowledged, also to workers that cannot be asked any more.
    if not workers and (certain or restoration.source == "store"):
        return None
    return loss_after(restoration, workers, certain)


@dataclass(slots=True)
class _Outage:
    """A shard that has lost replicas: since when, and what has happened since."""

    began: float
    by: str
    head: Endpoint | None
    lost: list[str] = field(default_factory=list)
    restored: tuple[int, Brought, str] | None = None  # epoch, source and cause
    served: float | None = None


class Failovers:
    """The `count` of all failovers, and the last ones. Used from one event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.found: deque[Failover] = deque(maxlen=KEPT)
        self.count = 0
        self._coordinator = coordinator
        self._clock = coordinator.clock
        self._heads: dict[int, Endpoint] = {}
        self._outages: dict[int, _Outage] = {}
        self._restorations = 0
        self._exposure, self._serving, self._at = 0.0, 0, self._clock.monotonic()

    @property
    def history(self) -> FailureHistory:
        """The restorations, and the seconds for which shards were served, over all shards.

        Servers choose by them how often to write checkpoints: what strikes one shard may strike
        the others.
        """
        return FailureHistory(self._restorations, self._exposure_at(self._clock.monotonic()))

    @property
    def await_cost(self) -> bool:
        """Whether a shard is served again, but the cost is not known yet."""
        return any(outage.served is not None for outage in self._outages.values())

    def lost(self, shard: int, node: str, by: str) -> None:
        """Note that a shard has lost a replica."""
        began, head = self._clock.monotonic(), self._heads.get(shard)
        outage = self._outages.setdefault(shard, _Outage(began, by, head))
        if node not in outage.lost:
            outage.lost.append(node)

    def restored(self, view: View, brought: Brought, *, certain: bool) -> None:
        """Note that a shard was restored; `certain` is as in `Restoration`."""
        cause = self._cause(view.shard, brought.source)
        if view.shard in self._outages:
            self._outages[view.shard].restored = view.epoch, brought, cause
        self._restorations += 1
        self._coordinator.losses.restored(view, brought, certain=certain, cause=cause)

    def look(self, views: Sequence[View]) -> None:
        """Record the failovers that are over and whose cost is known."""
        self._exposure, self._at = self._exposure_at(now := self._clock.monotonic()), now
        self._serving = sum(view.serving for view in views)
        for view in views:
            outage = self._outages.get(view.shard)
            if outage is not None and not view.serving:
                outage.served = None
            elif outage is not None:
                outage.served = outage.served or now
                if outage.restored is None or self._coordinator.losses.is_settled:
                    self._end(view, outage, outage.served)
            if view.serving:
                self._heads[view.shard] = view.chain[0]

    def _exposure_at(self, now: float) -> float:
        return self._exposure + self._serving * (now - self._at)

    def _end(self, view: View, outage: _Outage, served: float) -> None:
        epoch, brought, cause = outage.restored or (view.epoch, _OF_A_REPLICA, "")
        loss = self._coordinator.losses.of(view.shard, epoch)
        failover = Failover(
            self._clock.now(),
            shard=view.shard,
            epoch=epoch,
            lost=", ".join(outage.lost),
            by=outage.by,
            seconds=served - outage.began,
            node=self._coordinator.members.node(view.chain[0]),
            took_over=view.chain[0] != outage.head,
            copies=len(view.chain),
            wanted=self._coordinator.group.replicas,
            source=brought.source,
            version=brought.version,
            cause=cause,
            updates_lost=loss.updates if loss is not None else 0,
            exact=loss is None or loss.exact,
        )
        del self._outages[view.shard]
        self.count += 1
        self.found.append(failover)
        self._coordinator.emit(failover)

    def _cause(self, shard: int, source: str) -> str:
        group = self._coordinator.group
        if shard not in self._outages and group.restores_together:
            return "another shard was lost, and all go back together"
        if group.replicas > 1:
            return f"all {group.replicas} copies were gone"
        if source != "initial":
            return "its server was lost"
        other = "the state store too" if group.recovery.stores else "nothing kept its state"
        return f"its server was lost and {other}"
