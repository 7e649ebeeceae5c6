"""Calls of a coordinator that is late: they must not keep it from catching up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from distributed.core import ConnectionPool, Server

from dps.cluster.transport import calls as module
from dps.cluster.transport.calls import (
    COORDINATOR_PREFIX,
    ClusterTransport,
    Meter,
    answer,
    frozen,
    thawed,
)
from dps.errors import DeadlineExceeded
from dps.protocol.messages import Flush
from dps.protocol.transport import Endpoint

KEY = f"{COORDINATOR_PREFIX}late"
SECONDS = 10.0


class Late:
    """A coordinator that answers only while it has time."""

    def __init__(self) -> None:
        self.has_time = asyncio.Event()
        self.connections: set[Any] = set()
        self.asked = 0

    async def handle(self, comm: Any, link: str, frames: list[bytes]) -> list[bytes]:
        self.connections.add(comm)
        self.asked += 1
        await self.has_time.wait()
        return frozen(await answer(self._reply_to, Meter(), link, thawed(frames)))

    async def _reply_to(self, message: Any) -> Any:
        return message


@asynccontextmanager
async def line() -> AsyncIterator[tuple[Late, Callable[[float], Awaitable[Any]]]]:
    """A late coordinator, and how to call it."""
    late = Late()
    async with Server({KEY: late.handle}) as server, ConnectionPool() as pool:
        await server.listen("tcp://127.0.0.1")
        transport, to = ClusterTransport(pool, Meter()), Endpoint(server.address, KEY)
        try:
            yield late, lambda deadline: transport.call(to, Flush(), deadline)
        finally:
            late.has_time.set()


async def give_up(call: Callable[[float], Awaitable[Any]]) -> None:
    with pytest.raises(DeadlineExceeded):
        await call(0.05)


def test_calls_that_are_given_up_neither_pile_up_nor_cost_connections() -> None:
    async def scenario() -> None:
        async with line() as (late, call):
            for _ in range(10):
                await give_up(call)
            assert (len(late.connections), late.asked) == (1, 1)
            late.has_time.set()
            assert await call(SECONDS) == Flush()
            assert (len(late.connections), late.asked) == (1, 2)

    asyncio.run(scenario())


def test_a_connection_on_which_no_reply_ever_comes_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LATE_SECONDS", 0.1)

    async def scenario() -> None:
        async with line() as (late, call):
            await give_up(call)
            waiting = asyncio.ensure_future(call(SECONDS))
            while late.asked < 2:
                await asyncio.sleep(0.001)
            late.has_time.set()
            assert await waiting == Flush()
            assert len(late.connections) == 2

    asyncio.run(scenario())
