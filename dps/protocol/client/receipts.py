"""A client's count of the acknowledgements that it received, by shard and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from dps.protocol.messages import Account, Loss, Restoration, loss_after


class Receipts:
    """The acknowledged updates of one client, and which of them were lost. For one event loop.

    If shards go back `together`, an update that a shard has acknowledged is sent to it again if the
    shard goes back before all have the update. So it is not lost, and it counts when all have it,
    or when one has refused it.
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
        """This client's lost updates, one entry for each restoration that lost some."""
        return tuple(self._losses.values())

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The report to the coordinator."""
        return (*self._kept, *self._counts.values())

    @property
    def undecided(self) -> bool:
        """Whether a shard went back after an ack that may count yet, if the update is refused."""
        lasts = self._last
        return any(n in lasts and a.epoch < lasts[n].epoch for (n, _), a in self._staged.items())

    def sent(self, accounts: Iterable[Account]) -> None:
        """Note that the coordinator has received these."""
        for account in accounts:
            self._kept.pop(account, None)

    def acked(self, account: Account) -> None:
        """Count an acknowledgement."""
        if self._together:
            self._staged[account.shard, account.name] = account
        else:
            self._enter([account])

    def all_acked(self) -> None:
        """Note that the update will not be sent again to any shard."""
        staged, self._staged = self._staged, {}
        self._enter(staged.values())

    def heard(self, restorations: Iterable[Restoration]) -> bool:
        """Compare with what shards were restored with; return whether any restoration is new."""
        new = [r for r in restorations if r.number > self._number(r.shard)]
        for restoration in new:
            # After a restoration that was not heard of, only a lower bound is known here.
            next_one = restoration.number == self._number(restoration.shard) + 1
            certain = restoration.certain and next_one
            self._last[restoration.shard] = replace(restoration, certain=certain)
        restored = {restoration.shard for restoration in new}
        self._enter([a for a in self._counts.values() if a.shard in restored])
        return bool(new)

    def _number(self, shard: int) -> int:
        return self._last[shard].number if shard in self._last else 0

    def _enter(self, accounts: Iterable[Account]) -> None:
        losses: dict[tuple[int, int], Loss] = {}
        for account in accounts:
            at, last = (account.shard, account.name), self._last.get(account.shard)
            if last is None or account.epoch >= last.epoch:
                self._counts[at] = account
                continue
            there = last.applied.get(account.name, 0)
            self._kept[account] = None
            left = min(account.count, there)
            # Nothing is acknowledged in this epoch yet, so that earlier incarnations may be.
            self._counts[at] = replace(account, epoch=last.epoch, count=left, incarnation=0)
            if account.count > there:
                known = self._losses.get((account.shard, last.epoch))
                workers = {**(known.workers if known else {}), account.name: account.count - there}
                loss = loss_after(last, workers, last.certain)
                losses[account.shard, last.epoch] = self._losses[account.shard, last.epoch] = loss
        for loss in losses.values():
            self._on_loss(loss)
