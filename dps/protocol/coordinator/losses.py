"""The cost of failures: acknowledged updates that a restored shard lacks, and its downtime.

Only clients know what was acknowledged to them, and only the process that restores a shard knows
what its state has. So each client counts its acknowledgements (`Receipts`), the table lists what
each shard was restored with (`Restoration`), and the coordinator compares the two (`Losses`). A
failover is recorded when its cost is known (`Failovers`). While a shard's server lives, the loss of
its stores is no failover.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dps.core.checkpoint_interval import FailureHistory
from dps.core.functions import names_of
from dps.events import Failover, LossReported
from dps.protocol.messages import Account, Brought, Loss, Restoration, Statement, View, loss_after
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator

KEPT = 100  # failovers


# Names and incarnations whose last acknowledgements are unknown. Two incarnations may be different
# processes, and one does not speak for the other. The value is the shard's epoch from which an
# acknowledgement to a later incarnation shows that this one has no more.
_Unknown = dict[tuple[str, int], int]


@dataclass(slots=True)
class Inquiry:
    """A restoration, and the updates `acked` between the previous one and it, by name."""

    restoration: Restoration
    after: int  # the last version of the table without it
    acked: dict[str, int]
    unknown: _Unknown
    loss: Loss | None = None  # as far as is known


@dataclass(slots=True)
class _Book:
    """One shard's restorations; `acked` is since the last one, `unknown` is as of the last one."""

    acked: dict[str, int] = field(default_factory=dict)
    unknown: _Unknown = field(default_factory=dict)
    inquiries: list[Inquiry] = field(default_factory=list)

    def after(self, epoch: int) -> list[Inquiry]:
        """The restorations in later epochs, the first of them first."""
        return [each for each in self.inquiries if each.restoration.epoch > epoch]

    def enter(self, account: Account) -> list[Inquiry]:
        """Enter an account; return the restorations that came after it."""
        name, since = account.name, self.after(account.epoch)
        acked = since[0].acked if since else self.acked
        acked[name] = max(account.count, acked.get(name, 0))
        for unknown in (self.unknown, *(inquiry.unknown for inquiry in since)):
            for (worker, n), epoch in list(unknown.items()):
                if worker == name and n < account.incarnation and epoch <= account.epoch:
                    del unknown[worker, n]
        return since

    def acked_before(self, inquiry: Inquiry) -> dict[str, int]:
        """Updates that were acknowledged and not lost yet when a shard was restored, by name."""
        before: dict[str, int] = {}
        for each in self.inquiries:
            for name, count in each.acked.items():
                before[name] = max(count, before.get(name, 0))
            if each is inquiry:
                break
            there = each.restoration.applied
            before = {name: min(n, there.get(name, 0)) for name, n in before.items()}
        return before

    def cost(self, inquiry: Inquiry) -> Loss | None:
        """The loss of a restoration; None if nothing was lost."""
        restoration = inquiry.restoration
        there = restoration.applied
        lacks = {name: n - there.get(name, 0) for name, n in self.acked_before(inquiry).items()}
        workers = {name: n for name, n in lacks.items() if n > 0}
        certain = restoration.certain and not inquiry.unknown
        # The store has all acknowledged updates, also of workers that cannot be asked any more.
        if not workers and (certain or restoration.source == "store"):
            return None
        return loss_after(restoration, workers, certain)


class Losses:
    """Asks workers for their acknowledged updates, and finds losses. Used from one event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.revision = 0  # grows with every change of `reported`
        self._coordinator = coordinator
        self._calls = bool(coordinator.group.functions)
        self._books = [_Book() for _ in coordinator.group.layout.shards]
        self._displaced = set[tuple[str, int]]()

    @property
    def reported(self) -> tuple[Loss, ...]:
        """The losses so far, one for each restoration that cost anything."""
        losses = (i.loss for book in self._books for i in book.inquiries if i.loss is not None)
        return tuple(sorted(losses, key=lambda loss: loss.time))

    @property
    def restorations(self) -> tuple[Restoration, ...]:
        """The last restoration of each restored shard, which clients compare with their acks."""
        return tuple(book.inquiries[-1].restoration for book in self._books if book.inquiries)

    @property
    def is_settled(self) -> bool:
        """Whether every active worker has reported its acknowledged updates."""
        return not any(self._is_open(i) for book in self._books for i in book.inquiries)

    def restored(self, view: View, brought: Brought, *, certain: bool, cause: str) -> Inquiry:
        """Note that a shard was restored (see `Restoration`), and ask every active worker."""
        # Losses that are known at once are published with the view.
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
        unknown = dict(book.unknown)
        for worker, incarnation in self._coordinator.workers.active.items():
            unknown |= dict.fromkeys(self._named(worker, [incarnation]), 0)
        inquiry = Inquiry(restoration, self._coordinator.version, book.acked, unknown)
        book.inquiries.append(inquiry)
        # An unknown acknowledgement is lost if everything that is known of its name is lost.
        before = book.acked_before(inquiry)
        book.acked = {}
        book.unknown = {
            (name, n): epoch
            for (name, n), epoch in book.unknown.items()
            if there.get(name, 0) > before.get(name, 0)
        }
        # The state may be older than their successors.
        book.unknown |= dict.fromkeys(self._displaced, view.epoch)
        self._settle([inquiry])
        return inquiry

    async def stated(
        self, worker: str, incarnation: int, statement: Statement, *, final: bool = False
    ) -> None:
        """Enter a client's statement; `final`: this incarnation of the worker ends with it."""
        touched = self._enter(statement.accounts)
        own = self._named(worker, {incarnation, *statement.incarnations})
        for book in self._books:
            for inquiry in book.inquiries:
                known = inquiry.unknown.keys() & own
                if known and (final or statement.known > inquiry.after):
                    for each in known:
                        del inquiry.unknown[each]
                    touched.append(inquiry)
        await self._publish(touched)

    async def left(self, worker: str, incarnation: int, *, displaced: bool = False) -> None:
        """Note that a worker was lost, or `displaced` by another process of its name.

        It may report no more updates. Those of a displaced worker may still be applied.
        """
        unknown = self._named(worker, [incarnation])
        if displaced:
            self._displaced |= unknown
        for book in self._books:
            book.unknown |= dict.fromkeys(unknown, 0)
        every = (inquiry for book in self._books for inquiry in book.inquiries)
        await self._publish([inquiry for inquiry in every if inquiry.unknown.keys() & unknown])

    async def has(self, view: View, incarnation: int, counts: Mapping[str, int]) -> None:
        """Note how many updates of a lost worker a shard has: it got no ack for later ones."""
        shard, epoch, later = view.shard, view.epoch, incarnation + 1
        accounts = (Account(shard, name, epoch, n, later) for name, n in counts.items())
        await self._publish(self._enter(accounts))

    def _enter(self, accounts: Iterable[Account]) -> list[Inquiry]:
        return [i for account in accounts for i in self._books[account.shard].enter(account)]

    def _named(self, worker: str, incarnations: Collection[int]) -> set[tuple[str, int]]:
        names = names_of(worker) if self._calls else (worker,)
        return {(name, incarnation) for name in names for incarnation in incarnations}

    def _is_open(self, inquiry: Inquiry) -> bool:
        return not inquiry.unknown.keys().isdisjoint(self._coordinator.workers.active.items())

    async def _publish(self, inquiries: Iterable[Inquiry]) -> None:
        known = self._settle(inquiries)
        if known or (self._coordinator.failovers.await_cost and self.is_settled):
            await self._coordinator.publish()

    def _settle(self, inquiries: Iterable[Inquiry]) -> bool:
        known = False
        for inquiry in inquiries:
            loss = self._books[inquiry.restoration.shard].cost(inquiry)
            if self._is_open(inquiry) or loss == inquiry.loss:
                continue
            self.revision += 1
            inquiry.loss = loss
            if loss is None:  # a possible loss was none
                continue
            known = True
            # Recorded when it becomes known, and again when it becomes known more exactly.
            event = LossReported(
                self._coordinator.clock.now(),
                loss.shard,
                loss.epoch,
                updates=loss.updates,
                exact=loss.exact,
                source=loss.source,
                version=loss.version,
                cause=loss.cause,
            )
            self._coordinator.emit(event)
        return known


@dataclass(slots=True)
class _Outage:
    """A shard that has lost replicas: when it lost the first, and what has happened since."""

    began: float
    by: str
    head: Endpoint | None
    lost: list[str] = field(default_factory=list)
    restored: Inquiry | None = None
    served: float | None = None


class Failovers:
    """The `count` of all failovers, and the last `KEPT`. Used from one event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.reported: tuple[Failover, ...] = ()
        self.count = 0
        self._coordinator = coordinator
        self._clock = coordinator.clock
        self._heads: dict[int, Endpoint] = {}
        self._outages: dict[int, _Outage] = {}
        self._restorations = 0
        self._exposure, self._serving, self._at = 0.0, 0, self._clock.monotonic()

    @property
    def history(self) -> FailureHistory:
        """The number of restorations and the seconds of service, summed over all shards."""
        # Servers derive from it how often to write checkpoints: a cause that hits one may hit
        # others.
        return FailureHistory(self._restorations, self._exposure_at(self._clock.monotonic()))

    @property
    def await_cost(self) -> bool:
        """Whether a shard is served again, but the cost of its failover is not known yet."""
        return any(outage.served is not None for outage in self._outages.values())

    def lost(self, shard: int, node: str, by: str) -> None:
        """Note that a shard has lost a replica."""
        began, head = self._clock.monotonic(), self._heads.get(shard)
        outage = self._outages.setdefault(shard, _Outage(began, by, head))
        if node not in outage.lost:
            outage.lost.append(node)

    def restored(self, view: View, brought: Brought, *, certain: bool) -> None:
        """Note that a shard was restored; `certain` is as in `Restoration`."""
        cause, losses = self._cause(view.shard, brought.source), self._coordinator.losses
        inquiry = losses.restored(view, brought, certain=certain, cause=cause)
        if view.shard in self._outages:
            self._outages[view.shard].restored = inquiry
        self._restorations += 1

    def look(self, views: Sequence[View]) -> None:
        """Record the failovers that are over and whose cost is known."""
        self._exposure, self._at = self._exposure_at(now := self._clock.monotonic()), now
        self._serving = sum(view.serving for view in views)
        for view in views:
            outage = self._outages.get(view.shard)
            if outage is not None:
                outage.served = (outage.served or now) if view.serving else None
                if outage.served and (not outage.restored or self._coordinator.losses.is_settled):
                    self._end(view, outage, outage.served)
            if view.serving:
                self._heads[view.shard] = view.chain[0]

    def _exposure_at(self, now: float) -> float:
        return self._exposure + self._serving * (now - self._at)

    def _end(self, view: View, outage: _Outage, served: float) -> None:
        loss = outage.restored.loss if outage.restored is not None else None
        about = Restoration(view.shard, view.epoch, 0, served, "replica", 0, {}, certain=True)
        if outage.restored is not None:
            about = outage.restored.restoration
        failover = Failover(
            self._clock.now(),
            shard=view.shard,
            epoch=about.epoch,
            lost=", ".join(outage.lost),
            by=outage.by,
            seconds=served - outage.began,
            node=self._coordinator.members.node(view.chain[0]),
            took_over=view.chain[0] != outage.head,
            copies=len(view.chain),
            wanted=self._coordinator.group.replicas,
            source=about.source,
            version=about.version,
            cause=about.cause,
            updates_lost=loss.updates if loss is not None else 0,
            exact=loss is None or loss.exact,
        )
        del self._outages[view.shard]
        self.count += 1
        self.reported = (*self.reported, failover)[-KEPT:]
        self._coordinator.emit(failover)

    def _cause(self, shard: int, source: str) -> str:
        group = self._coordinator.group
        if shard not in self._outages and group.restores_together:
            return "another shard was lost, and all are restored together"
        if group.replicas > 1:
            return f"all {group.replicas} copies were gone"
        if source != "initial":
            return "its server was lost"
        kept = group.recovery.durability.above.stores  # not those that only buffer gradients
        other = "so was the state store" if kept else "its state was not kept elsewhere"
        return f"its server was lost, and {other}"
