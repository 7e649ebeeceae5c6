"""What is done to the messages of one process: what a full store refuses, and what it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dps.cluster.transport.links import Closed, Full, Late, Links
from dps.core.shard import ShardState
from dps.core.updates import Operation, UpdateId
from dps.errors import StoreUnavailable
from dps.protocol import wire
from dps.protocol.messages import Deposit, GetState, PutSince, PutState, TakeMail

STATE = ShardState(2, 2, 2, np.zeros(8, np.uint8), {})
UPDATE = Operation("gradient", UpdateId("worker-0", 1, 1), gradient=np.zeros(8, np.uint8))


async def asked(links: Links, message: Any) -> Any:
    """What a process with these links replies; it would reply "done"."""

    async def answer(request: wire.Frames) -> wire.Frames:
        return wire.encode("done")

    return wire.decode(await links.carry_out(answer, wire.encode(message)))


@pytest.mark.parametrize(
    "message",
    [PutState(0, 1, STATE), PutSince(0, 1, STATE, 1, {}), Deposit(0, 1, UPDATE)],
    ids=lambda message: type(message).__name__,
)
def test_a_full_store_refuses_whatever_it_would_have_to_keep(message: Any) -> None:
    """Also what is only new of a state, as is sent of sparse tables."""

    async def scenario() -> None:
        links = Links()
        links.impose(0, Full(), 600.0)
        with pytest.raises(StoreUnavailable, match=f"{type(message).__name__}: there is no room"):
            await asked(links, message)
        assert links.affected(0) == 1
        links.lift(0)
        assert await asked(links, message) == "done"

    asyncio.run(scenario())


@pytest.mark.parametrize("message", [GetState(0, 1), TakeMail(0, 1)], ids=str)
def test_a_full_store_gives_back_what_it_has(message: Any) -> None:
    async def scenario() -> None:
        links = Links()
        links.impose(0, Full(), 600.0)
        assert await asked(links, message) == "done"
        assert links.affected(0) == 0
        links.lift_all()

    asyncio.run(scenario())


def test_a_process_is_cut_off_where_nothing_that_it_sends_arrives() -> None:
    async def scenario() -> None:
        links = Links()
        for condition, cut_off in (
            *((Closed(("out",)), True), (Closed(), True)),
            *((Closed(("in",)), False), (Late(0.1), False)),
        ):
            links.impose(0, condition, 600.0)
            assert links.cut_off is cut_off
            links.lift(0)
        assert not links.cut_off

    asyncio.run(scenario())
