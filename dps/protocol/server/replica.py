"""One replica of a shard: gates, applies, replicates and acknowledges operations.

An operation is applied under a lock, which gives it its place in the order, and is then committed.
Weights are served only once everything in them is committed, so the loss of a replica never takes
back what a client has seen.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from dps.core.consistency import ASP, slack
from dps.core.functions import names_of
from dps.core.leases import without_repeats
from dps.core.replay import plan
from dps.core.rules.wrappers import compensated
from dps.core.shard import (
    AppliedUpdate,
    ShardState,
    StateMachine,
    Step,
    is_duplicate,
    is_evicted,
    is_superseded,
    result_of,
)
from dps.core.tables.table import table_of
from dps.core.updates import Operation, UpdateId
from dps.errors import NonFiniteGradient, NotServing, StaleEpoch
from dps.events import Applied, Promoted, Replayed, ReplicaAdded
from dps.protocol import messages as msg
from dps.protocol.compression import applicable, decoded_bytes, dense
from dps.protocol.executor import INLINE_BYTES, offload
from dps.protocol.server.batching import Batching, evicted
from dps.protocol.server.commit_log import CommitLog, Waiters
from dps.protocol.server.copies import SentCopies
from dps.protocol.server.node import ServerNode
from dps.protocol.server.snapshot_barrier import SnapshotBarrier
from dps.protocol.tasks import Tasks
from dps.recovery.durability import Persistence

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class Replica:
    """A replica of one shard. Used from one event loop.

    The replica may enter another epoch while a request waits. A method may then return as if all
    were done: `ShardServer.handle` sends no reply of an earlier epoch.
    """

    def __init__(
        self,
        node: ServerNode,
        tasks: Tasks,
        view: msg.View,
        state: ShardState,
        persistence: Persistence,
    ) -> None:
        group = node.group
        self.node = node
        self.shard = view.shard
        self.epoch = view.epoch
        self.chain = view.chain
        self.state = state
        self.lock = asyncio.Lock()
        self.ledger = Ledger(self)
        self._group = group
        self._layout = layout = group.layout.shards[view.shard]
        self.persistence = persistence
        empty = node.transport.empty
        self._machine = StateMachine(layout, group.rule, group.functions, node.each, empty)
        self._waiting: Waiters = {}
        self._waiting_for_room: Waiters = {}
        self._commits = CommitLog(self)
        self._committing = tasks.start(self._commits.run())
        self.cutter = SnapshotBarrier(self, tasks) if group.restores_together else None
        holder = f"{node.me.address}/{node.me.key}/{view.epoch}/{node.clock.now()}"
        self._copies = SentCopies(layout, view.shard, group.pull_filters, holder)
        self._batching = Batching(self, tasks)
        # Whether requests wait for other workers, or for a cut.
        self._gates = not isinstance(group.consistency, ASP) or self._batching.together
        self._gates |= self.cutter is not None

    async def close(self) -> None:
        """Refuse everything from now on and stop the tasks."""
        self._committing.cancel()
        self._commits.close()
        await self.persistence.close()
        if self.cutter is not None:
            self.cutter.close()
        self.notify()
        self.ledger.flush()

    # -- requests of clients -------------------------------------------------------------------

    def push_at_once(self, m: msg.Push) -> msg.Pushed | None:
        """Apply a small update and reply, if nothing has to be waited for; None: call `push`."""
        op, commits = m.operation, self._commits
        waits = self._gates or self.lock.locked() or self.uncommitted or not commits.is_immediate
        if waits or op.kind != "gradient" or op.codec or op.nbytes >= INLINE_BYTES:
            return None
        if m.pull and self._group.pull_filters:
            return None
        self.must_be_head(m.epoch)
        self._must_be_active(op.id)
        if self._machine.written_bytes(self.state, op) >= INLINE_BYTES:
            return None
        step = self.keep(op, self._machine.apply(self.state, op))
        if self._waiting:
            self.notify()
        read = self._weights(op.id.worker) if m.pull else None
        return self._pushed(op, step, read)

    async def push(self, m: msg.Push) -> msg.Pushed | msg.Waiting:
        """Apply an update once, and reply when it is durable; with weights if asked for."""
        self.must_be_head(m.epoch)
        op, until = m.operation, _now() + m.patience
        if op.kind in ("gradient", "tick") and self._batching.together:
            step = await self._batching.apply(op, m.epoch, until)
        else:
            step = await self.apply(op, m.epoch, until)
        if isinstance(step, msg.Waiting):
            return step
        # A cut may need what others send only after this worker has joined, so a join does not
        # wait for one. Present workers enter again when the shards are restored.
        target = 0 if op.kind == "join" and self.cutter is not None else step.state.index
        if not await self._commits.until_committed(target, until):
            return msg.Waiting(self._commits.failure)
        read = await self._readable(op.id, until, m.has) if m.pull else None
        if self._is_refused(op.id._replace(seq=0)):
            read = None  # its next read raises the error
        return self._pushed(op, step, read)

    def _pushed(self, op: Operation, step: Step, read: msg.Weights | None) -> msg.Pushed:
        outcome = "repeated" if step.operation.kind != op.kind else step.outcome
        if outcome != "applied" and op.kind == "gradient":
            self.ledger.duplicates += 1
        versions = (update.version for update in step.updates if update.id == op.id)
        version, known = next(versions, step.state.version), step.state.workers[op.id.worker]
        result = result_of(step.state, op)
        return msg.Pushed(outcome, version, known.clock, read, result, applied=known.applied)

    async def pull(self, m: msg.Pull) -> msg.Weights | msg.RowsRead | msg.Waiting:
        """Return committed weights or rows, when the consistency model lets this worker read them.

        Any replica has applied what the client has seen, unless that was lost since.
        """
        self.must_be_in(m.epoch)
        reader = m.reader
        self._must_be_active(reader)
        until = _now() + m.patience
        seen = min(m.seen, self.state.version)
        if not await self.until(lambda: self._commits.committed.version >= seen, until):
            return msg.Waiting()
        read: msg.Weights | msg.RowsRead | None = None
        if m.rows is None:
            read = await self._readable(reader, until, m.has)
        elif await self.until(lambda: self._may_read(reader.worker), until):
            read = await self._rows(m.rows)
        self._must_be_active(reader)  # no clock bounds a worker that was evicted while it waited
        return read if read is not None else msg.Waiting(for_workers=True)

    async def replay(self, epoch: int, buffered: Sequence[Operation], late: bool = False) -> None:
        """Apply buffered gradients by the group's replay policy; return when they are durable.

        `late`: they come from a worker, perhaps long after the outage. They are applied in one
        turn, so that a repeated request finds all of them or none. A sum that is not finite is
        dropped: it could never be applied, and the shard must come back.
        """
        policy = self._group.recovery.replay
        async with self.lock:
            self.must_be_head(epoch)
            for op in buffered if late else ():
                self._must_be_active(op.id)
            gradients = [op for op in buffered if op.kind == "gradient"]
            fresh = [op for op in buffered if not is_duplicate(self.state, op.id)]
            fresh = [*without_repeats(self.state.batches, fresh)]
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
        self.notify()
        if not await self._commits.until_committed(target, _now() + self._group.timings.copy):
            raise NotServing(f"shard {self.shard}: replayed gradients did not become durable")
        now, same, version = self.node.clock.now(), len(gradients) - new, self.state.version
        counts = {"count": new - dropped, "steps": steps, "duplicates": same, "dropped": dropped}
        self.node.emit(Replayed(now, self.shard, epoch, policy.policy, **counts, version=version))

    # -- applying ------------------------------------------------------------------------------

    async def apply(self, op: Operation, epoch: int, until: float) -> Step | msg.Waiting:
        """Apply one operation in its turn, before it is durable.

        `Waiting`: a cut, or operations that are not committed, left no room until the time `until`.
        """
        while True:
            try:
                if not await self.until(lambda: self._has_room(op), until, self._waiting_for_room):
                    return msg.Waiting(self._commits.failure)
                async with self.lock:
                    self.must_be_head(epoch)
                    if op.kind in ("gradient", "tick"):
                        self._must_be_active(op.id)
                    if self._has_room(op):  # a later operation may have taken the room
                        step = await self.apply_now(op)
                        await self._batching.finish()
                        return step
            finally:
                self.notify()  # an operation that was refused, or gave up, leaves room to the next

    async def apply_now(self, op: Operation) -> Step:
        """Apply an operation, and begin to commit it. The lock must be held."""
        machine, state = self._machine, self.state

        def work() -> Step:
            return machine.apply(state, applicable(self._layout, op))

        if op.kind == "apply":  # a function may take any time
            step = await asyncio.get_running_loop().run_in_executor(None, work)
        else:
            step = await offload(work, machine.written_bytes(state, op))
        if op.codec and step.operation.kind == op.kind:
            # The chain and requests that wait for the commit do not need the decoded gradient.
            step = step._replace(operation=op)
        return self.keep(op, step)

    def keep(self, op: Operation, step: Step) -> Step:
        """Keep what an operation came to, and begin to commit it."""
        if step.outcome == "applied":
            self.state = step.state
            if op.kind == "leave":
                self._copies.forget(op.id.worker)
            self.ledger.add(step.updates)
            self._commits.append(step.operation)  # a call, with its result
        return step

    async def settle(self, complete: bool = False) -> None:
        """Apply updates that need not wait any more: more are admitted, or they waited long."""
        async with self.lock:
            if self.is_head and not self._commits.closed:
                await self._batching.finish(complete)
        self.notify()

    def admits(self, op: Operation) -> bool:
        """Whether no cut that is being taken makes the operation wait."""
        return self.cutter is None or self.cutter.admits(op)

    def summable(self, op: Operation) -> Operation:
        """Return an operation as numbers that can be added to others, for the current state."""
        op = dense(self._layout, op)
        return compensated(self._layout, self._group.rule, self.state.values, op)

    def _has_room(self, op: Operation) -> bool:
        return self.uncommitted < self.persistence.window and self.admits(op)

    # -- requests of other replicas and of the coordinator ---------------------------------------

    async def replicate(self, m: msg.Replicate) -> None:
        """Apply the predecessor's operations; return when all later replicas have them too."""
        # It replies before the call's deadline in any case: then the predecessor knows that the
        # delay is in the work here or behind it, not in the link.
        newcomer, limit = m.committed >= 0, _now() + self._group.timings.call / 2
        try:
            async with asyncio.timeout_at(None if newcomer else limit):
                await self.lock.acquire()
                await asyncio.shield(self._take(m))  # work in threads cannot be stopped
        except TimeoutError:
            raise NotServing(f"shard {self.shard}: earlier operations are not complete") from None
        if newcomer:
            return
        last, commits = m.first + len(m.operations) - 1, self._commits
        if not await self.until(
            lambda: commits.committed.index >= last or m.epoch != self.epoch, limit
        ):
            raise NotServing(f"shard {self.shard}: the successor does not acknowledge")

    async def _take(self, m: msg.Replicate) -> None:
        try:
            self.must_be_in(m.epoch)
            for index, op in enumerate(m.operations, m.first):
                if index == self.state.index + 1:
                    await self.apply_now(op)
                    if index <= m.committed:
                        self._commits.set_committed(self.state)
                elif index > self.state.index:
                    raise NotServing(
                        f"shard {self.shard}: earlier operations than {index} are missing"
                    )
        finally:
            self.lock.release()
        self.notify()

    async def extend(self, m: msg.Extend) -> None:
        """Make a newcomer the successor."""
        # It gets the committed state while pushes continue, and then the later operations, while
        # the lock holds pushes back.
        self.must_be_in(m.epoch)
        chain, commits, state = (*self.chain, m.host), self._commits, self._commits.committed
        with commits.keeping_later_than(state):
            saved, deadline = self.persistence.saved, self._group.timings.copy
            install = msg.Install(self.shard, m.epoch, chain, state, "replica", saved, m.keepers)
            copy = self.node.transport.call(m.host, install, deadline, "replicate")
            await commits.until_interrupted(copy)
            async with self.lock:
                self.must_be_in(m.epoch)
                commits.successor = m.host  # from now on nothing is committed without it
                rest = commits.pass_on(m.host, state.index, commits.committed.index)
                await commits.until_interrupted(rest)

    async def configure(self, m: msg.Configure) -> None:
        """Enter a new epoch with a new chain."""
        # A replica that is not in the chain serves no request and commits nothing from then on. A
        # repeated request changes nothing: the chain may be about to be extended since.
        if m.epoch > self.epoch:
            self._commits.interrupt()
        async with self.lock:
            if m.epoch <= self.epoch or self._commits.closed:
                return self.must_be_in(m.epoch)
            was_head, was_tail = self.is_head, self._is_tail
            self.ledger.flush()
            self.epoch, self.chain = m.epoch, m.chain
            self._commits.configure()
            self.persistence.enter(m.epoch, self._commits.committed if self._is_tail else None)
        now, version = self.node.clock.now(), self.state.version
        if self.is_head and not was_head:
            self.node.emit(Promoted(now, self.shard, m.epoch, self.node.name, version))
        elif not self.is_head and was_tail and self._is_tail:
            self.node.emit(ReplicaAdded(now, self.shard, m.epoch, self.node.name, version))
        self.notify()

    async def make_durable(self, epoch: int) -> None:
        """If this is the tail, make the present state durable, before the epoch is served."""
        # It is committed then, because an earlier tail may have shown it to workers. There is no
        # earlier tail if all shards are restored together; `begin` does not write the state then.
        if self._is_tail:
            state = self.state
            await self._commits.until_interrupted(self.persistence.begin(epoch, state))
            if self.cutter is None and self._commits.successor is None:  # none was added since
                self._commits.set_committed(state)
                self.notify()

    async def evict(self, m: msg.Evict) -> dict[str, int]:
        """Mark lost workers as inactive, so that no gate waits for them; reply as in `Evict`."""
        for worker in m.workers:
            until = _now() + self._group.timings.call
            op = Operation("leave", worker)
            if isinstance(await self.apply(op, m.epoch, until), msg.Waiting):
                raise NotServing(f"shard {self.shard}: no room for leave {op.id}")
        known, counts = self._commits.committed.workers, dict[str, int]()
        for worker in m.workers:
            for name in names_of(worker.worker):
                there = known.get(name)
                if there is None or there.incarnation <= worker.incarnation or not there.seq:
                    counts[name] = there.applied if there is not None else 0
        return counts

    async def save(self, m: msg.Save) -> int:
        """Write what is acknowledged by now to the checkpoint; return its version."""
        self.must_be_in(m.epoch)
        state = self._commits.committed
        await self.persistence.save(m.epoch, state)
        return state.version

    async def describe(self) -> msg.Description:
        """Return how far the shard and its workers are."""
        state, ledger = self.state, self.ledger
        return msg.Description(
            node=self.node.name,
            version=state.version,
            nbytes=state.nbytes,
            applied={name: p.applied for name, p in state.workers.items()},
            clocks=state.clocks,
            duplicates=ledger.duplicates,
            updates=ledger.updates,
            missed=ledger.staleness_sum,
            batches=self._commits.committed.batches,
        )

    @property
    def uncommitted(self) -> int:
        """Number of operations that are applied here, but not committed."""
        return self.state.index - self._commits.committed.index

    @property
    def is_head(self) -> bool:
        """Whether this replica serves the requests of clients."""
        return self.chain[0] == self.node.me

    @property
    def _is_tail(self) -> bool:
        return self._commits.successor is None

    # -- reading -------------------------------------------------------------------------------

    async def _readable(
        self, reader: UpdateId, until: float, has: msg.CopyId | None
    ) -> msg.Weights | None:
        if not await self.until(lambda: self._may_read(reader.worker), until):
            return None
        return await self._copies.filtered(self._weights(reader.worker), reader, has)

    def _weights(self, worker: str) -> msg.Weights:
        state, left = self._commits.committed, self._slack(worker)
        metadata = self._group.recovery.durability.metadata(self.epoch, state)
        steps = -1 if left == math.inf else int(left)
        return msg.Weights(state.version, self.node.clock.now(), steps, state.values, metadata)

    async def _rows(self, m: msg.RowsAsked) -> msg.RowsRead:
        """Read from a committed state, which never changes, so that no push has to wait."""
        state, now = self._commits.committed, self.node.clock.now()
        spec, table = self._layout.table(m.table), table_of(state.tables, m.table)
        if m.keys is not None:
            nbytes = len(m.keys) * (spec.row_nbytes + m.keys.itemsize)
            values = await offload(partial(table.rows, spec, m.keys), nbytes)
            return msg.RowsRead(state.version, now, None, values.values)
        rows = await offload(partial(table.between, m.start, m.stop, spec), table.nbytes)
        return msg.RowsRead(state.version, now, rows.keys, rows.values)

    def _may_read(self, worker: str) -> bool:
        return self._slack(worker) >= 0

    def _slack(self, worker: str) -> float:
        left = slack(self._group.consistency, self._commits.committed.workers, worker)
        return math.inf if left is None else left

    # -- waiting and refusing --------------------------------------------------------------------

    async def until(
        self, holds: Callable[[], bool], until: float | None, among: Waiters | None = None
    ) -> bool:
        """Wait until `holds()`; return False if it does not by the loop's time `until`."""
        waiting = self._waiting if among is None else among
        while not (self._commits.closed or holds()):
            woken = asyncio.get_running_loop().create_future()
            waiting[woken] = holds
            try:
                async with asyncio.timeout_at(until):
                    await woken
            except TimeoutError:
                return False
            finally:
                del waiting[woken]
        if self._commits.closed:
            raise NotServing(f"shard {self.shard}: this replica is closed")
        return True

    def notify(self) -> None:
        """Wake requests whose condition holds now, and no others: hundreds may be waiting."""
        self.wake(self._waiting)
        self.wake(self._waiting_for_room, self.persistence.window - self.uncommitted)

    def wake(self, waiting: Waiters, most: float = math.inf) -> None:
        """Wake at most this number, which includes those that are woken but have not run yet."""
        for woken, holds in waiting.items():
            if most <= 0 and not self._commits.closed:
                return
            if woken.done():
                most -= 1
            elif self._commits.closed or holds():
                woken.set_result(None)
                most -= 1

    def must_be_in(self, epoch: int) -> None:
        """Raise `StaleEpoch` if this is not the replica's epoch."""
        if epoch != self.epoch or self._commits.closed:
            raise StaleEpoch(f"shard {self.shard} is in epoch {self.epoch}, not {epoch}")

    def must_be_head(self, epoch: int) -> None:
        """Raise `StaleEpoch` if this is not the head in this epoch."""
        self.must_be_in(epoch)
        if not self.is_head:
            name = self.node.name
            raise StaleEpoch(f"shard {self.shard}: {name} is not the head in epoch {epoch}")

    def _must_be_active(self, update: UpdateId) -> None:
        if self._is_refused(update):
            raise evicted(update)

    def _is_refused(self, update: UpdateId) -> bool:
        """Whether the worker was evicted, and its update may be too stale."""
        # An earlier incarnation is always refused: its updates may have been applied already.
        gated = not isinstance(self._group.consistency, ASP)
        return is_superseded(self.state, update) or (gated and is_evicted(self.state, update))


class Ledger:
    """Counts the updates that one replica applies, and records them if anything listens."""

    def __init__(self, replica: Replica) -> None:
        self.updates = 0
        self.duplicates = 0  # pushes that were applied before
        # A histogram: updates up to each of these bounds, and above the last.
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.staleness_sum = 0
        self.waiting = 0  # pushes that are not acknowledged
        self._replica = replica
        self._rows: list[tuple[Any, ...]] = []  # in the order of the fields of `Applied`

    def add(self, updates: Collection[AppliedUpdate]) -> None:
        """Record updates that were just applied."""
        self.updates += len(updates)
        for update in updates:
            self.staleness[bisect_left(STALENESS_BOUNDS, update.staleness)] += 1
            self.staleness_sum += update.staleness
        node = self._replica.node
        if node.group.recorded:
            now = node.clock.now()
            for u in updates:
                seconds = now - u.based_at if u.based_at else 0.0
                self._rows.append((now, *u.id, u.version, u.staleness, seconds, u.replayed))

    def flush(self) -> None:
        """Emit the updates that were recorded since the last flush, all of one epoch."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        replica, node = self._replica, self._replica.node
        shard, epoch, is_head = replica.shard, replica.epoch, replica.is_head
        columns = zip(*rows, strict=True)
        node.emit(Applied(node.clock.now(), node.name, shard, epoch, is_head, *columns))


def _now() -> float:
    return asyncio.get_running_loop().time()
