"""What every durability must do for a shard: begin, commit, restore, and fence earlier servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from dps.core.shard import ShardState
from dps.core.tables.key_routing import Gradients
from dps.core.tables.table import KEYS, SparseSpec
from dps.core.updates import Operation, UpdateId
from dps.errors import DpsError
from dps.events import Restored
from dps.protocol.messages import Push
from dps.protocol.wire import decode, encode
from dps.recovery.durability import Durability
from dps.recovery.strategy import Recovery
from tests.support.worlds import Setting, in_world

ONES = {"w": np.ones(40)}
TABLE = SparseSpec("emb", 2, "float64")
ROWS = {"emb": (np.arange(50), np.ones((50, 2)))}
PUSHES = 12

Scenario = Callable[[Setting], Awaitable[Any]]


class DurabilityContract:
    """The contract of durabilities (`dps.recovery.durability.Durability`).

    Override the fixtures `durability` and `may_lose`, and `source` where a lost shard comes back
    from what the durability keeps. Where it may come back in parts (`restores_in_parts`), blocks
    may lack updates that are there, and have none twice. A simulated group with the durability
    loses servers, some tests with many seeds.
    """

    @pytest.fixture
    def durability(self) -> Durability:
        """The durability that is tested, which works in one process."""
        raise NotImplementedError("override the fixture `durability` to return a durability")

    @pytest.fixture
    def may_lose(self) -> float:
        """How many acked updates of a shard the loss of one server may cost."""
        raise NotImplementedError("override the fixture `may_lose` to return a number of updates")

    @pytest.fixture
    def source(self) -> str | None:
        """What a lost shard comes back from (`Restored.source`); None: a replica goes on."""
        return None

    def test_it_crosses_the_wire(self, durability: Durability) -> None:
        assert decode(encode(durability)) == durability

    def test_a_shard_that_is_lost_before_any_update_comes_back_as_it_was(
        self, durability: Durability
    ) -> None:
        async def scenario(s: Setting) -> None:
            await s.enter("a")
            await s.lose()
            state = (await s.states())[0]
            assert state.version == 0
            assert not state.values.any()

        _carry_out(durability, scenario)

    @pytest.mark.slow
    def test_no_more_is_lost_than_promised_and_nothing_enters_twice(
        self, durability: Durability, may_lose: float
    ) -> None:
        rows = _rows(durability)

        async def scenario(s: Setting) -> None:
            process, client = await s.enter("a")
            for _ in range(s.random.randint(1, PUSHES)):
                await client.push(ONES, pull=s.random.random() < 0.5, rows=rows)
            acked = client._seq
            await s.lose()
            state = (await s.states())[0]
            assert 0 <= acked - state.version <= may_lose
            await s.all_of(process.run(client.push(ONES, rows=rows)), within=10.0)
            after = (await s.states())[0]
            applied = sum(p.applied for p in after.workers.values())
            assert after.version == state.version + 1 == applied
            in_parts = durability.restores_in_parts
            _check_whole(state, rows, in_parts)
            _check_whole(after, rows, in_parts)

        for seed in range(8):
            _carry_out(durability, scenario, seed)

    def test_what_came_back_knows_which_updates_it_holds(self, durability: Durability) -> None:
        rows = _rows(durability)

        async def scenario(s: Setting) -> None:
            _, client = await s.enter("a")
            for _ in range(PUSHES):
                await client.push(ONES, pull=True, rows=rows)
            await asyncio.sleep(1.0)
            await s.lose()
            view = (await s.world.complete()).views[0]
            state = (await s.states())[0]
            for seq in range(1, state.version + 1):
                push = Push(0, view.epoch, _operation(s, seq), False, 0.1)
                assert (await s.ask(view.chain[0], push)).outcome == "duplicate"
            after = (await s.states())[0]
            assert after.version == state.version
            _check_whole(after, rows, durability.restores_in_parts)

        _carry_out(durability, scenario)

    def test_requests_of_the_epoch_before_are_refused(self, durability: Durability) -> None:
        async def scenario(s: Setting) -> None:
            _, client = await s.enter("a")
            await client.push(ONES)
            before = (await s.world.complete()).views[0]
            await s.lose()
            now = (await s.world.complete()).views[0]
            version = (await s.states())[0].version
            with pytest.raises(DpsError, match="shard 0"):
                await s.ask(now.chain[0], Push(0, before.epoch, _operation(s, 99), False, 0.1))
            assert (await s.states())[0].version == version

        _carry_out(durability, scenario)

    def test_where_it_came_back_from_is_recorded(
        self, durability: Durability, source: str | None
    ) -> None:
        async def scenario(s: Setting) -> None:
            _, client = await s.enter("a")
            await client.push(ONES, pull=True)
            await s.lose()
            restored = [e for _, e in s.world.events if isinstance(e, Restored) and e.shard == 0]
            if source is None:
                assert len(restored) == 1, "it was never gone"
            else:
                assert restored[-1].source == source

        _carry_out(durability, scenario)


def _carry_out(durability: Durability, scenario: Scenario, seed: int = 0) -> None:
    tables = [TABLE] if _rows(durability) else []
    in_world(scenario, seed=seed, shards=2, tables=tables, recovery=Recovery(durability))


def _rows(durability: Durability) -> Gradients:
    """What is pushed with the dense gradient, where tables are kept."""
    return ROWS if durability.refusal("tables") is None else {}


def _operation(s: Setting, seq: int) -> Operation:
    size = s.world.group.layout.shards[0].nbytes // 8
    return Operation("gradient", UpdateId("a", 1, seq), gradient=np.ones(size).view("uint8"))


def _check_whole(state: ShardState, rows: Gradients, in_parts: bool) -> None:
    """Each weight and each row counts the updates that are in the state."""
    if in_parts:
        weights = state.values.view("float64")
        assert (weights <= 0).all()
        assert (weights >= -state.version).all()
        return
    assert (state.values.view("float64") == -state.version).all()
    if rows and state.version:
        held = state.tables["emb"].between(0, KEYS, TABLE)
        assert 10 < len(held) < 40
        assert (held.values == -state.version).all()
