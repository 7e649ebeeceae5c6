"""Requests to the heads of shards for their status, for workers, users and observers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from dps.errors import DpsError
from dps.observe.views import ShardView
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Describe, Description, View
from dps.protocol.transport import Endpoint, Transport


async def ask_heads(router: Router, deadline: float = math.inf) -> list[Description | None]:
    """Return the status of each shard, None for one that does not answer in time."""
    deadline = min(deadline, router.group.timings.call)

    async def ask(shard: int) -> Description | None:
        with suppress(DpsError, TimeoutError):
            view = (await router.table()).views[shard]
            if view.serving:
                request = Describe(shard, view.epoch)
                reply: Description = await router.call(view, view.chain[0], request, deadline)
                return reply
        return None

    shards = range(len(router.group.layout.shards))
    return list(await asyncio.gather(*map(ask, shards)))


async def ask_head(view: View, transport: Transport, deadline: float) -> Description | None:
    """Return the status of the shard of a view; None if it is down, or does not answer."""
    with suppress(DpsError, TimeoutError):
        if view.serving:
            request = Describe(view.shard, view.epoch)
            reply: Description = await transport.call(view.chain[0], request, deadline)
            return reply
    return None


def shard_view(
    group: Group,
    view: View,
    answer: Description | None,
    name_of: Callable[[Endpoint], str],
    rate: float | None = None,
) -> ShardView:
    """Return the status of a shard; `name_of` returns the name of a host's node."""
    chain = view.chain if view.serving else ()
    nodes = tuple(map(name_of, chain))
    head, address = (nodes[0], chain[0].address) if chain else ("", "")
    version, missed = None, None
    nbytes = group.layout.shards[view.shard].nbytes * (1 + len(group.rule.slots))  # a lower bound
    if answer is not None:
        version, nbytes = answer.version, answer.nbytes
        missed = answer.missed / answer.updates if answer.updates else None
    state = version, view.epoch, nbytes, address, group.replicas, rate, missed
    return ShardView(view.shard, head, nodes, *state)
