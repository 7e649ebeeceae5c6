"""Checkpoints that are asked for: what is in them when they are said to be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from dps.errors import GroupClosed, ShardUnavailable
from dps.events import CheckpointWritten
from dps.protocol.client.driver import save_all
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import CloseGroup
from dps.recovery.checkpoint import Checkpoint, CheckpointPersistence
from dps.recovery.strategy import Recovery
from tests.simulator.network import SimTransport
from tests.simulator.world import COORDINATOR
from tests.support.worlds import Setting, happened, in_world

ONES = {"w": np.ones(40)}
_numbers = count()


def rarely(**choices: Any) -> Recovery:
    """Checkpoints that nothing but a wish has written."""
    choices = {"every": 1000, **choices}
    return Recovery(Checkpoint(path=f"memory://saving-now-{next(_numbers)}", **choices))


class Driver:
    """A process that asks for checkpoints, and what it knows."""

    def __init__(self, s: Setting) -> None:
        self._process = s.network.process("asking")
        self._router = Router(s.world.group, SimTransport(s.network, self._process))

    async def save(self, limit: float = 5.0) -> tuple[int, ...]:
        return await self._process.run(save_all(self._router, limit))

    async def hear(self) -> None:
        """Follow the table until that is refused."""

        async def follow() -> None:
            while True:
                await self._router.newer((await self._router.table()).version)

        await self._process.run(follow())


def written(s: Setting, shard: int) -> int:
    return max(e.version for e in happened(s, CheckpointWritten) if e.shard == shard)


def test_a_write_of_an_older_state_that_is_under_way_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slowly(self: CheckpointPersistence, work: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0.5)
        return work(*args)

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        driver = Driver(s)
        await client.push(ONES)
        monkeypatch.setattr(CheckpointPersistence, "_in_thread", slowly)
        first = asyncio.ensure_future(driver.save())
        await asyncio.sleep(0.1)  # it is being written
        await client.push(ONES)
        assert await driver.save() == (2,)
        assert written(s, 0) == 2
        assert await first == (1,)

    in_world(scenario, shards=1, recovery=rarely())


def test_a_group_that_is_closed_is_written_all_the_same() -> None:
    """So are the last updates when the driver goes while workers are at work."""

    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        driver = Driver(s)
        await client.push(ONES)
        await s.ask(COORDINATOR, CloseGroup())
        with pytest.raises(GroupClosed):
            await driver.hear()
        assert await driver.save() == (1, 1)

    in_world(scenario, recovery=rarely())


def test_a_shard_that_is_down_is_waited_for_and_not_for_ever() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        driver = Driver(s)
        await client.push(ONES)
        assert await driver.save() == (1, 1)
        s.world.crash("server-0", back_after=1.0)
        assert await driver.save() == (1, 1)
        s.world.crash("server-1")
        with pytest.raises(ShardUnavailable, match="shard 1 was not served for 2 s"):
            await s.all_of(driver.save(2.0), within=6.0)

    in_world(scenario, recovery=rarely())
