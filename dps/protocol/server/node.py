"""A server node: the state that its parts share, and its requests to other nodes.

A network can be cut between any two processes, so the coordinator may reach a node that another one
cannot. A node that was unreachable for longer than a lease is reported, and left out if possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dps.core.shard import Each, in_turn
from dps.errors import DpsError, TransportError
from dps.events import Sink
from dps.protocol.group import Group
from dps.protocol.messages import LookUp, ReportLink
from dps.protocol.transport import Clock, Endpoint, Transport, Watched

LOOKS = 4  # probes per lease of a store that takes long


@dataclass(frozen=True, slots=True)
class ServerNode:
    """The node that a server runs on, with what it runs by. Used from one event loop."""

    group: Group
    name: str
    me: Endpoint  # at which the server is called
    transport: Transport
    clock: Clock
    emit: Sink
    each: Each = in_turn  # runs the chunks of a step of the update rule
    watched: Callable[[], Watched | None] = lambda: None  # as the monitor of this host knows it
    # Unreachable nodes, by shard: since when, and when that was last tried.
    _missed: dict[tuple[int, Endpoint], tuple[float, float]] = field(default_factory=dict)

    async def ask(self, to: Endpoint, request: Any, deadline: float, link: str) -> Any:
        """Send a request of a shard to another node; raises as `Transport.call` does."""
        try:
            reply = await self.transport.call(to, request, deadline, link)
        except TransportError:
            await self._miss(to, request)
            raise
        except DpsError:
            self._missed.pop((request.shard, to), None)  # it has answered
            raise
        self._missed.pop((request.shard, to), None)
        return reply

    async def ask_store(self, store: Endpoint, request: Any, deadline: float) -> Any:
        """Send a request to a store, and probe the store regularly while that takes long."""
        pause = self.group.timings.lease / LOOKS
        asking = asyncio.ensure_future(self.ask(store, request, deadline, "store"))
        try:
            while not (await asyncio.wait([asking], timeout=pause))[0]:
                with suppress(DpsError):
                    await self.ask(store, LookUp(request.shard, request.epoch), pause, "store")
        finally:
            asking.cancel()
        return asking.result()

    async def _miss(self, to: Endpoint, request: Any) -> None:
        timings, link = self.group.timings, (request.shard, to)
        now = asyncio.get_running_loop().time()
        since, last = self._missed.get(link, (now, now))
        if now - last > timings.lease + timings.call:
            since = now  # the last attempt was long ago
        self._missed[link] = since, now
        if now - since > timings.lease:
            self._missed[link] = now, now
            report = ReportLink(request.shard, request.epoch, to, now - since)
            with suppress(DpsError):
                await self.transport.call(self.group.coordinator, report, timings.call)
