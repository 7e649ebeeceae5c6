"""The head's part in a checkpoint of all shards: hold gradients, admit what others have, write."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.errors import NotServing
from dps.protocol.messages import Done, EndCut, HoldCut, Reach, TakeCut
from dps.protocol.tasks import Tasks
from dps.recovery.durability import Persistence

if TYPE_CHECKING:
    from dps.protocol.server.replica import Replica


class SnapshotBarrier:
    """A head's part in cuts; the `keeper` writes the states. Used from one event loop."""

    def __init__(self, replica: Replica, tasks: Tasks, keeper: Persistence) -> None:
        self._replica = replica
        self._tasks = tasks
        self._keeper = keeper
        self._patience = 0.0
        self._cut: int | None = None
        self._upto: Reach = {}
        self._last = 0
        self._reached = asyncio.Event()
        self._timer: asyncio.Task[None] | None = None

    def admits(self, op: Operation) -> bool:
        """Whether an operation may be applied now."""
        if self._cut is None or op.kind not in ("gradient", "tick"):
            return True
        limit = self._upto.get(op.id.worker)
        return limit is not None and (op.id.incarnation, op.id.seq) <= limit

    def look(self) -> None:
        """Check whether the state has reached the cut."""
        if self._cut is not None and _reach(self._replica.state, self._upto) == self._upto:
            self._reached.set()

    def close(self) -> None:
        """Admit everything."""
        self._release()

    async def handle(self, m: HoldCut | TakeCut | EndCut) -> Reach | int | Done:
        """Carry out one message of the coordinator's."""
        match m:
            case HoldCut():
                return await self._hold(m)
            case TakeCut():
                return await self._take(m)
            case EndCut():
                return await self._end(m)

    async def _hold(self, m: HoldCut) -> Reach:
        async with self._replica.lock:
            if m.cut <= self._last:
                raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
            self._release()
            self._cut = self._last = m.cut
            self._patience = m.patience
            # The coordinator may be gone before it ends the cut.
            self._timer = self._tasks.start(self._release_after(m.patience))
            workers = self._replica.state.workers.items()
            return {name: (p.incarnation, p.clock) for name, p in workers if p.active}

    async def _take(self, m: TakeCut) -> int:
        if self._cut != m.cut:
            raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
        self._upto = m.upto
        self.look()
        await self._replica.settle()
        try:
            async with asyncio.timeout(self._patience / 2):
                await self._reached.wait()
        except TimeoutError:
            raise NotServing(f"cut {m.cut}: shard {m.shard} lacks updates of others") from None
        finally:
            state = self._replica.state
            # A worker that has joined since may have come to this shard alone. Going back to such a
            # cut would leave it there, and hold up all cuts until it pushes.
            known = state.clocks.keys() <= m.upto.keys()
            whole = self._cut == m.cut and known and _reach(state, m.upto) == m.upto
            if self._cut == m.cut:
                await self._release_and_settle()
        if not whole:
            raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
        await self._keeper.write_cut(m.epoch, m.cut, state)
        return state.version

    async def _end(self, m: EndCut) -> Done:
        self._last = max(self._last, m.cut)
        if m.complete:
            await self._keeper.end_cut(m.epoch, m.cut, m.oldest)
        elif self._cut == m.cut:
            await self._release_and_settle()
        return Done()

    def _release(self) -> None:
        self._cut, self._upto = None, {}
        self._reached.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _release_and_settle(self) -> None:
        self._release()
        await self._replica.settle()

    async def _release_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._timer = None  # it must not cancel itself
        await self._release_and_settle()


def _reach(state: ShardState, workers: Reach) -> Reach:
    """Return how far these workers are, as far as the shard knows them."""
    known = {name: state.workers[name] for name in workers if name in state.workers}
    return {name: (p.incarnation, p.clock) for name, p in known.items()}
