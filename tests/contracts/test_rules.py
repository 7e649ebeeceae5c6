"""What every update rule must do: come back from files, and stand the loss of a server exactly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dps
from dps.cluster.driver.setup import afresh
from dps.core.blocks import Block, Layout
from dps.core.consistency import ASP
from dps.core.rules.rule import UpdateRule, by_rows
from dps.core.shard import ShardState, apply, initial_state
from dps.core.updates import Operation, UpdateId
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.group import Group
from dps.protocol.recovery import Recovery
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.protocol.storage.manifest import describe, find_saved, write_run
from dps.protocol.timings import Timings
from dps.protocol.transport import Endpoint
from dps.protocol.wire import decode
from tests.support.builders import same_state
from tests.support.worlds import Setting, in_world

RULES: list[UpdateRule] = [
    dps.SGD(0.5),
    dps.Momentum(0.1),
    dps.AdaGrad(0.5),
    dps.Adam(0.1),
    dps.FTRL(0.5, beta=0.1, l1=0.2, l2=0.1),
    dps.Proximal(0.1, dps.L1(0.3)),
    dps.Proximal(0.1, dps.L2(0.3)),
    dps.Proximal(0.1, dps.ElasticNet(0.3, 0.1)),
    dps.Proximal(0.1, dps.GroupL1(0.3)),
    dps.DelayedProximal(2.0, 1.0, 4, dps.L1(0.1)),
    dps.StalenessAware(dps.Adam(0.1)),
    dps.StalenessAware(dps.Proximal(0.1, dps.GroupL1(0.3))),
    dps.DelayCompensated(dps.StalenessAware(dps.Momentum(0.1)), 0.5),
]
RANDOM = np.random.default_rng(2)
PARAMS = {
    "w": RANDOM.standard_normal((7, 5)).astype(np.float32),
    "b": RANDOM.standard_normal(6),
}
PUSHES = [
    {name: RANDOM.standard_normal(p.shape).astype(p.dtype) for name, p in PARAMS.items()}
    for _ in range(8)
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def gradient(layout: Layout, shard: int, seq: int) -> Operation:
    buffer, pieces = layout.gather(shard, PUSHES[seq - 1])
    number = UpdateId("a", 1, seq)
    return Operation("gradient", number, seq - 1, pieces=pieces, gradient=buffer)


def trained(layout: Layout, rule: UpdateRule, shard: int, steps: int) -> ShardState:
    state = initial_state(layout.gather(shard, PARAMS)[0].copy(), rule)
    for seq in range(1, steps + 1):
        state = apply(layout.shards[shard], rule, state, gradient(layout, shard, seq)).state
    return state


async def epochs(s: Setting) -> list[int]:
    return [view.epoch for view in (await s.world.complete()).views]


def test_every_rule_and_penalty_that_can_be_imported_is_here() -> None:
    public = [getattr(dps, name) for name in dps.__all__ if name not in ("ParameterServer",)]
    made = {type(rule) for rule in RULES} | {type(getattr(rule, "penalty", rule)) for rule in RULES}
    found = {c for c in public if hasattr(c, "step") or hasattr(c, "shrink")}
    assert found - {dps.UpdateRule, dps.Penalty} == made


@every_rule
def test_rows_stay_whole_for_the_rules_that_need_them(rule: UpdateRule) -> None:
    client: Any = SimpleNamespace(scheduler=SimpleNamespace(address="tcp://127.0.0.1:1"))
    group = afresh(client, PARAMS, 2, rule, ASP(), "none", Timings(), {}).group
    assert group.layout == Layout.of(PARAMS, 2, whole_rows="GroupL1" in str(rule))


@every_rule
def test_a_rule_and_its_state_go_on_from_files_as_if_nothing_had_been(
    rule: UpdateRule, tmp_path: Path
) -> None:
    path = str(tmp_path)
    layout = Layout.of(PARAMS, 2, whole_rows=by_rows(rule))
    group = Group("g", layout, rule, ASP(), Recovery(Checkpoint(path=path)), Endpoint("", ""))
    run = describe(group, 0, 1.0, "{}")
    write_run(run)
    for shard in range(2):
        CheckpointFiles(f"{path}/g", shard, 1).write(1, trained(layout, rule, shard, 5))
    saved = find_saved(path)
    assert saved.run == run
    for shard, state in enumerate(saved.states):
        for seq in (6, 7, 8):
            op = gradient(saved.run.layout, shard, seq)
            state = apply(saved.run.layout.shards[shard], saved.run.rule, state, op).state
        assert same_state(state, trained(layout, rule, shard, 8))


def test_blocks_that_were_kept_before_they_told_of_rows_are_read() -> None:
    kept = b'{"@":"Block","v":["w",0,5,"float32"]}'
    assert decode([np.frombuffer(kept, np.uint8)]) == Block("w", 0, 5, "float32", 0)


@pytest.mark.slow
@every_rule
@pytest.mark.parametrize(
    "durability", [Chain(2), SharedStore(), Checkpoint(1, "sync")], ids=lambda d: type(d).__name__
)
def test_the_loss_of_a_server_changes_no_bit(
    rule: UpdateRule, durability: Any, tmp_path: Path
) -> None:
    if isinstance(durability, Checkpoint):
        durability = Checkpoint(1, "sync", str(tmp_path))

    async def scenario(s: Setting) -> dict[str, np.ndarray]:
        before = await epochs(s)
        process, client = await s.enter("a")
        for number, push in enumerate(PUSHES):
            if number == 4:
                s.world.crash("server-0", back_after=0.5)
            await process.run(client.push(push, pull=True))
            await asyncio.sleep(0.1)
        assert await epochs(s) > before
        layout = s.world.group.layout
        return layout.scatter({i: state.values for i, state in enumerate(await s.states())})

    found = in_world(scenario, params=PARAMS, rule=rule, recovery=Recovery(durability))
    layout = Layout.of(PARAMS, 2, whole_rows=by_rows(rule))
    expected = layout.scatter({i: trained(layout, rule, i, 8).values for i in range(2)})
    for name in PARAMS:
        assert found[name].tobytes() == expected[name].tobytes()
