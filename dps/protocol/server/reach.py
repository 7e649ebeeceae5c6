"""What a host asks of those that it depends on, though it may be unable to reach them.

The coordinator may hear them all the while, for a network can be cut between any two processes. So
it is told of one that is out of reach for longer than a lease, and makes do without it if it can.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from dps.errors import DpsError, TransportError
from dps.protocol.group import Group
from dps.protocol.messages import LookUp, ReportLink
from dps.protocol.transport import Endpoint, Transport

LOOKS = 4  # how often in a lease a store is looked at that takes long


class Reach:
    """The requests of one host to others. Used from one event loop."""

    def __init__(self, group: Group, transport: Transport) -> None:
        self._group = group
        self._transport = transport
        # Who could not be reached: since when, and when that was last tried.
        self._missed: dict[Endpoint, tuple[float, float]] = {}

    async def ask(self, to: Endpoint, request: Any, deadline: float, link: str) -> Any:
        """Have another host carry out a request of a shard; raises as `Transport.call` does."""
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
        """Have a store carry out a request, and look at it now and then while that takes long."""
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
            since = now  # nobody has tried for long
        self._missed[to] = since, now
        if now - since > timings.lease:
            self._missed[to] = now, now
            report = ReportLink(request.shard, request.epoch, to, now - since)
            with suppress(DpsError):
                await self._transport.call(self._group.coordinator, report, timings.call)
