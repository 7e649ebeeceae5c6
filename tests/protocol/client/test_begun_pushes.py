"""Updates that are pushed without a task: when they are, and how they end."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import dps
from dps.errors import DpsError, NonFiniteGradient
from dps.protocol.client.shard_client import ShardClient
from dps.protocol.server.replica import Replica
from tests.support.worlds import Setting, in_world

ENTRIES = 40
ONES = {"w": np.ones(ENTRIES)}
ZEROS = {"w": np.zeros(ENTRIES)}


def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the shard of each update that is pushed without a task."""
    found: list[int] = []
    begin = ShardClient.begin_push

    def note(self: ShardClient, *args: Any) -> bool:
        has_begun = begin(self, *args)
        if has_begun:
            found.append(self._shard)
        return has_begun

    monkeypatch.setattr(ShardClient, "begin_push", note)
    return found


def test_small_updates_are_pushed_without_a_task_and_applied_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = begun(monkeypatch)

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        with patch.object(Replica, "push", side_effect=AssertionError):
            for number in range(1, 4):
                assert await process.run(client.push(ONES, pull=True)) == number
                assert (client.weights()["w"] == -number).all()
        assert client._under_way == 0

    in_world(scenario, shards=2, params=ZEROS)
    assert shards == [0, 1] * 3


@pytest.mark.parametrize(
    "choices",
    [
        {"filters": {"*": [dps.TopK(0.5)]}},
        {"pull_filters": {"*": [dps.SignificantlyModified(0.0)]}},
        {"consistency": dps.SSP(1)},
        {"params": {"w": np.zeros(4000)}},
    ],
    ids=str,
)
def test_what_may_have_to_wait_has_a_task(
    monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    shards = begun(monkeypatch)

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        size = client.group.layout.names["w"].size
        await process.run(client.push({"w": np.ones(size)}, pull=True))

    in_world(scenario, **{"params": ZEROS, **choices})
    assert shards == []


def test_an_update_of_nothing_ends() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        async with asyncio.timeout(5.0):
            assert await process.run(client.push({})) == 1
            assert await process.run(client.push(ONES)) == 2

    in_world(scenario, shards=2, params=ZEROS)


def test_a_gradient_that_a_shard_refuses_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = begun(monkeypatch)

    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        with (
            patch.object(ShardClient, "_push", side_effect=AssertionError),
            pytest.raises(NonFiniteGradient),
        ):
            await process.run(client.push({"w": np.full(ENTRIES, np.nan)}))
        assert await process.run(client.push(ONES)) == 2

    in_world(scenario, shards=1, params=ZEROS)
    assert shards == [0, 0]


def test_an_update_of_a_lost_server_is_sent_again() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        pushing = process.run(client.push(ONES, pull=True))
        s.world.crash("server-0")
        assert await pushing == 1
        assert (client.weights()["w"] == -1).all()

    in_world(scenario, shards=1, params=ZEROS, recovery=dps.Recovery(dps.Chain(2)))


def test_an_update_ends_with_the_client() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        s.world.crash("server-0")
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(0.5)  # virtual time, in which it is sent again and again
        await process.run(client.close())
        with pytest.raises(DpsError, match="was closed"):
            await pushing

    in_world(scenario, shards=1, params=ZEROS)


def test_a_caller_that_is_cancelled_harms_nobody() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        pushing = process.run(client.push(ONES))
        await asyncio.sleep(0)
        pushing.cancel()
        await asyncio.sleep(1.0)  # virtual time
        assert await process.run(client.push(ONES)) == 2
        client.may_go_on()

    in_world(scenario, shards=2, params=ZEROS)
