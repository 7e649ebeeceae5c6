"""What every filter must do: bring all of a gradient to the shards once, whatever is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dps
from dps.core.blocks import Layout
from dps.core.consistency import ASP
from dps.core.filters.chain import checked
from dps.core.filters.filter import Filter
from dps.core.outage import Continue, Outage, Wait
from dps.core.rules.rule import UpdateRule
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.group import Group
from dps.protocol.recovery import Recovery
from dps.protocol.storage.manifest import describe
from dps.protocol.transport import Endpoint
from dps.protocol.wire import decode, encode
from tests.support.worlds import Setting, in_world

RANDOM = np.random.default_rng(3)
PARAMS = {"w": np.zeros((40, 10), np.float32), "b": np.zeros(30)}
FILTERS: dict[str, list[Filter]] = {
    "significantly modified": [dps.SignificantlyModified(90.0, decay="1/t")],
    "KKT": [dps.KKT(60.0)],
    "random skip": [dps.RandomSkip(0.7)],
    "top-k": [dps.TopK(0.05)],
    "bf16": [dps.Quantise("bf16")],
    "int8": [dps.Quantise("int8")],
    "lossless": [dps.Lossless()],
    "all at once": [
        dps.RandomSkip(0.2),
        dps.SignificantlyModified(2.0),
        dps.TopK(0.5),
        dps.Quantise("bf16"),
        dps.Lossless(),
    ],
}
# Those that drop nothing for good, and go with any rule.
KEEPING = {name: filters for name, filters in FILTERS.items() if name != "KKT"}
RECOVERIES: dict[str, tuple[Any, Outage]] = {
    "chain": (Chain(2), Wait()),
    "chain + continue": (Chain(2), Continue(buffer="worker")),
    "shared store": (SharedStore(), Wait()),
    "stateless": (SharedStore(), Continue()),
    "checkpoint": (Checkpoint(1, "sync"), Wait()),
    "checkpoint, all": (Checkpoint(1, "sync", scope="all"), Wait()),
}
PUSHES = 6


def whole(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Whole numbers up to 127, that one among every 1,024: all filters can write them exactly."""
    numbers = RANDOM.integers(-127, 128, shape).astype(dtype)
    numbers.reshape(-1)[::7] = 127
    return numbers


GRADIENTS = [{n: whole(p.shape, p.dtype) for n, p in PARAMS.items()} for _ in range(PUSHES)]


def rule_for(filters: list[Filter]) -> UpdateRule:
    needs_l1 = any(isinstance(f, dps.KKT) for f in filters)
    return dps.Proximal(0.5, dps.L1(60.0)) if needs_l1 else dps.SGD(1.0)


def unfiltered(rule: UpdateRule) -> dict[str, np.ndarray]:
    """What one worker's gradients come to, applied one after the other."""
    found = dict(PARAMS)
    for step, gradients in enumerate(GRADIENTS, 1):
        for name, gradient in gradients.items():
            found[name], _ = rule.step(found[name], gradient, {}, step, 1.0)
    return found


def test_every_filter_that_can_be_imported_is_here() -> None:
    kinds = {type(f) for filters in FILTERS.values() for f in filters}
    public = {getattr(dps, name) for name in dps.__all__ if name not in ("ParameterServer",)}
    selections = {c for c in public if hasattr(c, "selected")} - {dps.Selection}
    assert selections | {dps.Quantise, dps.Lossless} == kinds


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("recovery", RECOVERIES.values(), ids=RECOVERIES)
def test_a_worker_that_leaves_in_order_has_sent_everything_once(
    filters: list[Filter], recovery: tuple[Any, Outage], tmp_path: Path
) -> None:
    """A server is lost in between; nothing is missing or there twice, and replicas are equal."""
    durability, outage = recovery
    if isinstance(durability, Checkpoint):
        durability = Checkpoint(1, "sync", str(tmp_path), scope=durability.scope)
    rule = rule_for(filters)
    if isinstance(rule, dps.Proximal) and isinstance(outage, Continue):
        outage = Wait()  # the sum of proximal steps is not one step with the sum

    async def scenario(s: Setting) -> dict[str, np.ndarray]:
        process, client = await s.enter("a")
        await process.run(client.pull())
        before = [view.epoch for view in (await s.world.complete()).views]
        for number, gradients in enumerate(GRADIENTS):
            if number == 3:
                s.world.crash("server-0", back_after=0.3)
            await process.run(client.push(gradients, pull=True))
        await process.run(client.leave("finished"))
        table = await s.world.complete()
        assert [view.epoch for view in table.views] > before
        assert client.filtered.residual_norm == 0
        for view in table.views:
            head, *others = s.world.states(view)
            assert all(other.values.tobytes() == head.values.tobytes() for other in others)
            assert head.version == sum(p.applied for p in head.workers.values())
        states = [s.world.states(view)[0] for view in table.views]
        return s.world.group.layout.scatter({i: state.values for i, state in enumerate(states)})

    found = in_world(
        scenario,
        params=PARAMS,
        rule=rule,
        recovery=Recovery(durability, outage),
        filters={"*": filters},
    )
    expected = unfiltered(rule)
    for name in PARAMS:
        assert found[name].tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("filters", KEEPING.values(), ids=KEEPING)
def test_a_worker_that_fails_takes_with_it_what_it_withheld_and_no_more(
    filters: list[Filter],
) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        for gradients in GRADIENTS:
            await process.run(client.push(gradients))
        withheld = [client.withheld(shard) for shard in range(2)]
        norm = client.filtered.residual_norm
        await process.run(client.leave("failed"))
        assert client.filtered.residual_norm == norm
        states = await s.states()
        found = s.world.group.layout.scatter({i: x.values for i, x in enumerate(states)})
        lost = sum(float(np.sum(r)) for of_shard in withheld for r in of_shard.values())
        total = sum(float(g.sum()) for gradients in GRADIENTS for g in gradients.values())
        assert -sum(float(w.sum()) for w in found.values()) == total - lost
        assert (norm == 0) == (not any(withheld))

    in_world(scenario, params=PARAMS, rule=dps.SGD(1.0), filters={"*": filters})


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_filters_are_described_beside_checkpoints(filters: list[Filter]) -> None:
    rule = rule_for(filters)
    layout = Layout.of(PARAMS, 2)
    chains = checked({"w": filters}, layout.names, rule)
    recovery = Recovery(Checkpoint(path="memory://filters"))
    group = Group("g", layout, rule, ASP(), recovery, Endpoint("", ""), filters=chains)
    run = describe(group, 0, 1.0, "{}")
    assert decode(encode(run)) == run
    assert run.filters == chains


def test_descriptions_that_were_kept_before_there_were_filters_are_read() -> None:
    group = Group("g", Layout.of(PARAMS, 2), dps.SGD(1.0), ASP(), Recovery(), Endpoint("", ""))
    (header,) = encode(replace(describe(group, 0, 1.0, "{}"), recovery=None))  # type: ignore[arg-type]
    kept = json.loads(header.tobytes())
    later = [kept["v"].pop(), kept["v"].pop()]  # `servers` came after the filters
    assert later == [None, {"%": []}]
    found = decode([np.frombuffer(json.dumps(kept).encode(), np.uint8)])
    assert found.filters == {}
