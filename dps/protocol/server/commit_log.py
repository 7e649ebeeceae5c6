"""How a replica's operations become durable: acknowledged by its successor, or kept after it.

Operations that are applied while one commit is under way share the next. What is committed is never
taken back by the loss of a replica, so only that is shown to anybody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.errors import DpsError, StaleEpoch
from dps.protocol.group import Group
from dps.protocol.messages import Replicate
from dps.protocol.server.reach import Reach
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Endpoint, Transport
from dps.recovery.durability import Persistence

T = TypeVar("T")


class CommitLog:
    """The commits of one replica. Used from one event loop.

    Attributes
    ----------
    epoch
        The replica's epoch, named in what is passed on.
    successor
        Who comes after this replica in the chain; None for the tail.
    visible
        The last committed state.
    index
        Index of the last operation that is committed.
    failure
        Why the last attempt to commit failed; "" if it did not.
    """

    def __init__(
        self,
        shard: int,
        group: Group,
        epoch: int,
        successor: Endpoint | None,
        state: ShardState,
        persistence: Persistence,
        transport: Transport,
        notify: Callable[[], None],
        tasks: Tasks,
    ) -> None:
        self.epoch = epoch
        self.successor = successor
        self.visible = state
        self.index = state.index
        self.failure = ""
        self._shard = shard
        self._group = group
        self._newest = state
        self._persistence = persistence
        self._reach = Reach(group, transport)
        self._notify = notify
        self._log: deque[tuple[int, Operation]] = deque()
        self._copied: list[int] = []  # indices of the states that newcomers are being given
        self._calls: set[asyncio.Timeout] = set()
        self._pending = asyncio.Event()
        self._task = tasks.start(self._commit_forever())

    @property
    def in_flight(self) -> int:
        """How many operations are applied, but not committed."""
        return self._newest.index - self.index

    async def close(self) -> None:
        """Commit nothing more."""
        self._task.cancel()
        self.interrupt()

    def add(self, state: ShardState, op: Operation) -> None:
        """Have an operation committed that was applied, which made this state."""
        self._newest = state
        self._log.append((state.index, op))
        if self._is_immediate:
            self.set_committed(state)
        else:
            self._pending.set()

    def configure(self, epoch: int, successor: Endpoint | None) -> None:
        """Go on in another epoch, with whoever comes after this replica then."""
        self.epoch, self.successor = epoch, successor
        if self._is_immediate:
            self.set_committed(self._newest)
        self._pending.set()

    def interrupt(self) -> None:
        """Give up what waits for another process: it may never answer."""
        for scope in self._calls:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())

    async def until_interrupted(self, work: Awaitable[T]) -> T:
        """Wait for another process; raises `StaleEpoch` when this replica enters an epoch."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._calls.add(scope)
                return await work
        except TimeoutError:
            if not scope.expired():
                raise
            raise StaleEpoch(f"shard {self._shard} is leaving epoch {self.epoch}") from None
        finally:
            self._calls.discard(scope)

    @contextmanager
    def keeping_later_than(self, state: ShardState) -> Iterator[None]:
        """Keep what is applied after `state`, for a newcomer that is being given it."""
        self._copied.append(state.index)
        try:
            yield
        finally:
            self._copied.remove(state.index)
            self._trim()

    async def pass_on(self, successor: Endpoint, after: int, committed: int = -1) -> None:
        """Have the successor acknowledge all operations later than index `after`.

        A newcomer is told which are committed; the others it has then, but has not committed.
        """
        later = tuple(op for index, op in self._log if index > after)
        if later:
            request = Replicate(self._shard, self.epoch, after + 1, later, committed)
            deadline = self._group.timings.call
            await self._reach.ask(successor, request, deadline, "replicate")

    @property
    def _is_immediate(self) -> bool:
        return self.successor is None and self._persistence.immediate

    async def _commit_forever(self) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            while self.in_flight:
                try:
                    await self.until_interrupted(self._commit())
                    self.failure = ""
                except (DpsError, OSError) as error:
                    self.failure = str(error)
                    # The successor or the store does not answer. Nothing is acked meanwhile; the
                    # coordinator changes the chain or the stores, or they come back.
                    await asyncio.sleep(self._group.timings.retry)

    async def _commit(self) -> None:
        state, epoch, successor = self._newest, self.epoch, self.successor
        if successor is not None:
            await self.pass_on(successor, self.index)
        else:
            await self._persistence.commit(epoch, state)
        if (epoch, successor) == (self.epoch, self.successor):
            self.set_committed(state)
            self._notify()

    def set_committed(self, state: ShardState) -> None:
        """Take note that everything in a state is committed."""
        if state.index > self.index:
            self.index = state.index
            self.visible = state
        self._trim()

    def _trim(self) -> None:
        needed_after = min([self.index, *self._copied])
        while self._log and self._log[0][0] <= needed_after:
            self._log.popleft()
