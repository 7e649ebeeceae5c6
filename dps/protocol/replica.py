"""Owns one replica of a shard: gates, applies, replicates and acknowledges operations.

An operation is applied under a lock, which gives it its place in the order, and is then committed:
acknowledged by the successor in the chain, or by the durability after the last replica. Operations
that arrive while one commit is under way share the next. Weights are served only once everything in
them is committed, so what a client has seen is never taken back by the loss of a replica.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from dps.core.consistency import BSP, SSP
from dps.core.replay import plan
from dps.core.shard import ShardState, Step, apply, check_gradient, is_duplicate
from dps.core.updates import Operation, UpdateId
from dps.errors import DpsError, NonFiniteGradient, NotServing, StaleEpoch
from dps.events import Promoted, Replayed, ReplicaAdded, Sink
from dps.protocol.durability import Durability
from dps.protocol.group import Group
from dps.protocol.ledger import Ledger
from dps.protocol.messages import (
    Configure,
    Done,
    Extend,
    Install,
    Pull,
    Push,
    Pushed,
    Replicate,
    Waiting,
    Weights,
)
from dps.protocol.rebuild import weights
from dps.protocol.transport import Clock, Endpoint, Transport

# Below this many bytes a step of the update rule is quicker than handing it to a thread.
INLINE_BYTES = 1 << 20


class Replica:
    """A replica of one shard. All calls come from one event loop."""

    def __init__(
        self,
        shard: int,
        group: Group,
        node: str,
        me: Endpoint,
        state: ShardState,
        epoch: int,
        chain: tuple[Endpoint, ...],
        durability: Durability,
        transport: Transport,
        clock: Clock,
        emit: Sink,
    ) -> None:
        self.shard = shard
        self.node = node
        self.state = state
        self.epoch = epoch
        self.chain = chain
        self.duplicates = 0
        self.ledger = Ledger(node, shard, clock, emit)
        self._me = me
        self._group = group
        self._layout = group.layout.shards[shard]
        self._durability = durability
        self._transport = transport
        self._clock = clock
        self._emit = emit
        self._successor = _after(chain, me)
        self._visible = state
        self._committed = state.index
        self._log: deque[tuple[int, Operation]] = deque()
        self._copied: list[int] = []  # indices of the states that newcomers are being given
        self._round: dict[str, _Held] = {}
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._uncommitted = asyncio.Event()
        self._closed = False
        self._committer = asyncio.create_task(self._commit_forever())

    async def close(self) -> None:
        """Refuse everything from now on and stop the tasks."""
        self._closed = True
        self._committer.cancel()
        await self._durability.close()
        await self._notify()
        self.ledger.flush()

    # -- requests of clients -------------------------------------------------------------------

    async def push(self, m: Push) -> Pushed | Waiting:
        """Apply an update once, and reply when it is durable; with weights if asked for."""
        self._must_be_head(m.epoch)
        until = _now() + m.patience
        op = m.operation
        barrier = isinstance(self._group.consistency, BSP) and op.kind == "gradient"
        step = await (self._in_round(op, m.epoch, until) if barrier else self._apply(op, m.epoch))
        if step is None:
            return Waiting()
        target = step.state.index
        if not await self._until(lambda: self._committed >= target, until):
            return Waiting()
        self._must_be_head(m.epoch)
        if step.outcome == "duplicate" and op.kind == "gradient":
            self.duplicates += 1
        version = step.updates[-1].version if step.updates else step.state.version
        read = await self._readable(op.id.worker, until) if m.pull else None
        clock = step.state.workers[op.id.worker].clock
        return Pushed(step.outcome, version, clock, read)

    async def pull(self, m: Pull) -> Weights | Waiting:
        """Return the committed weights, when the consistency model lets this worker read them."""
        self._must_be_head(m.epoch)
        read = await self._readable(m.worker, _now() + m.patience)
        self._must_be_head(m.epoch)
        return read if read is not None else Waiting()

    async def replay(self, epoch: int, buffered: Sequence[Operation]) -> None:
        """Apply buffered gradients by the group's replay policy; return when they are durable.

        What is new among them is decided, merged and applied in one turn, so that a repeated
        request finds all of them or none. A sum that is not finite is dropped: it could never be
        applied, and the shard must come back.
        """
        policy = self._group.recovery.replay
        async with self._lock:
            self._must_be_head(epoch)
            fresh = [op for op in buffered if not is_duplicate(self.state, op.id)]
            todo = plan(policy, self._layout, self.state.version, fresh)
            steps, dropped = 0, todo.dropped
            for op in todo.operations:
                try:
                    self._accept(op, await self._stepped(op))
                    steps += 1
                except NonFiniteGradient:
                    dropped += 1 + len(op.merged)
            await self._finish_round()
            target = self.state.index
        await self._notify()
        limit = _now() + self._group.timings.copy
        if not await self._until(lambda: self._committed >= target, limit):
            raise NotServing(f"shard {self.shard}: replayed gradients did not become durable")
        self._emit(
            Replayed(
                self._clock.now(),
                self.shard,
                epoch,
                policy.policy,
                count=len(fresh) - dropped,
                steps=steps,
                duplicates=len(buffered) - len(fresh),
                dropped=dropped,
                version=self.state.version,
            )
        )

    async def evict(self, epoch: int, update: UpdateId) -> None:
        """Take a lost worker out of the clock table, so that nobody waits for it."""
        await self._apply(Operation("leave", update), epoch)

    # -- requests of other replicas and of the coordinator ---------------------------------------

    async def replicate(self, m: Replicate) -> Done:
        """Apply the predecessor's operations; reply when the rest of the chain has them too."""
        async with self._lock:
            self._must_be_in(m.epoch)
            for index, op in enumerate(m.operations, m.first):
                if index == self.state.index + 1:
                    self._accept(op, await self._stepped(op))
                elif index > self.state.index:
                    raise NotServing(f"shard {self.shard}: operation {index} leaves a gap")
        last = m.first + len(m.operations) - 1
        if not await self._until(
            lambda: self._committed >= last, _now() + self._group.timings.call
        ):
            raise NotServing(f"shard {self.shard}: the successor does not acknowledge")
        return Done()

    async def extend(self, m: Extend) -> Done:
        """Copy the state to a newcomer while updates go on, then make it the successor.

        The last operations are passed on under the lock: the newcomer is never behind what this
        replica has acknowledged.
        """
        self._must_be_in(m.epoch)
        chain = (*self.chain, m.host)
        async with self._lock:
            state = self.state
            self._copied.append(state.index)
        try:
            install = Install(self.shard, m.epoch, chain, state, "replica")
            await self._call(m.host, install, self._group.timings.copy)
            async with self._lock:
                self._must_be_in(m.epoch)
                await self._pass_on(m.host, state.index)
                self._successor = m.host
        finally:
            self._copied.remove(state.index)
            self._trim()
        return Done()

    async def configure(self, m: Configure) -> Done:
        """Enter a new epoch with a new chain; a replica that becomes the head records it."""
        if m.epoch < self.epoch:
            raise StaleEpoch(f"shard {self.shard} is in epoch {self.epoch}, not {m.epoch}")
        async with self._lock:
            was_head, was_tail = self.is_head, self._successor is None
            self.ledger.flush()
            self.epoch, self.chain = m.epoch, m.chain
            self._successor = _after(m.chain, self._me)
        if self.is_head and not was_head:
            now = self._clock.now()
            self._emit(Promoted(now, self.shard, m.epoch, self.node, self.state.version))
        elif not self.is_head and was_tail and self._successor is None:
            now = self._clock.now()
            self._emit(ReplicaAdded(now, self.shard, m.epoch, self.node, self.state.version))
        self._uncommitted.set()
        await self._notify()
        return Done()

    @property
    def is_head(self) -> bool:
        """Whether clients' requests come to this replica."""
        return self.chain[0] == self._me

    # -- applying ------------------------------------------------------------------------------

    async def _apply(self, op: Operation, epoch: int) -> Step:
        """Apply one operation in its turn; return what came of it, not yet durable."""
        await self._until(lambda: self._in_flight < self._durability.window, None)
        async with self._lock:
            self._must_be_head(epoch)
            step = self._accept(op, await self._stepped(op))
            await self._finish_round()
        await self._notify()
        return step

    async def _in_round(self, op: Operation, epoch: int, until: float) -> Step | None:
        """Hold an update until every active worker has sent one; return None if that takes long."""
        if op.id.worker not in self.state.clocks or is_duplicate(self.state, op.id):
            return await self._apply(op, epoch)
        check_gradient(self._layout, op)
        held = self._round.get(op.id.worker)
        if held is None or held.operation.id != op.id:
            held = _Held(op, asyncio.get_running_loop().create_future())
            self._round[op.id.worker] = held
        async with self._lock:
            self._must_be_head(epoch)
            await self._finish_round()
        await self._notify()
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(held.step)
        except TimeoutError:
            return None

    async def _finish_round(self) -> None:
        """If the updates of all active workers are here, apply them in the order of their names.

        After the loss of a head some updates of a round may be in the state already. Their workers
        are ahead: what they send next is for the next round. A worker that was evicted meanwhile
        neither waits nor is waited for.
        """
        clocks = self.state.clocks
        slowest = min(clocks.values(), default=0)
        awaited = {name for name, clock in clocks.items() if clock == slowest}
        due = self._round.keys() - clocks.keys()
        if awaited <= self._round.keys():
            due |= awaited
        for name, held in sorted(self._round.items()):
            if name in due:
                op = held.operation
                step = self._accept(op, await self._stepped(op))
                if self._round[name] is held:
                    del self._round[name]
                held.step.set_result(step)

    async def _stepped(self, op: Operation) -> Step:
        work = partial(apply, self._layout, self._group.rule, self.state, op)
        if op.gradient is None or op.gradient.nbytes < INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _accept(self, op: Operation, step: Step) -> Step:
        """Make the step's state the current one and have it committed. The lock must be held."""
        if step.outcome == "duplicate":
            return step
        self.state = step.state
        self._log.append((step.state.index, op))
        self.ledger.add(self.epoch, self.is_head, step.updates)
        if self._commits_at_once:
            self._set_committed(step.state)
        else:
            self._uncommitted.set()
        return step

    # -- committing ----------------------------------------------------------------------------

    @property
    def _commits_at_once(self) -> bool:
        return self._successor is None and self._durability.immediate

    @property
    def _in_flight(self) -> int:
        return self.state.index - self._committed

    async def _commit_forever(self) -> None:
        while True:
            await self._uncommitted.wait()
            self._uncommitted.clear()
            while self._in_flight:
                try:
                    await self._commit()
                except (DpsError, OSError):
                    # The successor or the store does not answer. Nothing is acked meanwhile; the
                    # coordinator changes the chain, or the store comes back.
                    await asyncio.sleep(self._group.timings.retry)

    async def _commit(self) -> None:
        state, epoch, successor = self.state, self.epoch, self._successor
        if successor is not None:
            await self._pass_on(successor, self._committed)
        else:
            await self._durability.commit(epoch, state)
        if (epoch, successor) == (self.epoch, self._successor):
            self._set_committed(state)
            await self._notify()

    async def _pass_on(self, successor: Endpoint, after: int) -> None:
        """Have the successor acknowledge all operations later than index `after`."""
        later = tuple(op for index, op in self._log if index > after)
        if later:
            request = Replicate(self.shard, self.epoch, after + 1, later)
            await self._call(successor, request, self._group.timings.call)

    def _set_committed(self, state: ShardState) -> None:
        if state.index > self._committed:
            self._committed = state.index
            self._visible = state
        self._trim()

    def _trim(self) -> None:
        needed_after = min([self._committed, *self._copied])
        while self._log and self._log[0][0] <= needed_after:
            self._log.popleft()

    # -- reading -------------------------------------------------------------------------------

    async def _readable(self, worker: str, until: float) -> Weights | None:
        if not await self._until(lambda: self._may_read(worker), until):
            return None
        return weights(self._visible, self.epoch, self._clock.now(), self._group)

    def _may_read(self, worker: str) -> bool:
        known = self._visible.workers.get(worker)
        match self._group.consistency:
            case SSP(tau):
                lead = tau
            case BSP():
                lead = 0
            case _:
                return True
        if known is None or not known.active:
            return True
        return known.clock - min(self._visible.clocks.values()) <= lead

    # -- waiting and refusing --------------------------------------------------------------------

    async def _until(self, holds: Callable[[], bool], until: float | None) -> bool:
        """Wait until `holds()`; return False if it does not by the loop's time `until`."""
        if not holds():
            try:
                async with asyncio.timeout_at(until), self._changed:
                    await self._changed.wait_for(lambda: self._closed or holds())
            except TimeoutError:
                return False
        if self._closed:
            raise NotServing(f"shard {self.shard}: this replica is closed")
        return True

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _must_be_head(self, epoch: int) -> None:
        self._must_be_in(epoch)
        if not self.is_head:
            raise StaleEpoch(f"shard {self.shard}: {self.node} is not the head in epoch {epoch}")

    def _must_be_in(self, epoch: int) -> None:
        if epoch != self.epoch or self._closed:
            raise StaleEpoch(f"shard {self.shard} is in epoch {self.epoch}, not {epoch}")

    async def _call(self, to: Endpoint, request: object, deadline: float) -> None:
        await self._transport.call(to, request, deadline, "replicate")


@dataclass(frozen=True, slots=True)
class _Held:
    """An update that waits for the others of its round."""

    operation: Operation
    step: asyncio.Future[Step]


def _after(chain: tuple[Endpoint, ...], me: Endpoint) -> Endpoint | None:
    """The member of the chain that comes after `me`, or None for the tail."""
    following = chain[chain.index(me) + 1 :]
    return following[0] if following else None


def _now() -> float:
    return asyncio.get_running_loop().time()
