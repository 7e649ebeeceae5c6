"""Reading a group from outside: weights, rows, and the numbers of its shards' states."""

from __future__ import annotations

import asyncio
from typing import Any

from dps.errors import DpsError
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Audit, AuditReply, Describe, Description
from dps.protocol.transport import Transport


async def audit(
    shard: int, router: Router, transport: Transport, deadline: float
) -> AuditReply | None:
    """Return the numbers of a shard's state, None if it does not answer."""
    reply: AuditReply | None = await _of_head(Audit, shard, router, transport, deadline)
    return reply


async def audit_all(group: Group, router: Router, transport: Transport) -> list[AuditReply | None]:
    """Return the numbers of each shard's state, None for one that does not answer."""
    shards = range(len(group.layout.shards))
    asked = (audit(shard, router, transport, group.timings.call) for shard in shards)
    return list(await asyncio.gather(*asked))


async def describe_all(
    group: Group, router: Router, transport: Transport, deadline: float
) -> list[Description | None]:
    """Return how it stands with each shard, None for one that does not answer in time."""
    shards = range(len(group.layout.shards))
    asked = (_of_head(Describe, shard, router, transport, deadline) for shard in shards)
    return list(await asyncio.gather(*asked))


async def _of_head(
    kind: type[Audit | Describe], shard: int, router: Router, transport: Transport, deadline: float
) -> Any:
    """What the head of a shard replies; None if there is none, or it does not answer."""
    try:
        view = await router.view(shard)
        if not view.serving:
            return None
        return await router.call(view, view.chain[0], kind(shard, view.epoch), deadline)
    except (DpsError, TimeoutError):
        return None
