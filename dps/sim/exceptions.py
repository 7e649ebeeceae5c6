"""Unforeseen exceptions, raised at a drawn point of a background task of a process."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextlib import AbstractContextManager
from types import coroutine
from typing import Any

from dps.protocol.tasks import Tasks
from dps.sim.patches import Patch, patched
from dps.sim.process import Unforeseen, here


def doomed_tasks() -> AbstractContextManager[None]:
    """Have background tasks raise `Unforeseen` where their process is doomed to it.

    See `dps.sim.process.Process.doomed_in`.
    """
    start = Tasks.start

    def start_doomed(self: Tasks, work: Coroutine[Any, Any, None]) -> Any:
        task = start(self, _run(work))
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
        return task

    return patched(Patch(Tasks, "start", start_doomed))


async def _run(work: Coroutine[Any, Any, None]) -> None:
    await _driven(work)


@coroutine
def _driven(work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
    """Run a coroutine; after any of its waits, it raises if its process is doomed."""
    process = here.get()
    try:
        waits_for = work.send(None)
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001 - handed on, whatever it is
                waits_for = work.throw(error)
                continue
            if process is not None and process.doomed_in:
                process.doomed_in -= 1
                if not process.doomed_in:
                    process.doomed = True
                    waits_for = work.throw(Unforeseen(f"in {work!r}"))
                    continue
            waits_for = work.send(value)
    except StopIteration:
        return
    finally:
        work.close()
