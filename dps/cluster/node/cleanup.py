"""What a driver that was killed has left on a Dask worker that outlives it.

Its group ends by itself: the coordinator closes it (`dps.cluster.scheduler.plugin`), its actors end
when Dask lets go of them, and its training functions with their next request. Whoever uses the Dask
worker next waits for that, and lifts the faults that were never taken back.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dps.cluster.transport.links import links_of

if TYPE_CHECKING:
    import distributed

PREFIX = "dps-"  # of the key of every task that may run for long
LOOK_SECONDS = 0.5


async def finish_when_let_go(
    dask_worker: distributed.Worker, key: str, finish: Callable[[], Awaitable[None]]
) -> None:
    """Have an actor finish when no client holds its future any more."""
    while key in dask_worker.state.tasks:
        await asyncio.sleep(LOOK_SECONDS)
    await finish()


async def occupied(dask_worker: distributed.Worker) -> bool:
    """Whether anything of dps still runs on a Dask worker."""
    return any(str(key).startswith(PREFIX) for key in dask_worker.state.tasks)


async def tidy(dask_worker: distributed.Worker) -> None:
    """Lift what faults have left: links that are disturbed, and no room for files."""
    links_of(dask_worker).lift_all()
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if room == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
