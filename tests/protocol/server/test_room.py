"""Room for operations that are under way: whoever waits for it has it as soon as there is some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from dps.core.updates import Operation, UpdateId
from dps.errors import NonFiniteGradient, NotServing
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durability import NoPersistence
from dps.protocol.messages import Push, Pushed
from dps.protocol.recovery import Recovery
from dps.protocol.server.replica import Replica
from tests.protocol.coordinator.test_membership import view_of
from tests.support.worlds import Setting, in_world, until

PATIENCE = 5.0
SOON = 0.5

Ask = Callable[[str, float], asyncio.Task[Any]]
Scenario = Callable[[Replica, Replica, Ask], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def _room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoPersistence, "window", 1)


def of_a_chain(scenario: Scenario) -> None:
    """Run a scenario with the two replicas of a shard, and with what has a worker push."""

    async def run(s: Setting) -> None:
        view = await view_of(s)
        head, tail = (s.world.hosts[member.address].replica(0) for member in view.chain)

        def ask(worker: str, value: float) -> asyncio.Task[Any]:
            gradient, pieces = s.world.group.layout.gather(0, {"w": np.full(40, value)})
            update = UpdateId(worker, 1, 1)
            op = Operation("gradient", update, pieces=pieces, gradient=gradient)
            request = Push(0, view.epoch, op, pull=False, patience=PATIENCE)
            return asyncio.create_task(s.ask(view.chain[0], request, 2 * PATIENCE))

        await scenario(head, tail, ask)

    in_world(run, recovery=Recovery(Chain(2)), shards=1)


def test_what_is_refused_leaves_its_room_to_the_next() -> None:
    async def scenario(head: Replica, tail: Replica, ask: Ask) -> None:
        async with tail.lock:  # so that nothing is committed
            first = ask("a", 1.0)
            await until(lambda: head.uncommitted)
            refused = ask("b", np.nan)
            await until(lambda: len(head._crowd) == 1)
            last = ask("c", 1.0)
            await until(lambda: len(head._crowd) == 2)
        async with asyncio.timeout(SOON):
            assert isinstance(await first, Pushed)
            with pytest.raises(NonFiniteGradient):
                await refused
            assert isinstance(await last, Pushed)
        assert head.state.version == 2

    of_a_chain(scenario)


def test_who_waits_for_room_is_told_that_the_replica_closes() -> None:
    async def scenario(head: Replica, tail: Replica, ask: Ask) -> None:
        async with tail.lock:
            under_way = ask("a", 1.0)
            await until(lambda: head.uncommitted)
            waiting = [ask(worker, 1.0) for worker in ("b", "c")]
            await until(lambda: len(head._crowd) == 2)
            await head.close()
            async with asyncio.timeout(SOON):
                for each in (under_way, *waiting):
                    with pytest.raises(NotServing):
                        await each

    of_a_chain(scenario)


def test_who_gives_up_when_it_is_its_turn_leaves_that_to_the_next() -> None:
    async def scenario(head: Replica, tail: Replica, ask: Ask) -> None:
        loop = asyncio.get_running_loop()
        op = Operation("join", UpdateId("b", 1, 0))
        async with tail.lock:
            ask("a", 1.0)
            await until(lambda: head.uncommitted)
            at = loop.time() + 0.01
            loop.call_at(at, head._commits.set_committed, head.state)  # just before it gives up
            hasty = asyncio.create_task(head._room_for(op, at))
            patient = asyncio.create_task(head._room_for(op, at + PATIENCE))
            assert not await hasty
            async with asyncio.timeout(SOON):
                assert await patient

    of_a_chain(scenario)
