"""When a replica's operations are durable, so that they may be acked.

They are when its successor has acknowledged them or, at the tail, when the `Persistence` keeps the
state that contains them.

Operations that are applied while one commit is under way share the next. The loss of a replica
never takes a commit back, so only committed states are shown to workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.errors import DpsError, StaleEpoch
from dps.protocol.messages import Replicate
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    from dps.protocol.server.replica import Replica

T = TypeVar("T")

# The conditions that requests wait for, by the future that wakes the request; in order of arrival.
Waiters = dict[asyncio.Future[None], Callable[[], bool]]


class CommitLog:
    """The commits of one replica. Used from one event loop."""

    def __init__(self, replica: Replica) -> None:
        self.successor: Endpoint | None = None  # the next of the chain; None: this is the tail
        self.committed = replica.state  # the last committed state
        self.failure = ""  # why the last attempt to commit failed, if it did
        self.closed = False
        self._replica = replica
        self._timings = replica.node.group.timings
        self._log: deque[tuple[int, Operation]] = deque()
        self._copied: list[int] = []  # indices of states that are being copied to newcomers
        self._calls: dict[asyncio.Timeout, None] = {}  # in order
        self._pending = asyncio.Event()
        self._waiting: Waiters = {}
        self.configure()

    def close(self) -> None:
        """Commit nothing more, and refuse everything that waits for a commit."""
        self.closed = True
        self.interrupt()
        self._replica.wake(self._waiting)

    @property
    def is_immediate(self) -> bool:
        """Whether an operation is committed as soon as it is applied."""
        return self.successor is None and self._replica.persistence.immediate

    def append(self, op: Operation) -> None:
        """Commit a newly applied operation: now if that needs no wait, otherwise in `run`."""
        self._log.append((self._replica.state.index, op))
        self._proceed()

    async def until_committed(self, index: int, until: float) -> bool:
        """Wait until an operation is committed; False if it is not by the loop's time `until`."""
        return await self._replica.until(
            lambda: self.committed.index >= index, until, self._waiting
        )

    def configure(self) -> None:
        """Take the successor from the chain of the new epoch."""
        # A replica outside that chain keeps the old one, so that it does not commit as a tail does.
        me, chain = self._replica.node.me, self._replica.chain
        if me in chain:
            self.successor = next(iter(chain[chain.index(me) + 1 :]), None)
        self._proceed()

    def interrupt(self) -> None:
        """Give up calls to other processes, which may never answer."""
        for scope in self._calls:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    async def until_interrupted(self, work: Awaitable[T]) -> T:
        """Wait for another process; raises `StaleEpoch` when this replica enters an epoch."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._calls[scope] = None
                return await work
        except TimeoutError:
            if not scope.expired():
                raise
            raise StaleEpoch(f"shard {self._replica.shard} is leaving its epoch") from None
        finally:
            self._calls.pop(scope, None)

    @contextmanager
    def keeping_later_than(self, state: ShardState) -> Iterator[None]:
        """Keep operations later than `state` while that is copied to a newcomer."""
        self._copied.append(state.index)
        try:
            yield
        finally:
            self._copied.remove(state.index)
            self._trim()

    async def pass_on(self, successor: Endpoint, after: int, committed: int = -1) -> None:
        """Return when the successor has acknowledged all operations later than index `after`.

        A newcomer also gets the last `committed` index; it may acknowledge later operations before
        they are committed.
        """
        later = tuple(op for index, op in self._log if index > after)
        if later:
            shard, epoch = self._replica.shard, self._replica.epoch
            request = Replicate(shard, epoch, after + 1, later, committed)
            await self._replica.node.ask(successor, request, self._timings.call, "replicate")

    async def run(self) -> None:
        """Commit what is added, until cancelled."""
        while True:
            await self._pending.wait()
            self._pending.clear()
            while self._replica.uncommitted:
                try:
                    await self.until_interrupted(self._commit())
                    self.failure = ""
                except (DpsError, OSError) as error:
                    self.failure = str(error)
                    # The successor or the store does not answer. Nothing is acked until then; the
                    # coordinator changes the chain or the stores, or they come back.
                    await asyncio.sleep(self._timings.retry)

    def set_committed(self, state: ShardState) -> None:
        """Record that everything in a state is committed."""
        if state.index > self.committed.index:
            self.committed = state
            self._replica.wake(self._waiting)
        self._trim()

    def _proceed(self) -> None:
        """Commit what is applied: at once if nothing has to be waited for."""
        if self.is_immediate:
            self.set_committed(self._replica.state)
        else:
            self._pending.set()

    async def _commit(self) -> None:
        state, epoch, successor = self._replica.state, self._replica.epoch, self.successor
        if successor is not None:
            await self.pass_on(successor, self.committed.index)
        else:
            await self._replica.persistence.commit(epoch, state)
        if (epoch, successor) == (self._replica.epoch, self.successor):
            self.set_committed(state)
            self._replica.notify()

    def _trim(self) -> None:
        needed_after = min([self.committed.index, *self._copied])
        while self._log and self._log[0][0] <= needed_after:
            self._log.popleft()
