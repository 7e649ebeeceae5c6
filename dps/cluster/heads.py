"""Requests to the heads of shards: how far each of them is, for workers, users and observers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from dps.core.functions import CALLS
from dps.errors import DpsError
from dps.observe.views import ShardView
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Describe, Description, View
from dps.protocol.transport import Endpoint, Transport


class Heads:
    """The heads of a group's shards. Used from the event loop of the transport."""

    def __init__(self, group: Group, router: Router) -> None:
        self._group = group
        self._router = router
        self._shards = range(len(group.layout.shards))

    async def describe(self, shard: int, deadline: float = math.inf) -> Description | None:
        """Return the status of a shard, None if it does not answer in time."""
        deadline = min(deadline, self._group.timings.call)
        reply: Description | None = None
        with suppress(DpsError, TimeoutError):
            view = await self._router.view(shard)
            if view.serving:
                request = Describe(shard, view.epoch)
                reply = await self._router.call(view, view.chain[0], request, deadline)
        return reply

    async def describe_all(self, deadline: float = math.inf) -> list[Description | None]:
        """Return the status of each shard, None for one that does not answer in time."""
        return list(await asyncio.gather(*(self.describe(s, deadline) for s in self._shards)))


async def ask_head(view: View, transport: Transport, deadline: float) -> Description | None:
    """Return the status of the shard of a view; None if it does not serve, or answer."""
    reply: Description | None = None
    with suppress(DpsError, TimeoutError):
        if view.serving:
            reply = await transport.call(view.chain[0], Describe(view.shard, view.epoch), deadline)
    return reply


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
    nbytes = group.layout.shards[view.shard].nbytes * (1 + len(group.rule.slots))  # at least
    if answer is not None:
        version, nbytes = answer.version, answer.nbytes
        missed = answer.missed / answer.updates if answer.updates else None
    state = version, view.epoch, nbytes, address, group.replicas, rate, missed
    return ShardView(view.shard, head, nodes, *state)


def most(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest count of each worker over the shards, without those of calls."""
    largest: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            if not name.endswith(CALLS):
                largest[name] = max(count, largest.get(name, 0))
    return largest
