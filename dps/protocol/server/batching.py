"""Updates that wait at a shard to be applied together with others.

Under BSP a round waits until every active worker has sent an update. With aggregation, updates are
summed before they go down the chain, so that one operation stands for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dps.core.blocks import ShardLayout
from dps.core.consistency import ASP, Consistency
from dps.core.replay import summed
from dps.core.shard import ShardState, Step, is_duplicate
from dps.core.updates import Operation, UpdateId
from dps.errors import DpsError, Evicted, NonFiniteGradient
from dps.protocol.compression import decoded_bytes
from dps.protocol.executor import offload


class BatchingReplica(Protocol):
    """The replica at which updates wait: its state, and how one more is applied to that."""

    state: ShardState

    async def apply_now(self, op: Operation) -> Step:
        """Apply an operation; the replica's lock must be held."""
        ...

    def admits(self, op: Operation) -> bool:
        """Whether an operation may be applied now; the others wait on."""
        ...

    def summable(self, op: Operation) -> Operation:
        """Return an operation as one that can be summed with others."""
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    """An update that waits, and what will come of it."""

    operation: Operation
    step: asyncio.Future[Step]


class Batching:
    """The updates that wait at one replica. Used from one event loop.

    Parameters
    ----------
    aggregate
        How many updates are summed; 1: they are applied one by one, in rounds.
    """

    def __init__(self, layout: ShardLayout, aggregate: int, replica: BatchingReplica) -> None:
        self._layout = layout
        self._aggregate = aggregate
        self._replica = replica
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, op: Operation) -> asyncio.Future[Step]:
        """Have an update wait; what comes of it is the future's. One that is sent again waits on.

        A worker sends one update after the other, so a later one of its own takes its place.
        """
        held = self._held.get(op.id.worker)
        if held is None or held.operation.id != op.id:
            held = _Held(op, asyncio.get_running_loop().create_future())
            self._held[op.id.worker] = held
        return held.step

    async def finish(self, complete: bool = False) -> None:
        """Apply the updates that have nothing more to wait for. The replica's lock must be held.

        They are applied in the order of the workers' names, so that what comes of a round does not
        depend on timing. With `complete`, aggregation does not wait for more.
        """
        if not self._held:
            return
        due = self._due(complete)
        taken = [held for name, held in sorted(self._held.items()) if name in due]
        ready = [held for held in taken if not self._refused(held)]
        if self._aggregate > 1:
            await self._apply_summed(ready)
        else:
            for held in ready:
                self._applied(held, await self._replica.apply_now(held.operation))

    def _due(self, complete: bool) -> set[str]:
        """The workers whose updates can be applied.

        After the loss of a head some updates of a round may be in the state already. Their workers
        are ahead: what they send next is for the next round. A worker that was evicted meanwhile
        neither waits nor is waited for, and an update that was sent again while it was applied
        must not be taken for the worker's next.
        """
        state = self._replica.state
        clocks = state.clocks
        here = {name for name, held in self._held.items() if self._replica.admits(held.operation)}
        done = {name for name in here if is_duplicate(state, self._held[name].operation.id)}
        done |= here - clocks.keys()
        waiting = here - done
        if self._aggregate > 1:
            enough = complete or len(waiting) >= min(self._aggregate, len(clocks))
            return here if enough else done
        slowest = min(clocks.values(), default=0)
        awaited = {name for name, clock in clocks.items() if clock == slowest}
        return done | awaited if awaited <= waiting else done

    def _refused(self, held: _Held) -> bool:
        """Refuse the update of a worker that was evicted while it waited."""
        state, update = self._replica.state, held.operation.id
        if not is_evicted(state, update) and not is_superseded(state, update):
            return False
        self._refuse(held, evicted(update))
        return True

    def _applied(self, held: _Held, step: Step) -> None:
        held.step.set_result(step)
        self._forget(held)

    def _refuse(self, held: _Held, error: DpsError) -> None:
        held.step.set_exception(error)
        held.step.exception()  # whoever waited for it may have gone; asyncio need not complain
        self._forget(held)

    def _forget(self, held: _Held) -> None:
        """Hold an update no longer.

        It must be in the state by then: when it is sent again, it would be held for the next round.
        """
        worker = held.operation.id.worker
        if self._held.get(worker) is held:
            del self._held[worker]

    async def _apply_summed(self, ready: Sequence[_Held]) -> None:
        # One that was sent again may have been applied while it was held: it must not be summed.
        alone: list[Operation] = []
        fresh: list[Operation] = []
        for op in (held.operation for held in ready):
            summable = op.kind == "gradient" and not is_duplicate(self._replica.state, op.id)
            (fresh if summable else alone).append(op)
        for op in (*await self._summed(fresh), *alone):
            ids = {op.id, *(update for update, _, _ in op.merged)}
            theirs = [held for held in ready if held.operation.id in ids]
            try:
                step = await self._replica.apply_now(op)
            except NonFiniteGradient as error:  # each was finite, but not their sum
                for held in theirs:
                    self._refuse(held, error)
            else:
                for held in theirs:
                    self._applied(held, step)

    async def _summed(self, ops: Sequence[Operation]) -> tuple[Operation, ...]:
        """Sum operations, for the state that the replica has as long as its lock is held."""

        def work() -> tuple[Operation, ...]:
            return summed(self._layout, map(self._replica.summable, ops))

        return await offload(work, sum(decoded_bytes(self._layout, op) for op in ops))


def is_evicted(state: ShardState, update: UpdateId) -> bool:
    """Whether nobody waits any more for the worker, in the incarnation of this update.

    That is no reason to refuse an update that was applied before, and is only sent again: it must
    not be taken for lost. A read has the number 0.
    """
    known = state.workers.get(update.worker)
    if known is None or known.active or known.incarnation != update.incarnation:
        return False
    return not 0 < update.seq <= known.seq


def is_superseded(state: ShardState, update: UpdateId) -> bool:
    """Whether the worker has entered again since, or left in a later incarnation."""
    known = state.workers.get(update.worker)
    return known is not None and known.incarnation > update.incarnation


def is_refused(consistency: Consistency, state: ShardState, update: UpdateId) -> bool:
    """Whether nobody waits for the worker, and it matters.

    One that has been replaced by a later incarnation is always refused: its updates cannot be
    told from those that are here already, and must not be acked as if they were.
    """
    gated = not isinstance(consistency, ASP)
    return is_superseded(state, update) or (gated and is_evicted(state, update))


def evicted(update: UpdateId) -> Evicted:
    """The error that a worker is told which nobody waits for."""
    return Evicted(
        f"{update.worker} (incarnation {update.incarnation}) was not heard of for a lease or more, "
        "and must enter again"
    )
