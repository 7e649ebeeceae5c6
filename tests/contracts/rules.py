"""What every update rule must do: come back from files, and stand the loss of a server exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dps.cluster.driver.setup import Choices, Options, afresh
from dps.core.blocks import Layout
from dps.core.consistency import ASP
from dps.core.rules.rule import UpdateRule, by_rows
from dps.core.shard import ShardState, StateMachine, initial_state
from dps.core.updates import Operation, UpdateId
from dps.protocol.client.encoder import split
from dps.protocol.group import Group
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.durability import Durability
from dps.recovery.manifest import find_saved, write_run
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from tests.simulator.world import run_of
from tests.support.worlds import Setting, in_world, same_state

Array = np.ndarray

RANDOM = np.random.default_rng(2)
PARAMS: Mapping[str, Array] = {
    "w": RANDOM.standard_normal((7, 5)).astype(np.float32),
    "b": RANDOM.standard_normal(6),
}
PUSHES: list[dict[str, Array]] = [
    {name: RANDOM.standard_normal(p.shape).astype(p.dtype) for name, p in PARAMS.items()}
    for _ in range(8)
]


class ShardRuleContract:
    """What holds for any rule of a shard, also where arrays have rules of their own.

    Override the fixture `rule`; with `params`, for several of them.
    """

    @pytest.fixture
    def rule(self) -> UpdateRule:
        """The rule that is tested: a frozen dataclass."""
        raise NotImplementedError("override the fixture `rule` to return the rule to be tested")

    @pytest.fixture(
        params=[Chain(2), SharedStore(), Checkpoint(1, "sync")], ids=lambda d: type(d).__name__
    )
    def durability(self, request: pytest.FixtureRequest, tmp_path: Path) -> Durability:
        """Where state survives the loss of a server."""
        durability: Durability = request.param
        if isinstance(durability, Checkpoint):
            return replace(durability, path=str(tmp_path))
        return durability

    def test_rows_stay_whole_for_the_rules_that_need_them(self, rule: UpdateRule) -> None:
        client: Any = SimpleNamespace(scheduler=SimpleNamespace(address="tcp://127.0.0.1:1"))
        choices = Choices(
            shards=2,
            servers=None,
            tables=(),
            optimizer=rule,
            consistency=ASP(),
            recovery="none",
            filters={},
            pull_filters={},
            placement="balanced",
            about={},
        )
        group = afresh(client, PARAMS, choices, Options()).group
        assert group.layout == Layout.of(PARAMS, 2, whole_rows=by_rows(rule))

    def test_a_rule_and_its_state_go_on_from_files_as_if_nothing_had_been(
        self, rule: UpdateRule, tmp_path: Path
    ) -> None:
        message(type(rule))  # as dps does with those that are registered by entry points
        path = str(tmp_path)
        layout = Layout.of(PARAMS, 2, whole_rows=by_rows(rule))
        group = Group("g", layout, rule, ASP(), Recovery(Checkpoint(path=path)), Endpoint("", ""))
        run = run_of(group, 0, 1.0)
        write_run(run)
        for shard in range(2):
            CheckpointFiles(f"{path}/g", shard, 1).write(1, _trained(layout, rule, shard, 5))
        saved = find_saved(path)
        assert saved.run == run
        for shard, state in enumerate(saved.states):
            for seq in (6, 7, 8):
                state = _after(saved.run.layout, saved.run.rule, shard, state, seq)
            assert same_state(state, _trained(layout, rule, shard, 8))

    def test_the_loss_of_a_server_changes_no_bit(
        self, rule: UpdateRule, durability: Durability
    ) -> None:
        async def scenario(s: Setting) -> dict[str, Array]:
            before = await _epochs(s)
            process, client = await s.enter("a")
            for number, push in enumerate(PUSHES):
                if number == 4:
                    s.world.crash("server-0", back_after=0.5)
                await process.run(client.push(push, pull=True))
                await asyncio.sleep(0.1)
            assert await _epochs(s) > before
            layout = s.world.group.layout
            return layout.scatter({i: state.values for i, state in enumerate(await s.states())})

        found = in_world(scenario, params=PARAMS, rule=rule, recovery=Recovery(durability))
        layout = Layout.of(PARAMS, 2, whole_rows=by_rows(rule))
        expected = layout.scatter({i: _trained(layout, rule, i, 8).values for i in range(2)})
        for name in PARAMS:
            assert found[name].tobytes() == expected[name].tobytes()


class RuleContract(ShardRuleContract):
    """The contract of update rules (`dps.core.rules.rule.UpdateRule`).

    Override the fixture `rule`; with `params`, for several of them.
    """

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_a_step_writes_into_nothing_it_is_given_and_keeps_the_dtype(
        self, rule: UpdateRule, dtype: str
    ) -> None:
        values, gradient = PUSHES[0]["w"].astype(dtype), PUSHES[1]["w"].astype(dtype)
        slots = {name: np.abs(PUSHES[2]["w"]).astype(dtype) for name in rule.slots}
        given = values, gradient, *slots.values()
        for array in given:
            array.flags.writeable = False
        new, state = _step(rule, values, gradient, slots)
        assert (new.dtype, new.shape) == (np.dtype(dtype), values.shape)
        assert state.keys() == set(rule.slots)
        for array in state.values():
            assert (array.dtype, array.shape) == (np.dtype(dtype), values.shape)
        for array in (new, *state.values()):
            assert not any(np.shares_memory(array, old) for old in given)

    def test_equal_steps_are_equal_bit_by_bit_wherever_they_are_put(self, rule: UpdateRule) -> None:
        values, gradient = PARAMS["w"], PUSHES[1]["w"]
        slots = {name: np.abs(PUSHES[2]["w"]) for name in rule.slots}
        first, state = _step(rule, values, gradient, slots)
        out = np.empty_like(first)
        second, again = _step(rule, values, gradient, slots, out)
        assert np.shares_memory(second, out)
        assert first.tobytes() == out.tobytes() == second.tobytes()
        for name in rule.slots:
            assert state[name].tobytes() == again[name].tobytes()

    def test_a_step_may_be_cut_anywhere_between_what_the_rule_has_to_see(
        self, rule: UpdateRule
    ) -> None:
        values, gradient = PARAMS["w"], PUSHES[1]["w"]
        slots = {name: np.abs(PUSHES[2]["w"]) for name in rule.slots}
        whole, state = _step(rule, values, gradient, slots)
        for rows in (slice(0, 3), slice(3, 7)):
            part = {name: array[rows] for name, array in slots.items()}
            new, after = _step(rule, values[rows], gradient[rows], part)
            np.testing.assert_allclose(new, whole[rows], rtol=1e-6, atol=1e-7)
            for name in rule.slots:
                np.testing.assert_allclose(after[name], state[name][rows], rtol=1e-6, atol=1e-7)


def _step(
    rule: UpdateRule,
    values: Array,
    gradient: Array,
    slots: Mapping[str, Array],
    out: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Take the third step, in the form in which the rule sees arrays."""
    if by_rows(rule):
        return rule.step(values, gradient, slots, 3, 0.5, out)
    flat = {name: array.reshape(-1) for name, array in slots.items()}
    given = out.reshape(-1) if out is not None else None
    new, state = rule.step(values.reshape(-1), gradient.reshape(-1), flat, 3, 0.5, given)
    shape = values.shape
    return new.reshape(shape), {name: array.reshape(shape) for name, array in state.items()}


def _after(layout: Layout, rule: UpdateRule, shard: int, state: ShardState, seq: int) -> ShardState:
    """The state after one push of a worker, as it is sent."""
    parts = split(layout, rule, PUSHES[seq - 1])
    if shard not in parts.dense:
        return state
    buffer, pieces = parts.dense[shard]
    number = UpdateId("a", 1, seq)
    op = Operation("gradient", number, seq - 1, pieces=pieces, gradient=buffer)
    return StateMachine(layout.shards[shard], rule).apply(state, op).state


def _trained(layout: Layout, rule: UpdateRule, shard: int, steps: int) -> ShardState:
    state = initial_state(layout.gather(shard, PARAMS)[0].copy(), rule)
    for seq in range(1, steps + 1):
        state = _after(layout, rule, shard, state, seq)
    return state


async def _epochs(s: Setting) -> list[int]:
    return [view.epoch for view in (await s.world.complete()).views]
