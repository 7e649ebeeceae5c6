"""Updates that wait at a shard to be applied together with others.

Under BSP a round waits until every active worker has sent an update. With aggregation, updates are
summed before they go down the chain, so that one operation stands for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dps.core.consistency import BSP
from dps.core.leases import without_repeats
from dps.core.replay import summed
from dps.core.shard import Step, check_gradient, is_duplicate, is_evicted, is_superseded
from dps.core.updates import Operation, UpdateId
from dps.errors import DpsError, Evicted, NonFiniteGradient
from dps.protocol.compression import applicable, decoded_bytes
from dps.protocol.executor import offload
from dps.protocol.messages import Waiting
from dps.protocol.tasks import Tasks

if TYPE_CHECKING:
    from dps.protocol.server.replica import Replica


class _Held(NamedTuple):
    """An update that waits, and the step that will apply it."""

    operation: Operation
    step: asyncio.Future[Step]


class Batching:
    """The updates that wait at one replica, if they are applied `together`."""

    def __init__(self, replica: Replica, tasks: Tasks) -> None:
        group = replica.node.group
        self.together = isinstance(group.consistency, BSP) or group.aggregate > 1
        self._replica = replica
        self._tasks = tasks
        self._layout = group.layout.shards[replica.shard]
        self._aggregate = group.aggregate  # updates in one sum; 1: they are applied in rounds
        self._linger = group.recovery.durability.above.linger
        self._held: dict[str, _Held] = {}
        self._lingering: asyncio.Task[None] | None = None

    async def apply(self, op: Operation, epoch: int, until: float) -> Step | Waiting:
        """Apply a gradient or a tick together with others, if they come by the loop's `until`."""
        if op.kind == "gradient" and self._is_awaited(op.id):

            def check() -> None:
                check_gradient(self._layout, applicable(self._layout, op), self._replica.node.each)

            await offload(check, decoded_bytes(self._layout, op))
        if not self._is_awaited(op.id):
            return await self._replica.apply(op, epoch, until)
        held = self._held.get(op.id.worker)
        if held is None or held.operation.id != op.id:  # one that is sent again waits on
            # A worker sends one update after the other, so its next one takes its place.
            held = self._held[op.id.worker] = _Held(op, asyncio.get_running_loop().create_future())
        async with self._replica.lock:
            self._replica.must_be_head(epoch)
            await self.finish()
        self._replica.notify()
        if self._held and self._aggregate > 1 and (not self._lingering or self._lingering.done()):
            self._lingering = self._tasks.start(self._finish_later())
        try:
            async with asyncio.timeout_at(until):
                return await asyncio.shield(held.step)
        except TimeoutError:
            return Waiting(for_workers=True)

    async def finish(self, complete: bool = False) -> None:
        """Apply the updates that have nothing more to wait for. The replica's lock must be held."""
        # The order is that of the workers' names, so that the result of a round does not depend on
        # timing. With `complete`, aggregation does not wait for more.
        if not self._held:
            return
        due = self._due(complete)
        taken = [held for name, held in sorted(self._held.items()) if name in due]
        ready = [held for held in taken if not self._refused(held)]
        if self._aggregate > 1:
            await self._apply_summed(ready)
        else:
            for held in ready:
                self._let_go(held, await self._replica.apply_now(held.operation))

    def _is_awaited(self, update: UpdateId) -> bool:
        state = self._replica.state
        known = state.workers.get(update.worker)
        return known is not None and known.active and not is_duplicate(state, update)

    async def _finish_later(self) -> None:
        await asyncio.sleep(self._linger)
        await self._replica.settle(complete=True)

    def _due(self, complete: bool) -> set[str]:
        """Return the workers whose updates can be applied."""
        # After the loss of a head some updates of a round may be in the state already. Their
        # workers are ahead: their next updates are for the next round. An evicted worker does not
        # wait, and no worker waits for it. An update that was resent while it was applied must not
        # be taken for the worker's next one.
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
        state, update = self._replica.state, held.operation.id
        if not is_evicted(state, update) and not is_superseded(state, update):
            return False
        self._let_go(held, evicted(update))
        return True

    def _let_go(self, held: _Held, result: Step | DpsError) -> None:
        """Hold an update no longer: it is in the state, or it would be held again when resent."""
        if isinstance(result, DpsError):
            held.step.set_exception(result)
            held.step.exception()  # its request may have ended; asyncio need not complain
        else:
            held.step.set_result(result)
        worker = held.operation.id.worker
        if self._held.get(worker) is held:
            del self._held[worker]

    async def _apply_summed(self, ready: Sequence[_Held]) -> None:
        # One that was sent again may have been applied while it was held: it must not be summed.
        state = self._replica.state
        alone: list[Operation] = []
        fresh: list[Operation] = []
        for op in (held.operation for held in ready):
            summable = op.kind == "gradient" and not is_duplicate(state, op.id)
            (fresh if summable else alone).append(op)
        once = [*without_repeats(state.batches, fresh)]
        alone += [op for op in once if op.kind == "tick"]
        fresh = [op for op in once if op.kind == "gradient"]
        replica, nbytes = self._replica, sum(decoded_bytes(self._layout, op) for op in fresh)
        sums = await offload(lambda: summed(self._layout, map(replica.summable, fresh)), nbytes)
        for op in (*sums, *alone):
            ids = {op.id, *(update for update, *_ in op.merged)}
            parts = [held for held in ready if held.operation.id in ids]
            result: Step | DpsError
            try:
                result = await self._replica.apply_now(op)
            except NonFiniteGradient as error:  # each was finite, but not their sum
                result = error
            for held in parts:
                self._let_go(held, result)


def evicted(update: UpdateId) -> Evicted:
    """Return the error for an update of a worker that was evicted."""
    return Evicted(
        f"{update.worker} (incarnation {update.incarnation}) was evicted, because it was silent "
        "for longer than its lease; it must join again"
    )
