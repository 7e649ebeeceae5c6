"""One replica of a shard: gates, applies, replicates and acknowledges operations.

An operation is applied under a lock, which gives it its place in the order, and is then committed
(`dps.protocol.server.commit_log`). Weights are served only once everything in them is committed, so
what a client has seen is never taken back by the loss of a replica.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

from dps.core.consistency import BSP, slack
from dps.core.replay import plan
from dps.core.shard import (
    Each,
    ShardState,
    Step,
    check_gradient,
    in_turn,
    is_duplicate,
    result_of,
    written_bytes,
)
from dps.core.updates import Operation, UpdateId
from dps.errors import NonFiniteGradient, NotServing, StaleEpoch
from dps.events import Promoted, Replayed, ReplicaAdded, Sink
from dps.protocol.compression import applied, decoded_bytes, dense, summable
from dps.protocol.executor import offload
from dps.protocol.functions import names_of
from dps.protocol.group import Group
from dps.protocol.messages import (
    Configure,
    CopyId,
    Done,
    Durable,
    Extend,
    Install,
    Pull,
    Push,
    Pushed,
    Replicate,
    RowsAsked,
    RowsRead,
    Waiting,
    Weights,
)
from dps.protocol.server.batching import Batching, evicted, is_refused
from dps.protocol.server.commit_log import CommitLog
from dps.protocol.server.copies import SentCopies
from dps.protocol.server.metrics import Ledger
from dps.protocol.server.row_reads import read_rows, weights
from dps.protocol.server.snapshot_barrier import SnapshotBarrier
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Clock, Endpoint, Transport
from dps.recovery.durability import Persistence

# What is waited for, by the future that says when it has come; in order of arrival.
_Waiters = dict[asyncio.Future[None], Callable[[], bool]]


class Replica:
    """A replica of one shard. All calls come from one event loop.

    What it was asked in one epoch may be done in another, after a wait: the host answers only what
    is of the present one.
    """

    def __init__(
        self,
        shard: int,
        group: Group,
        node: str,
        me: Endpoint,
        state: ShardState,
        epoch: int,
        chain: tuple[Endpoint, ...],
        persistence: Persistence,
        transport: Transport,
        clock: Clock,
        emit: Sink,
        tasks: Tasks,
        each: Each = in_turn,
    ) -> None:
        self.shard = shard
        self.tasks = tasks
        self.node = node
        self.state = state
        self.epoch = epoch
        self.chain = chain
        self.duplicates = 0
        self.ledger = Ledger(node, shard, clock, emit, group.recorded)
        self._me = me
        self._group = group
        self._layout = group.layout.shards[shard]
        self._persistence = persistence
        self._transport = transport
        self._clock = clock
        self._emit = emit
        self._each = each
        self.lock = asyncio.Lock()
        self._waiting: _Waiters = {}
        self._crowd: _Waiters = {}  # those that wait for room
        self._undurable: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = count()
        self._commits = CommitLog(
            shard,
            group,
            epoch,
            self._next,
            state,
            persistence,
            transport,
            self._notify,
            tasks,
        )
        self.cutter = SnapshotBarrier(self, persistence) if group.restores_together else None
        holder = f"{me.address}/{me.key}/{epoch}/{clock.now()}"
        self._copies = SentCopies(self._layout, shard, group.pull_filters, holder)
        self._batching = Batching(self._layout, group.aggregate, self)
        self._lingering: asyncio.Task[None] | None = None
        self._closed = False

    async def close(self) -> None:
        """Refuse everything from now on and stop the tasks."""
        self._closed = True
        await self._commits.close()
        await self._persistence.close()
        if self.cutter is not None:
            await self.cutter.close()
        if self._lingering is not None:
            self._lingering.cancel()
        self._notify()
        self.ledger.flush()

    # -- requests of clients -------------------------------------------------------------------

    async def push(self, m: Push) -> Pushed | Waiting:
        """Apply an update once, and reply when it is durable; with weights if asked for."""
        self._must_be_head(m.epoch)
        until, op = _now() + m.patience, m.operation
        together = op.kind in ("gradient", "tick") and self._applies_together
        if not together and not await self._room_for(op, until):
            return Waiting()
        step = await (self._in_round(op, m.epoch, until) if together else self._apply(op, m.epoch))
        if step is None:
            return Waiting(for_workers=True)
        # A cut may need what others send only when this worker has come, so it is not kept waiting
        # for one. Workers that are present enter again when the shards go back.
        target = 0 if op.kind == "join" and self.cutter is not None else step.state.index
        if not await self._durable(target, until):
            return Waiting(self._commits.failure)
        if step.outcome == "duplicate" and op.kind == "gradient":
            self.duplicates += 1
        versions = (update.version for update in step.updates if update.id == op.id)
        version = next(versions, step.state.version)
        read = await self._readable(op.id, until, m.has) if m.pull else None
        if self._is_refused(op.id._replace(seq=0)):
            read = None  # it is told when it reads
        known = step.state.workers[op.id.worker]
        result = result_of(step.state, op)
        return Pushed(step.outcome, version, known.clock, read, result, known.applied)

    async def pull(self, m: Pull | RowsAsked) -> Weights | RowsRead | Waiting:
        """Return committed weights or rows, when the consistency model lets this worker read them.

        Any replica can: what another one has committed, it has applied. So it never shows less
        than the client has seen, but for what was lost since.
        """
        self.must_be_in(m.epoch)
        reader = UpdateId(m.worker, m.incarnation, 0)
        self._must_be_active(reader)
        until = _now() + m.patience
        seen = min(m.seen, self.state.version)
        if not await self._until(lambda: self._commits.visible.version >= seen, until):
            return Waiting()
        read: Weights | RowsRead | None = None
        if isinstance(m, Pull):
            read = await self._readable(reader, until, m.has)
        elif await self._until(lambda: self._may_read(m.worker), until):
            read = await read_rows(self._layout, self._commits.visible, m, self._clock.now())
        self._must_be_active(reader)  # who was evicted while it waited is bounded by no clock
        return read if read is not None else Waiting(for_workers=True)

    async def replay(self, epoch: int, buffered: Sequence[Operation], late: bool = False) -> None:
        """Apply buffered gradients by the group's replay policy; return when they are durable.

        `late` says that they come from a worker itself, perhaps long after the outage. What is new
        among them is decided, merged and applied in one turn, so that a repeated request finds all
        of them or none. A sum that is not finite is dropped: it could never be applied, and the
        shard must come back.
        """
        policy = self._group.recovery.replay
        async with self.lock:
            self._must_be_head(epoch)
            for op in buffered if late else ():
                self._must_be_active(op.id)
            gradients = [op for op in buffered if op.kind == "gradient"]
            fresh = [op for op in buffered if not is_duplicate(self.state, op.id)]
            new = sum(op.kind == "gradient" for op in fresh)
            work = partial(plan, policy, self._layout, self.state.version, fresh, self.summable)
            todo = await offload(work, sum(decoded_bytes(self._layout, op) for op in fresh))
            steps, dropped = 0, todo.dropped
            for op in todo.operations:
                try:
                    await self.apply_now(op)
                    steps += op.kind == "gradient"
                except NonFiniteGradient:
                    dropped += 1 + len(op.merged)
            await self._batching.finish()
            target = self.state.index
        self._notify()
        limit = _now() + self._group.timings.copy
        if not await self._durable(target, limit):
            raise NotServing(f"shard {self.shard}: replayed gradients did not become durable")
        now, same, version = self._clock.now(), len(gradients) - new, self.state.version
        counts = {"count": new - dropped, "steps": steps, "duplicates": same, "dropped": dropped}
        self._emit(Replayed(now, self.shard, epoch, policy.policy, **counts, version=version))

    async def evict(self, epoch: int, workers: Sequence[UpdateId]) -> Durable:
        """Take lost workers out of the clock table, so that nobody waits for them."""
        for worker in workers:
            await self._apply(Operation("leave", worker), epoch)
        known, counts = self._commits.visible.workers, dict[str, int]()
        for worker in workers:
            for name in names_of(worker.worker):
                there = known.get(name)
                if there is None:
                    counts[name] = 0
                elif there.incarnation <= worker.incarnation or not there.seq:
                    counts[name] = there.applied
        return Durable(counts)

    async def save(self, epoch: int) -> int:
        """Write what is acknowledged by now to the checkpoint; return its version."""
        self.must_be_in(epoch)
        state = self._commits.visible
        await self._persistence.save(epoch, state)
        return state.version

    # -- requests of other replicas and of the coordinator ---------------------------------------

    async def replicate(self, m: Replicate) -> Done:
        """Apply the predecessor's operations; reply when they are committed from here on too.

        Before the call's deadline in any case, so that the predecessor knows that it has reached
        this one: what takes long is the work here, or is behind.
        """
        newcomer, limit = m.committed >= 0, _now() + self._group.timings.call / 2
        try:
            async with asyncio.timeout_at(None if newcomer else limit):
                await self.lock.acquire()
                await asyncio.shield(self._take(m))  # work in threads cannot be stopped
        except TimeoutError:
            raise NotServing(f"shard {self.shard}: earlier operations take long") from None
        if newcomer:
            return Done()
        last, commits = m.first + len(m.operations) - 1, self._commits
        if not await self._until(lambda: commits.index >= last or m.epoch != self.epoch, limit):
            raise NotServing(f"shard {self.shard}: the successor does not acknowledge")
        return Done()

    async def _take(self, m: Replicate) -> None:
        """Apply what is new of the operations, and release the lock, which the caller acquired."""
        try:
            self.must_be_in(m.epoch)
            for index, op in enumerate(m.operations, m.first):
                if index == self.state.index + 1:
                    await self.apply_now(op)
                    if index <= m.committed:
                        self._commits.set_committed(self.state)
                elif index > self.state.index:
                    raise NotServing(f"shard {self.shard}: operation {index} leaves a gap")
        finally:
            self.lock.release()
        self._notify()

    async def extend(self, m: Extend) -> Done:
        """Copy the state to a newcomer while updates go on, then make it the successor.

        It is given what is committed, and the rest under the lock: it is never behind.
        """
        self.must_be_in(m.epoch)
        chain, commits, state = (*self.chain, m.host), self._commits, self._commits.visible
        with commits.keeping_later_than(state):
            given = self.shard, m.epoch, chain, state, "replica", self.saved
            install = Install(*given, m.keepers)
            copy = self._transport.call(m.host, install, self._group.timings.copy, "replicate")
            await commits.until_interrupted(copy)
            async with self.lock:
                self.must_be_in(m.epoch)
                commits.successor = m.host  # from now on nothing is committed without it
                await commits.until_interrupted(commits.pass_on(m.host, state.index, commits.index))
        return Done()

    async def configure(self, m: Configure) -> Done:
        """Enter a new epoch with a new chain; a replica that becomes the head records it.

        One that comes twice changes nothing: the chain may be about to be extended since. Who is
        not in the chain serves nobody, and commits nothing more.
        """
        if not self._is_new(m.epoch):
            return Done()
        self._commits.interrupt()
        async with self.lock:
            if not self._is_new(m.epoch):  # another one may have been waiting for the lock
                return Done()
            was_head, was_tail = self.is_head, self._is_tail
            self.ledger.flush()
            self.epoch, self.chain = m.epoch, m.chain
            out = self._me not in m.chain
            self._commits.configure(m.epoch, self._commits.successor if out else self._next)
            self._persistence.enter(m.epoch, self._commits.visible if self._is_tail else None)
        if self.is_head and not was_head:
            now = self._clock.now()
            self._emit(Promoted(now, self.shard, m.epoch, self.node, self.state.version))
        elif not self.is_head and was_tail and self._is_tail:
            now = self._clock.now()
            self._emit(ReplicaAdded(now, self.shard, m.epoch, self.node, self.state.version))
        self._notify()
        return Done()

    async def make_durable(self, epoch: int) -> None:
        """Have the state kept that this replica serves in a new epoch, if it is the last one."""
        if self._is_tail:
            await self._commits.until_interrupted(self._persistence.begin(epoch, self.state))

    def must_be_in(self, epoch: int) -> None:
        """Raise `StaleEpoch` if this is not the replica's epoch."""
        if epoch != self.epoch or self._closed:
            raise StaleEpoch(f"shard {self.shard} is in epoch {self.epoch}, not {epoch}")

    @property
    def saved(self) -> int:
        """The version that survives the loss of this host, if it need not be the last acked one."""
        return self._persistence.saved

    @property
    def uncommitted(self) -> int:
        """How many operations are applied here, but not committed."""
        return self._commits.in_flight

    @property
    def is_head(self) -> bool:
        """Whether clients' requests come to this replica."""
        return self.chain[0] == self._me

    @property
    def _next(self) -> Endpoint | None:
        """The member of the chain that comes after this one, or None for the tail."""
        return next(iter(self.chain[self.chain.index(self._me) + 1 :]), None)

    @property
    def _is_tail(self) -> bool:
        return self._commits.successor is None

    # -- applying ------------------------------------------------------------------------------

    async def _apply(self, op: Operation, epoch: int) -> Step:
        """Apply one operation in its turn; return what came of it, not yet durable."""
        limit = _now() + self._group.timings.call
        while await self._room_for(op, limit):
            try:
                async with self.lock:
                    self._must_be_head(epoch)
                    if op.kind in ("gradient", "tick"):
                        self._must_be_active(op.id)
                    if not self._has_room(op):  # somebody who came later has taken it
                        continue
                    step = await self.apply_now(op)
                    await self._batching.finish()
                return step
            finally:  # an operation that was refused has left its room to others
                self._notify()
        raise NotServing(f"shard {self.shard}: there is no room for {op.kind} {op.id}")

    async def _room_for(self, op: Operation, until: float) -> bool:
        """Wait until an operation may be applied; False: it may not by the loop's time `until`."""
        found = False
        try:
            found = await self._until(lambda: self._has_room(op), until, self._crowd)
        finally:
            if not found:
                self._notify()  # it may have been woken just then: the next one's turn has come
        return found

    def _has_room(self, op: Operation) -> bool:
        return self._commits.in_flight < self._persistence.window and self.admits(op)

    def admits(self, op: Operation) -> bool:
        """Whether no cut that is being taken makes the operation wait."""
        return self.cutter is None or self.cutter.admits(op)

    async def settle(self, complete: bool = False) -> None:
        """Apply what has nothing more to wait for, as more may be admitted, or waited long."""
        async with self.lock:
            if self.is_head and not self._closed:
                await self._batching.finish(complete)
        self._notify()

    @property
    def _applies_together(self) -> bool:
        """Whether an update waits for others: for its whole round, or to be summed with them."""
        return isinstance(self._group.consistency, BSP) or self._group.aggregate > 1

    async def _in_round(self, op: Operation, epoch: int, until: float) -> Step | None:
        """Hold an update until those are here that it is applied with; None if that takes long."""
        if op.kind == "gradient" and self._is_of_round(op):
            await offload(partial(self._check, op), written_bytes(self._layout, {}, op))
        if not self._is_of_round(op):
            return await self._apply(op, epoch)
        held = self._batching.hold(op)
        async with self.lock:
            self._must_be_head(epoch)
            await self._batching.finish()
        self._notify()
        if self._batching and self._group.aggregate > 1:
            self._begin_to_linger()
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(held)
        except TimeoutError:
            return None

    def _is_of_round(self, op: Operation) -> bool:
        known = self.state.workers.get(op.id.worker)
        return known is not None and known.active and not is_duplicate(self.state, op.id)

    def _check(self, op: Operation) -> None:
        check_gradient(self._layout, dense(self._layout, op), self._each)

    def _begin_to_linger(self) -> None:
        if self._lingering is None or self._lingering.done():
            self._lingering = self.tasks.start(self._linger())

    async def _linger(self) -> None:
        """Give other updates the time to come, then apply those that are here."""
        await asyncio.sleep(self._group.recovery.durability.linger)
        await self.settle(complete=True)

    async def apply_now(self, op: Operation) -> Step:
        """Apply an operation, make the step's state the current one, and have it committed.

        The lock must be held.
        """
        step = await self._stepped(op)
        if step.outcome == "applied":
            self.state = step.state
            if op.kind == "leave":
                self._copies.forget(op.id.worker)
            self.ledger.add(self.epoch, self.is_head, step.updates)
            self._commits.add(step.state, step.operation)
        return step

    async def _stepped(self, op: Operation) -> Step:
        means = self._each, self._transport.empty
        work = partial(applied, self._layout, self._group, self.state, op, *means)
        if op.kind == "apply":  # a function may take any time
            return await asyncio.get_running_loop().run_in_executor(None, work)
        return await offload(work, written_bytes(self._layout, self.state.tables, op))

    def summable(self, op: Operation) -> Operation:
        """The operation as numbers that may be added to those of others, for the present state."""
        return summable(self._layout, self._group.rule, self.state, op)

    # -- reading -------------------------------------------------------------------------------

    async def _readable(self, reader: UpdateId, until: float, has: CopyId | None) -> Weights | None:
        if not await self._until(lambda: self._may_read(reader.worker), until):
            return None
        left, now = self._slack(reader.worker), self._clock.now()
        slack_left = -1 if left is None else left
        read = weights(self._commits.visible, self.epoch, now, slack_left, self._group)
        return await self._copies.filtered(read, reader, has)

    def _may_read(self, worker: str) -> bool:
        left = self._slack(worker)
        return left is None or left >= 0

    def _slack(self, worker: str) -> int | None:
        return slack(self._group.consistency, self._commits.visible.workers, worker)

    # -- waiting and refusing --------------------------------------------------------------------

    async def _until(
        self, holds: Callable[[], bool], until: float, among: _Waiters | None = None
    ) -> bool:
        """Wait until `holds()`; return False if it does not by the loop's time `until`."""
        waiting = self._waiting if among is None else among
        while not (self._closed or holds()):
            woken = asyncio.get_running_loop().create_future()
            waiting[woken] = holds
            try:
                async with asyncio.timeout_at(until):
                    await woken
            except TimeoutError:
                return False
            finally:
                del waiting[woken]
        if self._closed:
            raise NotServing(f"shard {self.shard}: this replica is closed")
        return True

    async def _durable(self, index: int, until: float) -> bool:
        """Wait until an operation is committed; False: it is not by the loop's time `until`.

        Hundreds may wait for theirs at once, so they are kept in the order of their operations.
        """
        if self._commits.index < index and not self._closed:
            woken = asyncio.get_running_loop().create_future()
            heappush(self._undurable, (index, next(self._numbers), woken))
            try:
                async with asyncio.timeout_at(until):
                    await woken
            except TimeoutError:
                return False
        if self._closed:
            raise NotServing(f"shard {self.shard}: this replica is closed")
        return True

    def _notify(self) -> None:
        """Wake those whose condition holds now, and nobody in vain: there may be hundreds."""
        if self.cutter is not None:
            self.cutter.look()
        undurable = self._undurable
        while undurable and (self._closed or undurable[0][0] <= self._commits.index):
            woken = heappop(undurable)[2]
            if not woken.done():
                woken.set_result(None)
        self._wake(self._waiting, math.inf)
        self._wake(self._crowd, self._persistence.window - self._commits.in_flight)

    def _wake(self, waiting: _Waiters, most: float) -> None:
        """Wake those whose condition holds, so many with those who are woken, but have not run."""
        for woken, holds in waiting.items():
            if most <= 0 and not self._closed:
                return
            if woken.done():
                most -= 1
            elif self._closed or holds():
                woken.set_result(None)
                most -= 1

    def _must_be_head(self, epoch: int) -> None:
        self.must_be_in(epoch)
        if not self.is_head:
            raise StaleEpoch(f"shard {self.shard}: {self.node} is not the head in epoch {epoch}")

    def _is_new(self, epoch: int) -> bool:
        """Whether an epoch is still to be entered; raises `StaleEpoch` if it is over."""
        if epoch < self.epoch or self._closed:
            raise StaleEpoch(f"shard {self.shard} is in epoch {self.epoch}, not {epoch}")
        return epoch > self.epoch

    def _must_be_active(self, update: UpdateId) -> None:
        """Refuse a worker that nobody waits for, where what it computed may be too stale."""
        if self._is_refused(update):
            raise evicted(update)

    def _is_refused(self, update: UpdateId) -> bool:
        return is_refused(self._group.consistency, self.state, update)


def _now() -> float:
    return asyncio.get_running_loop().time()
