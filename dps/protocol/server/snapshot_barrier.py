"""The head's part in a checkpoint of all shards: hold gradients, admit what others have, write."""

from __future__ import annotations

import asyncio
from typing import Protocol

from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.errors import NotServing
from dps.protocol.messages import Done, EndCut, Held, HoldCut, Reach, TakeCut, Taken
from dps.protocol.tasks import Tasks
from dps.recovery.durability import Persistence


class HeldReplica(Protocol):
    """The replica that a cut holds up; whoever has its lock may change its state."""

    lock: asyncio.Lock
    state: ShardState
    tasks: Tasks

    async def settle(self) -> None:
        """Apply what has nothing more to wait for, and wake whoever waits for the replica."""
        ...


class SnapshotBarrier:
    """A head's part in cuts; the `keeper` writes the states. All calls come from one event loop."""

    def __init__(self, replica: HeldReplica, keeper: Persistence) -> None:
        self._patience = 0.0
        self._replica = replica
        self._keeper = keeper
        self._cut: int | None = None
        self._upto: Reach = {}
        self._last = 0
        self._reached = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._releasing: asyncio.Task[None] | None = None

    def admits(self, op: Operation) -> bool:
        """Whether an operation may be applied now."""
        if self._cut is None or op.kind not in ("gradient", "tick"):
            return True
        limit = self._upto.get(op.id.worker)
        return limit is not None and (op.id.incarnation, op.id.seq) <= limit

    def look(self) -> None:
        """Take note that the state has changed."""
        if self._cut is not None and _reach(self._replica.state, self._upto) == self._upto:
            self._reached.set()

    async def close(self) -> None:
        """Let everything go on."""
        self._release()
        if self._releasing is not None:
            self._releasing.cancel()

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
        async with self._replica.lock:
            if m.cut <= self._last:
                raise NotServing(f"cut {m.cut} of shard {m.shard} is over")
            self._release()
            self._cut = self._last = m.cut
            self._patience = m.patience
            loop = asyncio.get_running_loop()
            # Whoever holds us may be gone.
            self._timer = loop.call_later(m.patience, self._release_soon)
            active = {name: p for name, p in self._replica.state.workers.items() if p.active}
            return Held({name: (p.incarnation, p.clock) for name, p in active.items()})

    async def _take(self, m: TakeCut) -> Taken:
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
            # Who has joined since may have come to this shard alone. Going back to such a cut would
            # leave it there, and hold up all cuts until it pushes.
            known = state.clocks.keys() <= m.upto.keys()
            whole = self._cut == m.cut and known and _reach(state, m.upto) == m.upto
            if self._cut == m.cut:
                self._release()
                await self._replica.settle()
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
            await self._replica.settle()

    def _release(self) -> None:
        self._cut, self._upto = None, {}
        self._reached.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _release_soon(self) -> None:
        async def release() -> None:
            self._release()
            await self._replica.settle()

        self._releasing = self._replica.tasks.start(release())


def _reach(state: ShardState, workers: Reach) -> Reach:
    """How far these workers are, as far as the shard knows them."""
    known = {name: state.workers[name] for name in workers if name in state.workers}
    return {name: (p.incarnation, p.clock) for name, p in known.items()}
