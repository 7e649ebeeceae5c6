"""When a shard's state is written to files that no ack waits for, below another durability.

Writes begin as for checkpoints that are promised (`dps.recovery.checkpoint_schedule`). What
differs is that nothing waits for one that is late or fails: it is tried again, beside the updates.
"""

from __future__ import annotations

import asyncio

from dps.core.shard import ShardState
from dps.recovery.checkpoint_schedule import Checkpoints, CheckpointSettings
from dps.recovery.durability import ServerContext

PAUSE_SECONDS = 0.5  # after a write that has failed


class BackgroundCheckpoints(Checkpoints):
    """A shard's state in files, written beside its updates. Used from one event loop."""

    _retry_seconds = PAUSE_SECONDS

    def __init__(self, wanted: CheckpointSettings, context: ServerContext) -> None:
        super().__init__(wanted, context)
        self._writer: asyncio.Task[None] | None = None

    async def has_any(self) -> bool:
        """Whether there is a checkpoint of the shard.

        Raises
        ------
        StoreUnavailable
            The path cannot be read.
        """
        return bool(await self._in_thread(self._files.found))

    def note(self, epoch: int, state: ShardState) -> None:
        """Take note of a state that is acked, and begin to write it when that is due."""
        self._note(epoch, state)
        if epoch <= self._refused:
            return
        self._start_timer()
        if self._is_due and (self._writer is None or self._writer.done()):
            self._writer = self._tasks.start(self._write_while_due())

    def enter(self, epoch: int, state: ShardState | None) -> None:
        """Go on with what another replica has not written; None: leave it to another one."""
        if state is not None:
            self.note(epoch, state)
        else:
            self._forget()

    def _forget(self) -> None:
        for task in (self._timer, self._writer):
            if task is not None:
                task.cancel()
        self._timer = self._writer = self._latest = None
        self._newest = self._complete
        self._unsaved.clear()

    async def close(self) -> None:
        """Start no further write."""
        self._forget()

    @property
    def _is_due(self) -> bool:
        return self._newest - self._complete >= self._due

    async def _write_while_due(self) -> None:
        while self._is_due and await self._write_latest():
            pass
