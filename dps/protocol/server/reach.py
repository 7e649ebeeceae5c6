"""Requests of a host to other hosts, which report those that it cannot reach.

A network can be cut between any two processes, so the coordinator may still reach them. A host that
has been unreachable for longer than a lease is reported to it, and left out if possible.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from dps.errors import DpsError, TransportError
from dps.protocol.group import Group
from dps.protocol.messages import LookUp, ReportLink
from dps.protocol.transport import Endpoint, Transport

LOOKS = 4  # probes per lease of a store that takes long


class Reach:
    """The requests of one host to others. Used from one event loop."""

    def __init__(self, group: Group, transport: Transport) -> None:
        self._group = group
        self._transport = transport
        # Unreachable hosts: since when, and when that was last tried.
        self._missed: dict[Endpoint, tuple[float, float]] = {}

    async def ask(self, to: Endpoint, request: Any, deadline: float, link: str) -> Any:
        """Send a request of a shard to another host; raises as `Transport.call` does."""
        try:
            reply = await self._transport.call(to, request, deadline, link)
        except TransportError:
            await self._miss(to, request)
            raise
        except DpsError:
            self._missed.pop(to, None)  # it has answered
            raise
        self._missed.pop(to, None)
        return reply

    async def ask_store(self, store: Endpoint, request: Any, deadline: float) -> Any:
        """Send a request to a store, and probe the store regularly while that takes long."""
        pause = self._group.timings.lease / LOOKS
        asking = asyncio.ensure_future(self.ask(store, request, deadline, "store"))
        try:
            while not (await asyncio.wait([asking], timeout=pause))[0]:
                with suppress(DpsError):
                    await self.ask(store, LookUp(request.shard, request.epoch), pause, "store")
        finally:
            asking.cancel()
        return asking.result()

    async def _miss(self, to: Endpoint, request: Any) -> None:
        timings, now = self._group.timings, asyncio.get_running_loop().time()
        since, last = self._missed.get(to, (now, now))
        if now - last > timings.lease + timings.call:
            since = now  # the last attempt was long ago
        self._missed[to] = since, now
        if now - since > timings.lease:
            self._missed[to] = now, now
            report = ReportLink(request.shard, request.epoch, to, now - since)
            with suppress(DpsError):
                await self._transport.call(self._group.coordinator, report, timings.call)
