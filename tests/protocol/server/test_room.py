"""Room for operations under way: no more than was promised, and none is held for nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dps.core.updates import Operation, UpdateId
from dps.errors import NonFiniteGradient
from dps.protocol.messages import Push, Pushed
from dps.recovery.chain import Chain
from dps.recovery.durability import Persistence
from dps.recovery.strategy import Recovery
from tests.protocol.coordinator.test_liveness import view_of
from tests.support.worlds import Setting, in_world, until


def test_what_is_refused_leaves_its_room_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Persistence, "window", 1)

    async def scenario(s: Setting) -> None:
        view = await view_of(s)
        head, tail = (s.world.hosts[member.address].replica(0) for member in view.chain)

        def push(worker: str, value: float) -> asyncio.Task[Any]:
            gradient, pieces = s.world.group.layout.gather(0, {"w": np.full(40, value)})
            op = Operation("gradient", UpdateId(worker, 1, 1), pieces=pieces, gradient=gradient)
            request = Push(0, view.epoch, op, pull=False, patience=5.0)
            return asyncio.create_task(s.ask(view.chain[0], request, 10.0))

        async with tail.lock:  # so that nothing is committed
            first = push("a", 1.0)
            await until(lambda: head.uncommitted)
            refused = push("b", np.nan)
            await until(lambda: len(head._waiting_for_room) == 1)
            last = push("c", 1.0)
            await until(lambda: len(head._waiting_for_room) == 2)
        async with asyncio.timeout(0.5):
            assert isinstance(await first, Pushed)
            with pytest.raises(NonFiniteGradient):
                await refused
            assert isinstance(await last, Pushed)
        assert head.state.version == 2

    in_world(scenario, recovery=Recovery(Chain(2)), shards=1)
