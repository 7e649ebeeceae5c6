"""The leases of data: which worker computes which batches, and which are left to compute.

Each shard records the batches that it has applied, and refuses a second update of one
(`dps.core.leases`). A lease keeps two workers from computing the same batch. After the loss of a
worker, or of updates of a shard, the coordinator asks all shards, and gives out again the batches
that one of them lacks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from dps.core.leases import NONE, BatchRecord, Division, Lease, in_all, key_of, lacking
from dps.errors import DpsError, NotServing
from dps.protocol import messages as msg

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator

Holder = tuple[str, int]  # a worker, and its incarnation
Runs = list[tuple[int, range]]  # of batches, each with its epoch


class _Pass:
    """One pass over a data set, by a run of workers; "" until it has its `name`."""

    def __init__(self, division: Division, stops: int) -> None:
        self.division = division
        self.stops = stops  # how often the training had been stopped when it began
        self.name = ""
        self.gaps = False  # whether batches that were given out may be lost
        self.unsure = True  # while the shards have not been asked since a lease was returned
        self.looking: asyncio.Task[None] | None = None
        self.held: dict[Holder, dict[int, Lease]] = {}  # by their numbers
        self._before: BatchRecord = {}  # what all shards had when it began
        self._numbers = count(1)
        self._epoch = 0  # the first of which nothing was given out
        self._todo: deque[tuple[int, range]] = deque()

    def begin(self, name: str, record: BatchRecord) -> None:
        """Begin under a name, with what all shards have of the pass of this name."""
        self.name, self._before = name, record
        self._refill()

    @property
    def is_given_out(self) -> bool:
        """Whether no batches are left to give out, and no worker holds any."""
        return not (self._todo or self.held)

    def next_for(self, holder: Holder) -> Lease | None:
        """Give the next batches to a worker, if there are any."""
        if not self._todo:
            return None
        epoch, batches = self._todo.popleft()
        cut = min(batches.stop, batches.start + self.division.lease)
        if cut < batches.stop:
            self._todo.appendleft((epoch, range(cut, batches.stop)))
        lease = Lease(next(self._numbers), epoch, batches.start, cut)
        self.held.setdefault(holder, {})[lease.number] = lease
        self._refill()
        return lease

    def keep(self, holder: Holder, numbers: Collection[int], last: int) -> bool:
        """Note that a worker has only these leases left up to the last; return if it had more."""
        before = self.held.pop(holder, {})
        left = {
            number: each for number, each in before.items() if number in numbers or number > last
        }
        if left:
            self.held[holder] = left
        # A shard may have lost batches of the others while these counted as under way.
        self.unsure |= len(left) < len(before)
        return len(left) < len(before)

    def not_received(self, holder: Holder, last: int) -> Lease | None:
        """The lease of a worker after the last one that has reached it."""
        leases = self.held.get(holder, {}).values()
        return next((lease for lease in leases if lease.number > last), None)

    def under_way(self) -> Runs:
        """Return the batches that are to be given out, or were given to a worker."""
        leases = (lease for own in self.held.values() for lease in own.values())
        return [*self._todo, *((each.epoch, range(each.begin, each.end)) for each in leases)]

    def fill(self, record: BatchRecord, before: Runs) -> None:
        """Give out again the batches that the record lacks, but those under way `before` or now."""
        taken = [*before, *self.under_way()]
        for epoch in range(self._epoch):
            own = [batches for of, batches in taken if of == epoch]
            runs = self._lacking(record, epoch)
            self._todo.extend((epoch, left) for run in runs for left in without(run, own))

    def _refill(self) -> None:
        """Have batches of the next epoch to give out when there are no others."""
        while not self._todo and self._epoch < self.division.epochs:
            runs = self._lacking(self._before, self._epoch)
            self._todo.extend((self._epoch, run) for run in runs)
            self._epoch += 1

    def _lacking(self, record: BatchRecord, epoch: int) -> Iterator[range]:
        return lacking(record.get(key_of(self.name, epoch), NONE), self.division.batches)


def without(run: range, taken: Iterable[range]) -> Iterator[range]:
    """Yield the parts of a run that are in no other.

    >>> list(without(range(0, 9), [range(7, 12), range(2, 4)]))
    [range(0, 2), range(4, 7)]
    """
    begin = run.start
    for other in sorted(taken, key=lambda each: each.start):
        if begin < min(other.start, run.stop):
            yield range(begin, min(other.start, run.stop))
        begin = max(begin, other.stop)
    if begin < run.stop:
        yield range(begin, run.stop)


class DataLeases:
    """The leases of all passes over data. Used from one event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._passes: dict[str, _Pass] = {}  # by the run of workers
        self._news = asyncio.Event()
        self._restorations: tuple[msg.Restoration, ...] = ()
        self.services: dict[type, Callable[[Any], Any]] = {
            msg.TakeLease: self._take,
            msg.RunEnded: self._ended,
        }

    def left(self, worker: str, incarnation: int) -> None:
        """Take back what a worker holds, which sends no more updates."""
        for each in self._passes.values():
            if each.held.pop((worker, incarnation), None):
                each.gaps = each.unsure = True
        self.notify()

    def notify(self) -> None:
        """Look again at what workers wait for."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _take(self, m: msg.TakeLease) -> msg.Leased:
        each = self._passes.get(m.run)
        if each is None:
            each = self._passes[m.run] = _Pass(m.division, self._coordinator.workers.stops)
        if each.keep((m.worker, m.incarnation), m.held, m.last):
            self.notify()
        workers = self._coordinator.workers
        stops = workers.stops
        with suppress(TimeoutError):
            async with asyncio.timeout(self._coordinator.group.timings.hold):
                while workers.stops == stops:
                    news = self._news
                    reply = await self._reply(each, m)
                    if reply is not None or not m.waits:
                        return reply or msg.Leased()
                    await news.wait()
        return msg.Leased()

    async def _ended(self, m: msg.RunEnded) -> bool:
        each = self._passes.get(m.run)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._coordinator.group.timings.hold):
                if each is not None:
                    await self._know(each)
                    return each.is_given_out
        return False

    async def _reply(self, each: _Pass, m: msg.TakeLease) -> msg.Leased | None:
        """Return the reply to a worker; None: others may return batches."""
        await self._know(each)
        # No await from here on: the lease of a worker that had left before would not be taken back.
        if self._coordinator.workers.active.get(m.worker) != m.incarnation:
            return msg.Leased(given_up=True)
        holder = m.worker, m.incarnation
        # The request may be a copy of one that was answered: then the reply is the same.
        lease = each.not_received(holder, m.last) or each.next_for(holder)
        if lease is not None:
            return msg.Leased(each.name, lease)
        return msg.Leased(each.name, ended=True) if each.is_given_out else None

    async def _know(self, each: _Pass) -> None:
        """Ask the shards if batches may be lost, or if all were given out."""
        self._note_restorations()
        while not each.name or each.gaps or (each.unsure and each.is_given_out):
            await self._look(each)
            self._note_restorations()

    def _note_restorations(self) -> None:
        restorations = self._coordinator.losses.restorations
        if self._restorations != restorations:
            self._restorations = restorations
            for each in self._passes.values():
                each.gaps = each.unsure = True

    async def _look(self, each: _Pass) -> None:
        """Ask all shards what they lack, at once for all that wait for it."""
        if each.looking is None or each.looking.done():
            each.looking = self._coordinator.tasks.start(self._look_until_known(each))
        await asyncio.wait([each.looking])
        if each.looking.cancelled():
            raise NotServing("the coordinator is being closed")

    async def _look_until_known(self, each: _Pass) -> None:
        while True:
            before, each.gaps, each.unsure = each.under_way(), False, False
            try:
                record = await self._record()
            except DpsError:  # such as of a shard that is down
                each.gaps = each.unsure = True
                await asyncio.sleep(self._coordinator.group.timings.retry)
                continue
            if each.name:
                each.fill(record, before)
            else:
                each.begin(self._name_of(each, record), record)
            return

    def _name_of(self, new: _Pass, record: BatchRecord) -> str:
        """Return the name of a pass: that of one that was interrupted, or another one."""
        # It was interrupted if a training was resumed from a state with some of it, or stopped.
        title, known = new.division.title, self._passes.values()
        names = {key.rpartition("/")[0] for key in record} | {each.name for each in known}
        numbers = [int(name.removeprefix(title)) for name in names if name.startswith(title)]
        last = max(numbers, default=0)
        name = f"{title}{last}"
        is_over = any(each.name == name and each.stops == new.stops for each in known)
        if not last or is_over or new.division.is_whole(name, record):
            return f"{title}{last + 1}"
        return name

    async def _record(self) -> BatchRecord:
        """Return what all shards have; raises `DpsError` if one does not answer."""
        views, deadline = self._coordinator.views, self._coordinator.group.timings.call

        async def ask(view: msg.View) -> BatchRecord:
            if not view.serving:
                raise NotServing(f"shard {view.shard} is down")
            request = msg.Describe(view.shard, view.epoch)
            call = self._coordinator.transport.call(view.chain[0], request, deadline)
            reply: msg.Description = await call
            return reply.batches

        return in_all(await asyncio.gather(*map(ask, views)))
