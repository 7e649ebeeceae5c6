"""The head's part in a checkpoint of all shards: hold gradients, admit what others have, write."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dps.core.updates import Operation
from dps.errors import NotServing
from dps.protocol.messages import EndCut, HoldCut, Reach, TakeCut
from dps.protocol.tasks import Tasks

if TYPE_CHECKING:
    from dps.protocol.server.replica import Replica


class SnapshotBarrier:
    """A head's part in cuts. Used from one event loop."""

    def __init__(self, replica: Replica, tasks: Tasks) -> None:
        self._replica = replica
        self._tasks = tasks
        self._last = 0  # the last cut
        self._upto: Reach = {}
        self._timer: asyncio.TimerHandle | None = None  # while gradients are held for it

    def admits(self, op: Operation) -> bool:
        """Whether an operation may be applied now."""
        if self._timer is None or op.kind not in ("gradient", "tick"):
            return True
        limit = self._upto.get(op.id.worker)
        return limit is not None and (op.id.incarnation, op.id.seq) <= limit

    def close(self) -> None:
        """Admit everything."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._upto = None, {}

    async def hold(self, m: HoldCut) -> Reach:
        """Admit no gradients until the cut is taken, or the coordinator may be gone."""
        async with self._replica.lock:
            if m.cut <= self._last:
                raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
            self.close()
            self._last = m.cut
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                m.patience, lambda: self._tasks.start(self._expire(m.cut))
            )
            workers = self._replica.state.workers.items()
            return {name: (p.incarnation, p.clock) for name, p in workers if p.active}

    async def take(self, m: TakeCut) -> int:
        """Admit what other shards have, and write the state that has no more than that."""
        if self._timer is None or self._last != m.cut:
            raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
        timer, self._upto = self._timer, m.upto
        await self._replica.settle()
        await self._replica.until(
            lambda: self._timer is not timer or self._has_reached(m.upto), None
        )
        state, held = self._replica.state, self._timer is timer
        # A worker that has joined since may have come to this shard alone. Going back to such a
        # cut would leave it there, and hold up all cuts until it pushes.
        whole = held and state.clocks.keys() <= m.upto.keys() and self._has_reached(m.upto)
        if held:
            await self._release()
        if not whole:
            raise NotServing(f"cut {m.cut}: shard {m.shard} lacks updates that others have")
        await self._replica.persistence.write_cut(m.epoch, m.cut, state)
        return state.version

    async def end(self, m: EndCut) -> None:
        """Keep a complete cut; admit everything if it was given up."""
        self._last = max(self._last, m.cut)
        if m.complete:
            await self._replica.persistence.end_cut(m.epoch, m.cut, m.oldest)
        elif self._last == m.cut:
            await self._release()

    def _has_reached(self, upto: Reach) -> bool:
        known = self._replica.state.workers
        return all(
            name in known and (known[name].incarnation, known[name].clock) == at
            for name, at in upto.items()
        )

    async def _expire(self, cut: int) -> None:
        if cut == self._last:  # otherwise gradients are held for a later one
            await self._release()

    async def _release(self) -> None:
        self.close()
        await self._replica.settle()
