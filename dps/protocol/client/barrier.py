"""Sending an update to all shards while a checkpoint of all of them may be taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any

from dps.protocol.client.routing_table import Router


async def together(
    jobs: Mapping[int, Callable[[], Awaitable[None]]],
    lacking: Collection[int],
    router: Router,
    acked_in: Callable[[int], int],
    refused: Callable[[], bool],
    complete: Callable[[], None],
) -> None:
    """Have something on all shards: send it to those that lack it, and to those that go back.

    Else a shard that had it before all went back would miss what the others get afterwards, and
    no cut could ever be taken. Who has it already refuses it as a duplicate. Once a shard has
    refused it, because the worker has to enter again, there is nothing more to send; nor is there
    when it could not be sent to one of them. What is under way then may be acknowledged yet.

    `complete` is called when nothing is sent again of what has been acknowledged, and with each
    acknowledgement after that.
    """
    missing, all_have_it = set(lacking), asyncio.Event()

    async def is_missing(shard: int) -> bool:
        """Whether it is to be sent to a shard; if not at once, wait whether the shard goes back."""
        while shard not in missing and not all_have_it.is_set():
            table = await router.table()
            if table.views[shard].epoch > acked_in(shard):
                missing.add(shard)
            else:
                await _either(all_have_it.wait(), router.newer(table.version))
        return shard in missing

    async def send(shard: int, job: Callable[[], Awaitable[None]]) -> None:
        while await is_missing(shard):
            try:
                await job()
            except BaseException:
                missing.clear()
                all_have_it.set()  # not all will have it: those that do are not to wait for that
                raise
            missing.discard(shard)
            if refused():
                missing.clear()
            if not missing:  # nothing is sent again: this ack counts, also after a refusal
                all_have_it.set()
                complete()

    if missing:
        await asyncio.gather(*(send(shard, job) for shard, job in jobs.items()))


async def _either(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is done, and give the others up."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
