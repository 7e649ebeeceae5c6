"""Where numerics are run: at once if they are short, else in threads beside the loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Work on fewer bytes than this is quicker than handing it to a thread.
INLINE_BYTES = 1 << 20
# What one step of a rule can use: further cores would wait for the memory.
MOST_CORES = 8
# Items of work that make another core worth its while: a busy machine may keep a thread waiting.
ITEMS_OF_A_CORE = 8


async def offload(work: Callable[[], T], nbytes: int) -> T:
    """Return what `work` returns, which reads and writes about so many bytes, if any."""
    if not nbytes or nbytes < INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


class Cores:
    """The cores that a server's steps may use: the caller's, and a thread for each further one.

    Any thread may call it, several at a time. What work comes to does not depend on the number of
    cores. Threads are started when they are first needed.

    Parameters
    ----------
    count
        How many, 1 or more; None: those that this process may run on, up to `MOST_CORES`.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or min(MOST_CORES, available_cores())
        self._helpers = ThreadPoolExecutor(max(1, self.count - 1), "dps-core")

    def each(self, work: Callable[[T], None], items: Sequence[T]) -> None:
        """Do a piece of work for every item, which do not depend on one another.

        If it fails for some, the error is that of the first of them, as if it had been done in
        turn. Nothing is at work any more when this returns or raises.
        """
        helpers = min(self.count, len(items) // ITEMS_OF_A_CORE) - 1
        if helpers < 1:
            for item in items:
                work(item)
            return
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
            if not other.cancel():  # one that has not begun, because others keep it busy
                other.result()
        if failed:
            raise failed[min(failed)]

    def close(self) -> None:
        """End the threads; nothing may be at work."""
        self._helpers.shutdown(wait=False)


def available_cores() -> int:
    """How many cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # a system without affinities
        return os.cpu_count() or 1
