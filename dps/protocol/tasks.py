"""Background tasks whose exceptions are never lost.

A task handles the errors that it foresees. Any other exception goes to the owner of the task. A
server records it (`TaskFailed`), drops its shards and starts over, empty. The coordinator records
it, restarts the task, and looks at all shards again. A client raises `InternalError` in its caller.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from dps.errors import InternalError
from dps.events import TaskFailed
from dps.protocol.transport import Clock

TRACE_LINES = 30
FORGIVEN_SECONDS = 60.0  # a task that ran for this long has not failed repeatedly
MAX_DOUBLINGS = 8


class Tasks:
    """Background tasks of one owner, which gets the exceptions. Used from one event loop."""

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in order: virtual runs are repeated

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background; return its task, which may be cancelled."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def keep(
        self, work: Callable[[], Coroutine[Any, Any, None]], pause: float
    ) -> asyncio.Task[None]:
        """Run a coroutine, and rerun it `pause` seconds after an exception has ended it."""
        # The pause doubles with each repeated failure, so that failures do not slow other tasks
        # down.

        async def kept() -> None:
            now, failures, rest = asyncio.get_running_loop().time, 0, 0.0
            while True:
                began = now()
                try:
                    if rest:
                        await asyncio.sleep(rest)
                    await work()
                    return
                except Exception as error:  # noqa: BLE001 - passed to the owner
                    self._on_failure(error)
                failures = failures + 1 if now() - began - rest < FORGIVEN_SECONDS else 0
                rest = pause * 2 ** min(max(failures - 1, 0), MAX_DOUBLINGS)

        return self.start(kept())

    def repeat(self, act: Callable[[], Coroutine[Any, Any, None]], every: float) -> None:
        """Start `act` every `every` seconds; calls may overlap."""

        async def repeated() -> None:
            while True:
                self.start(act())
                await asyncio.sleep(every)

        self.keep(repeated, every)

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._on_failure(error)


def internal_error(error: Exception) -> InternalError:
    """Return the error to raise in the caller whose background task failed."""
    internal = InternalError(f"a background task has failed: {type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal


def task_failed(clock: Clock, node: str, error: Exception) -> TaskFailed:
    """Return the event that records an exception."""
    trace = "".join(traceback.format_exception(error)).splitlines()[-TRACE_LINES:]
    return TaskFailed(clock.now(), node, f"{type(error).__name__}: {error}", "\n".join(trace))
