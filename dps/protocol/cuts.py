"""Owns consistent cuts: checkpoints of all shards that hold the same updates of every worker.

The coordinator takes a cut in two steps. First every head admits no further gradients and tells how
far each worker is. Then each admits just those that another shard has already, keeps a reference to
its state, lets everything go on, and writes the state. The cut is complete when all have written.
When a shard is lost, all of them go back to the newest complete cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dps.core.recovery import Checkpoint
from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.errors import DpsError, NotServing
from dps.events import CutTaken, RolledBack, Sink
from dps.protocol.cut_files import CutCheckpoints
from dps.protocol.group import Group
from dps.protocol.messages import Done, View
from dps.protocol.router import Router
from dps.protocol.transport import Clock, Transport
from dps.protocol.wire import message

# How far each active worker is: its incarnation, and its clock, which is the number of its last
# update, or that of the round in which it entered.
Reach = dict[str, tuple[int, int]]


@message
@dataclass(frozen=True, slots=True)
class HoldCut:
    """Admit no further gradients, so that a cut can be taken. Reply: Held.

    After `patience` seconds they are admitted again, whatever becomes of the cut.
    """

    shard: int
    epoch: int
    cut: int
    patience: float


@message
@dataclass(frozen=True, slots=True)
class Held:
    """How far each active worker is on a shard that admits no further gradients."""

    reach: Reach


@message
@dataclass(frozen=True, slots=True)
class TakeCut:
    """Write the state in which every worker has come just so far. Reply: Taken, when written."""

    shard: int
    epoch: int
    cut: int
    upto: Reach


@message
@dataclass(frozen=True, slots=True)
class Taken:
    """The shard's version in the cut."""

    version: int


@message
@dataclass(frozen=True, slots=True)
class EndCut:
    """The cut is complete, or given up; cuts before `oldest` are not needed any more."""

    shard: int
    epoch: int
    cut: int
    complete: bool
    oldest: int


def applies(group: Group) -> bool:
    """Whether the shards of a group go back together."""
    durability = group.recovery.durability
    return isinstance(durability, Checkpoint) and durability.scope == "all"


class Cutter:
    """A head's part in cuts. All calls come from one event loop.

    Parameters
    ----------
    lock
        The replica's: whoever has it may change the state.
    state
        Returns the replica's present state.
    settle
        Applies what has nothing more to wait for, and wakes whoever waits for the replica.
    keeper
        Writes the states.
    """

    def __init__(
        self,
        group: Group,
        lock: asyncio.Lock,
        state: Callable[[], ShardState],
        settle: Callable[[], Awaitable[None]],
        keeper: CutCheckpoints,
    ) -> None:
        self._patience = 0.0
        self._lock = lock
        self._state = state
        self._settle = settle
        self._keeper = keeper
        self._cut: int | None = None
        self._upto: Reach = {}
        self._last = 0
        self._reached = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def admits(self, op: Operation) -> bool:
        """Whether an operation may be applied now."""
        if self._cut is None or op.kind not in ("gradient", "tick"):
            return True
        limit = self._upto.get(op.id.worker)
        return limit is not None and (op.id.incarnation, op.id.seq) <= limit

    def look(self) -> None:
        """Take note that the state has changed."""
        if self._cut is not None and _reach(self._state(), self._upto) == self._upto:
            self._reached.set()

    async def close(self) -> None:
        """Let everything go on."""
        self._release()
        for task in self._tasks:
            task.cancel()

    async def handle(self, m: HoldCut | TakeCut | EndCut) -> Held | Taken | Done:
        """Carry out one message of the coordinator's."""
        match m:
            case HoldCut():
                return await self._hold(m)
            case TakeCut():
                return await self._take(m)
            case EndCut():
                await self._end(m)
        return Done()

    async def _hold(self, m: HoldCut) -> Held:
        async with self._lock:
            if m.cut <= self._last:
                raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
            self._release()
            self._cut = self._last = m.cut
            self._patience = m.patience
            loop = asyncio.get_running_loop()
            # Whoever holds us may be gone.
            self._timer = loop.call_later(m.patience, self._release_soon)
            active = {name: p for name, p in self._state().workers.items() if p.active}
            return Held({name: (p.incarnation, p.clock) for name, p in active.items()})

    async def _take(self, m: TakeCut) -> Taken:
        if self._cut != m.cut:
            raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
        self._upto = m.upto
        self.look()
        await self._settle()
        try:
            async with asyncio.timeout(self._patience / 2):
                await self._reached.wait()
        except TimeoutError:
            raise NotServing(f"cut {m.cut}: shard {m.shard} lacks updates of others") from None
        finally:
            state = self._state()
            whole = self._cut == m.cut and _reach(state, m.upto) == m.upto
            if self._cut == m.cut:
                self._release()
                await self._settle()
        if not whole:
            raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
        await self._keeper.write_cut(m.epoch, m.cut, state)
        return Taken(state.version)

    async def _end(self, m: EndCut) -> None:
        self._last = max(self._last, m.cut)
        if m.complete:
            await self._keeper.end_cut(m.epoch, m.cut, m.oldest)
        elif self._cut == m.cut:
            self._release()
            await self._settle()

    def _release(self) -> None:
        self._cut, self._upto = None, {}
        self._reached.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release_soon(self) -> None:
        async def release() -> None:
            self._release()
            await self._settle()

        task = asyncio.create_task(release())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Cuts:
    """The coordinator's part: it takes cuts, and knows which are complete.

    Parameters
    ----------
    views
        Returns who serves the shards.

    Attributes
    ----------
    newest
        The newest complete cut: what all shards go back to when one is lost.
    """

    def __init__(
        self,
        group: Group,
        transport: Transport,
        clock: Clock,
        emit: Sink,
        views: Callable[[], list[View]],
    ) -> None:
        durability = group.recovery.durability
        self._keep = durability.keep if isinstance(durability, Checkpoint) else 1
        self._timings = group.timings
        self._shortest = min(group.timings.lease, group.timings.call)
        self._patience = self._shortest
        self._transport = transport
        self._clock = clock
        self._emit = emit
        self._views = views
        self._complete = [0]  # the first states of all shards are one
        self._last = 0
        self._versions: dict[int, int] = {}  # what a cut is to hold, by shard
        self._wanted = asyncio.Event()
        self._task = asyncio.create_task(self._take_forever())

    @property
    def newest(self) -> int:
        return self._complete[-1]

    async def close(self) -> None:
        """Take no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def want(self, shard: int, version: int) -> None:
        """Take a cut soon that holds this version of a shard; one will do for several shards."""
        self._versions[shard] = version
        self._wanted.set()

    def refuse(self, cut: int) -> bool:
        """Do without a cut that is damaged; return whether there is one before it."""
        before = [other for other in self._complete if other < cut]
        if before:
            self._complete = before
        return bool(before)

    def roll_back(self, shard: int) -> None:
        """Record that all shards go back, because this one was lost."""
        self._versions = {}
        self._emit(RolledBack(self._clock.now(), shard, self.newest))

    async def _take_forever(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._take()
                self._patience = self._shortest
            except (DpsError, TimeoutError):
                # The shards may be too busy to hold in so short a time.
                self._patience = min(2 * self._patience, self._timings.copy)
                await asyncio.sleep(self._timings.retry)
                self._wanted.set()

    async def _take(self) -> None:
        views, before = self._views(), self.newest
        if not all(view.serving for view in views):
            raise NotServing("a cut needs all shards")
        self._last += 1
        cut, began = self._last, self._clock.monotonic()
        complete = False
        try:
            held = await self._ask_all(
                lambda v: HoldCut(v.shard, v.epoch, cut, self._patience), views, self._patience / 2
            )
            upto = _furthest(reply.reach for reply in held)
            taken = await self._ask_all(
                lambda v: TakeCut(v.shard, v.epoch, cut, upto), views, self._timings.copy
            )
            complete = self._views() == views and self.newest == before
            self._satisfy({v.shard: t.version for v, t in zip(views, taken, strict=True)})
        finally:
            if complete:
                self._complete = [*self._complete, cut][-self._keep :]
                took = self._clock.monotonic() - began
                self._emit(CutTaken(self._clock.now(), cut, took))
            oldest = self._complete[0]
            with suppress(DpsError):
                await self._ask_all(
                    lambda v: EndCut(v.shard, v.epoch, cut, complete, oldest),
                    views,
                    self._timings.call,
                )

    def _satisfy(self, versions: Mapping[int, int]) -> None:
        """Want nothing more that these versions hold."""
        left = {s: version for s, version in self._versions.items() if version > versions[s]}
        self._versions = left
        if not left:
            self._wanted.clear()

    async def _ask_all(
        self, request: Callable[[View], Any], views: Iterable[View], deadline: float
    ) -> list[Any]:
        """Ask the head of every shard, and wait for all, whatever becomes of one."""
        calls = (self._transport.call(v.chain[0], request(v), deadline) for v in views)
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies


async def together(
    jobs: Mapping[int, Callable[[], Awaitable[None]]],
    router: Router,
    acked_in: Callable[[int], int],
    refused: Callable[[], bool],
    complete: Callable[[], None],
) -> None:
    """Send something to all shards, again to those that go back before all of them have it.

    Else a shard that had it before all went back would miss what the others get afterwards, and
    no cut could ever be taken. Who has it already refuses it as a duplicate. Once a shard has
    refused it, because the worker has to enter again, there is nothing more to send; nor is there
    when it could not be sent to one of them.
    """
    missing, all_have_it = set(jobs), asyncio.Event()

    async def send(shard: int, job: Callable[[], Awaitable[None]]) -> None:
        while shard in missing:
            try:
                await job()
            except BaseException:
                missing.clear()
                all_have_it.set()  # not all will have it: those that do are not to wait for that
                raise
            missing.discard(shard)
            if refused():
                missing.clear()
            if not missing and not all_have_it.is_set():
                all_have_it.set()
                complete()
            while not all_have_it.is_set():
                table = await router.table()
                if table.views[shard].epoch > acked_in(shard):
                    missing.add(shard)
                    break
                await _either(all_have_it.wait(), router.newer(table.version))

    await asyncio.gather(*(send(shard, job) for shard, job in jobs.items()))


async def _either(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is done, and give the others up."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reach(state: ShardState, workers: Reach) -> Reach:
    """How far these workers are, as far as the shard knows them."""
    known = {name: state.workers[name] for name in workers if name in state.workers}
    return {name: (p.incarnation, p.clock) for name, p in known.items()}


def _furthest(reaches: Iterable[Reach]) -> Reach:
    furthest: Reach = {}
    for reach in reaches:
        for name, at in reach.items():
            furthest[name] = max(at, furthest.get(name, at))
    return furthest
