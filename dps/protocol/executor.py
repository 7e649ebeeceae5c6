"""Where numerics run: at once if they are short, otherwise in threads beside the event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dps.core.shard import in_turn

T = TypeVar("T")

# Work on fewer bytes than this is quicker than handing it to a thread.
INLINE_BYTES = 1 << 20
# In a step of a rule, more cores would only wait for memory.
MAX_CORES = 8
# Fewer items are not worth another core, whose thread a busy machine may keep waiting.
ITEMS_OF_A_CORE = 8


async def offload(work: Callable[[], T], nbytes: int) -> T:
    """Return the result of `work`, which reads and writes about `nbytes`."""
    if not nbytes or nbytes < INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


class Cores:
    """The cores that steps use: the caller's, and a thread for each further one. Thread-safe."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or min(MAX_CORES, available_cores())
        self._helpers = ThreadPoolExecutor(max(1, self.count - 1), "dps-core")

    def each(self, work: Callable[[T], object], items: Sequence[T]) -> None:
        """Call `work` with every item; the items do not depend on one another.

        Raises the error of the first item that fails, as if they had been done in turn. No thread
        is still at work when this returns or raises.
        """
        helpers = min(self.count, len(items) // ITEMS_OF_A_CORE) - 1
        if helpers < 1:
            return in_turn(work, items)
        todo = deque(enumerate(items))
        failed: dict[int, Exception] = {}

        def drain() -> None:
            while not failed:
                try:
                    number, item = todo.popleft()
                except IndexError:
                    return
                try:
                    work(item)
                except Exception as error:  # noqa: BLE001 - raised below
                    failed[number] = error

        others = [self._helpers.submit(drain) for _ in range(helpers)]
        drain()
        for other in others:
            if not other.cancel():  # a busy helper has not begun
                other.result()
        if failed:
            raise failed[min(failed)]

    def close(self) -> None:
        """End the threads; none may be at work."""
        self._helpers.shutdown(wait=False)


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # a system without affinities
        return os.cpu_count() or 1
