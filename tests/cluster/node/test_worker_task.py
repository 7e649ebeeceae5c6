"""The task of a worker, without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from dps.cluster.node.worker_task import _Task
from dps.errors import UpdatesDropped
from dps.protocol.timings import Timings


def test_updates_that_are_dropped_while_the_worker_leaves_count() -> None:
    worker = SimpleNamespace(pushed=2, dropped=0)
    task: Any = object.__new__(_Task)

    def begin(request: Coroutine[Any, Any, Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(asyncio.run(request))
        return done

    async def enter() -> Any:
        return worker

    async def end(*_: object) -> None:
        worker.dropped = 2  # the outcomes of pushes that nobody waited for

    async def nothing() -> None: ...

    task._name, task._key = "w-0", "key"
    task._group = SimpleNamespace(name="g", timings=Timings())
    task._member = SimpleNamespace(begin=begin, platform=SimpleNamespace(kills=()))
    task._begin, task._enter, task._end = nothing, enter, end
    with pytest.raises(UpdatesDropped, match="2 of the 2 updates of w-0"):
        task.run(lambda worker: None)
