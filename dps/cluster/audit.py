"""Owns asking a shard for the numbers of its state, without waiting for a server that is gone."""

from __future__ import annotations

import asyncio

from dps.errors import DpsError
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
