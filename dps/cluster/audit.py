"""Owns reading a group from outside: the weights, and the numbers of its shards' states."""

from __future__ import annotations

import asyncio

import numpy as np

from dps.errors import DpsError
from dps.protocol.client import Client
from dps.protocol.group import Group
from dps.protocol.messages import Audit, AuditReply
from dps.protocol.router import Router
from dps.protocol.transport import Transport


async def audit(
    shard: int, router: Router, transport: Transport, deadline: float
) -> AuditReply | None:
    """Return the numbers of a shard's state, None if it does not answer."""
    try:
        view = await router.view(shard)
        if not view.serving:
            return None
        async with asyncio.timeout(None) as scope:
            head = view.chain[0]
            with router.while_asked(view, head, scope):
                request = Audit(shard, view.epoch)
                reply: AuditReply = await transport.call(head, request, deadline)
    except (DpsError, TimeoutError):
        return None
    return reply


async def audit_all(group: Group, router: Router, transport: Transport) -> list[AuditReply | None]:
    """Return the numbers of each shard's state, None for one that does not answer."""
    shards = range(len(group.layout.shards))
    asked = (audit(shard, router, transport, group.timings.call) for shard in shards)
    return list(await asyncio.gather(*asked))


async def pull_all(group: Group, transport: Transport) -> dict[str, np.ndarray]:
    """Return the current weights as fresh arrays."""
    reader = Client(group, transport)
    try:
        await reader.pull()
        return {name: array.copy() for name, array in reader.weights().items()}
    finally:
        await reader.close()
