"""How every shard is written to its checkpoint at a moment that somebody chooses."""

from __future__ import annotations

import asyncio

from dps.errors import (
    DeadlineExceeded,
    NotServing,
    ShardUnavailable,
    StaleEpoch,
    TransportError,
)
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Save, View
from dps.protocol.transport import Transport


async def save_all(
    group: Group, router: Router, transport: Transport, limit: float
) -> tuple[int, ...]:
    """Have every shard written; return the version of each that is in its checkpoint at least.

    Raises
    ------
    StoreUnavailable
        A checkpoint could not be written.
    ShardUnavailable
        A shard was not served for `limit` seconds.
    DeadlineExceeded
        The coordinator did not answer for so long.
    """
    until = asyncio.get_running_loop().time() + limit

    async def known(shard: int) -> View:
        try:
            async with asyncio.timeout(limit):
                return (await router.fetch()).views[shard]  # also when the group is closed
        except TimeoutError:
            reason = f"checkpoint: the coordinator did not answer for {limit:g} s"
            raise DeadlineExceeded(reason) from None

    async def save(shard: int) -> int:
        while True:
            view = await known(shard)
            try:
                if view.serving:
                    request = Save(shard, view.epoch)
                    deadline = group.timings.copy
                    reply = await transport.call(view.chain[-1], request, deadline, "control")
                    return int(reply.version)
            except (TransportError, NotServing, StaleEpoch):
                router.report(view.chain[-1])
            if asyncio.get_running_loop().time() >= until:
                raise ShardUnavailable(f"checkpoint: shard {shard} was not served for {limit:g} s")
            await asyncio.sleep(group.timings.retry)

    return tuple(await asyncio.gather(*(save(s) for s in range(len(group.layout.shards)))))
