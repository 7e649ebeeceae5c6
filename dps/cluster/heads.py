"""Requests to the heads of shards: how far each of them is, for workers, users and observers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from dps.core.functions import CALLS
from dps.errors import DpsError
from dps.observe.views import ShardView
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Audit, AuditReply, Describe, Description, View
from dps.protocol.transport import Endpoint, Transport


class Heads:
    """The heads of a group's shards. Used from the event loop of the transport."""

    def __init__(self, group: Group, router: Router) -> None:
        self._group = group
        self._router = router
        self._shards = range(len(group.layout.shards))

    async def audit(self, shard: int) -> AuditReply | None:
        """Return the numbers of a shard's state, None if it does not answer."""
        reply: AuditReply | None = await self._ask(Audit, shard, self._group.timings.call)
        return reply

    async def audit_all(self) -> list[AuditReply | None]:
        """Return the numbers of each shard's state, None for one that does not answer."""
        return list(await asyncio.gather(*map(self.audit, self._shards)))

    async def describe_all(self, deadline: float) -> list[Description | None]:
        """Return the status of each shard, None for one that does not answer in time."""
        asked = (self._ask(Describe, shard, deadline) for shard in self._shards)
        return list(await asyncio.gather(*asked))

    async def _ask(self, kind: type[Audit | Describe], shard: int, deadline: float) -> Any:
        with suppress(DpsError, TimeoutError):
            view = await self._router.view(shard)
            if not view.serving:
                return None
            request = kind(shard, view.epoch)
            return await self._router.call(view, view.chain[0], request, deadline)
        return None


async def ask_head(
    kind: type[Audit | Describe], view: View, transport: Transport, deadline: float
) -> Any:
    """Return the reply of the head in a view that serves; None if it does not answer."""
    with suppress(DpsError, TimeoutError):
        return await transport.call(view.chain[0], kind(view.shard, view.epoch), deadline)
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
