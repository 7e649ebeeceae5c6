"""Background tasks that belong to a party of the protocol: none of them ends unnoticed.

A task handles the errors that it foresees. Any other exception reaches the owner, who decides what
follows: a host is fenced and starts over, the coordinator restarts the task, a client raises the
error in its caller.
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
FORGIVEN_SECONDS = 60.0  # a task that has run for so long has not failed again and again
MOST_DOUBLINGS = 8


class Tasks:
    """The background tasks of one owner. Used from one event loop.

    Parameters
    ----------
    on_failure
        Called with the exception of a task that has ended by one.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine beside the rest; its task may be cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(
        self, work: Callable[[], Coroutine[Any, Any, None]], pause: float
    ) -> asyncio.Task[None]:
        """Run a coroutine, again `pause` seconds after it has ended by an exception.

        Where that is repeated the pauses double, so that it holds up nothing else.
        """
        return self.start(self._kept(work, pause))

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _kept(self, work: Callable[[], Coroutine[Any, Any, None]], pause: float) -> None:
        now, failures = asyncio.get_running_loop().time, 0
        while True:
            began = now()
            try:
                await work()
                return
            except Exception as error:  # noqa: BLE001 - the owner is told of it
                self._on_failure(error)
            failures = failures + 1 if now() - began < FORGIVEN_SECONDS else 0
            await asyncio.sleep(pause * 2 ** min(max(failures - 1, 0), MOST_DOUBLINGS))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._on_failure(error)


def internal_error(error: Exception) -> InternalError:
    """Return what is raised in the caller whose background task has ended by an exception."""
    told = InternalError(f"a background task has failed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def task_failed(clock: Clock, node: str, error: Exception) -> TaskFailed:
    """Return the event that records an exception."""
    trace = "".join(traceback.format_exception(error)).splitlines()[-TRACE_LINES:]
    return TaskFailed(clock.now(), node, f"{type(error).__name__}: {error}", "\n".join(trace))
