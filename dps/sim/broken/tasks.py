"""Broken variants of supervision: what follows when a background task raises.

Like `dps.sim.broken.protocol`: each says what it leaves out in its docstring.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from dps.protocol.server.shard_server import ShardServer
from dps.protocol.tasks import Tasks, task_failed
from dps.sim.broken import variant as broken
from dps.sim.broken.variant import any_case

instead_of = partial(broken.instead_of, watched=True)


@instead_of(ShardServer, "_fail", "failed host serves on", any_case)
def _only_record(self: ShardServer, error: Exception) -> None:
    """Record that a task of a host has failed, and do nothing about it."""
    self._emit(task_failed(self._clock, self._node, error))


@instead_of(Tasks, "keep", "coordinator's tasks not restarted", any_case)
def _start_once(
    self: Tasks, work: Callable[[], Coroutine[Any, Any, None]], pause: float
) -> asyncio.Task[None]:
    """Let a task end for good that has to run for ever."""
    return self.start(work())
