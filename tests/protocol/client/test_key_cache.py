"""Key caching: lists that a node has had are left out, and sent again when it has them no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import numpy as np

import dps
from dps.core.filters.chain import Outbox, checked
from dps.core.filters.encoding import taken_apart
from dps.core.replay import Continue
from dps.core.updates import Operation
from dps.protocol.compression import KeyLists
from dps.protocol.messages import Push
from dps.recovery.chain import Chain
from dps.recovery.strategy import Recovery
from tests.support.builders import Model
from tests.support.worlds import Setting, in_world

SIZE = 4000
SOME = {"*": [dps.SignificantlyModified(0.0)]}  # sends what is not zero
MODEL = Model.of(w=np.zeros(SIZE))


def gradient(first: int) -> np.ndarray:
    found = np.zeros(SIZE)
    found[first : first + 800 : 4] = -1.0
    return found


def operation(first: int = 0, seq: int = 1) -> Operation:
    outbox = Outbox(MODEL.layout, 0, checked(SOME, ["w"], dps.SGD(1.0)))
    return outbox.prepared(MODEL.gradient("a", seq, of={"w": gradient(first)}), None).operation


def sent_lists(s: Setting) -> list[bool]:
    """For each push of a gradient that reaches a host from now on, whether its list is there."""
    found: list[bool] = []

    async def watched(push: Callable[[Push], Awaitable[object]], m: Push) -> object:
        if m.operation.kind == "gradient":
            found.append(all(section.keys.size for section in taken_apart(m.operation)))
        return await push(m)

    for host in s.world.hosts.values():
        host._serving[Push] = partial(watched, host._push)
    return found


def test_only_the_first_of_equal_lists_travels_to_a_node() -> None:
    async def scenario(s: Setting) -> None:
        found = sent_lists(s)
        process, client = await s.enter("a")
        for _ in range(3):
            await process.run(client.push({"w": gradient(0)}, pull=True))
        assert found == [True, False, False]
        for host in s.world.hosts.values():
            host._keys = KeyLists()
        await process.run(client.push({"w": gradient(0)}))
        assert found[3:] == [False, True], "it was asked for, and sent with the same number"
        await process.run(client.push({"w": gradient(0)}))
        (state,) = await s.states()
        assert state.version == 5
        assert (state.values.view("float64") == -5 * gradient(0)).all()
        counts = client.filtered
        one = operation().codec[0]
        assert counts["raw_bytes"] == 5 * 8 * SIZE
        assert counts["sent_bytes"] == 5 * one.value_bytes + 2 * one.key_bytes

    in_world(scenario, params={"w": np.zeros(SIZE)}, shards=1, filters=SOME)


def test_what_is_replicated_or_buffered_carries_its_lists() -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        for _ in range(2):
            await process.run(client.push({"w": gradient(0)}, pull=True))
        s.world.crash("server-0", back_after=0.5)
        s.world.crash("replica-0-1", back_after=0.5)
        for _ in range(3):
            await process.run(client.push({"w": gradient(0)}, pull=True))
            await asyncio.sleep(0.05)
        await process.run(client.leave("finished"))
        (state,) = await s.states()
        found = s.world.states((await s.world.complete()).views[0])
        assert all(x.values.tobytes() == state.values.tobytes() for x in found)
        assert (state.values.view("float64") == -3 * gradient(0)).all(), "all copies were lost"

    recovery = Recovery(Chain(2), Continue())
    in_world(scenario, params={"w": np.zeros(SIZE)}, shards=1, filters=SOME, recovery=recovery)
