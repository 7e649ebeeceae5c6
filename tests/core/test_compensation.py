"""Delay compensation: late gradients are corrected as in Zheng et al., whatever becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dps.core.replay import Policy, Replay, plan
from dps.core.rules.rule import SGD, Adam, Momentum
from dps.core.rules.wrappers import DelayCompensated, compensated
from dps.core.shard import ShardState, check_gradient
from dps.core.updates import Operation
from tests.support.builders import Model

RANDOM = np.random.default_rng(7)
START = {"w": RANDOM.standard_normal((4, 3)), "b": RANDOM.standard_normal(3).astype(np.float32)}
MODEL = Model.of(**START)
SHARD = MODEL.layout.shards[0]
RULE = DelayCompensated(SGD(0.1), 0.5)


def gradient() -> dict[str, np.ndarray]:
    return {k: RANDOM.standard_normal(v.shape).astype(v.dtype) for k, v in START.items()}


def pushed(state: ShardState, base: ShardState, of: dict[str, np.ndarray], seq: int) -> Operation:
    op = MODEL.gradient("a", seq, of=of, based_on=base.version)
    return op._replace(base=SHARD.taken(base.values, op.pieces))


def simulated(
    start: dict[str, np.ndarray], pushes: Sequence[tuple[int, dict[str, np.ndarray]]]
) -> dict[str, np.ndarray]:
    """The algorithm of the paper, written down plainly: each push is (version it came from, g)."""
    history = [{k: v.astype(np.float64) for k, v in start.items()}]
    for version, of in pushes:
        now, then = history[-1], history[version]
        new = dict(now)
        for name, g in of.items():
            new[name] = now[name] - 0.1 * (g + 0.5 * g * g * (now[name] - then[name]))
        history.append(new)
    return history[-1]


def test_it_is_the_algorithm_of_the_paper() -> None:
    states = [MODEL.state(RULE, **START)]
    pushes = []
    for seq, late in enumerate([0, 1, 0, 2, 3, 1, 5, 4], 1):
        of = gradient() if seq % 3 else {"w": gradient()["w"]}
        version = max(0, len(states) - 1 - late)
        op = pushed(states[-1], states[version], of, seq)
        check_gradient(SHARD, op)
        states.append(MODEL.apply(RULE, states[-1], op).state)
        pushes.append((version, of))
    expected = simulated(START, pushes)
    found = MODEL.arrays(states[-1].values)
    assert found["b"].dtype == np.float32
    assert found["w"] == pytest.approx(expected["w"], rel=1e-12)
    assert found["b"] == pytest.approx(expected["b"], rel=1e-5)


@pytest.mark.parametrize("inner", [SGD(0.1), Momentum(0.1), Adam(0.1)], ids=str)
def test_a_gradient_that_is_not_late_is_as_it_was(inner: Any) -> None:
    rule = DelayCompensated(inner, 0.5)
    state = MODEL.state(rule, **START)
    op = pushed(state, state, gradient(), 1)
    found = MODEL.apply(rule, state, op).state
    plain = MODEL.apply(inner, state, op._replace(base=None)).state
    assert found.values.tobytes() == plain.values.tobytes()
    assert found.slots.keys() == plain.slots.keys()


@pytest.mark.parametrize("policy", ["sum", "mean", "each"])
def test_gradients_that_are_replayed_are_each_corrected(policy: Policy) -> None:
    """Summed ones to the weights before their step, single ones to those before theirs."""
    state, old = MODEL.state(RULE, **START), MODEL.state(RULE)
    gradients = [gradient(), gradient()]
    bases = enumerate(zip((old, state), gradients, strict=True), 1)
    ops = [pushed(state, base, of, seq) for seq, (base, of) in bases]
    planned = plan(
        Replay(policy), SHARD, 0, ops, lambda op: compensated(SHARD, RULE, state.values, op)
    )
    last = MODEL.apply_all(RULE, state, planned.operations)[-1].state
    w, (g, h) = START["w"], (of["w"] for of in gradients)
    first = g + 0.5 * g * g * w
    after = w - 0.1 * first
    expected = {
        "sum": w - 0.1 * (first + h),
        "mean": w - 0.05 * (first + h),
        "each": after - 0.1 * (h + 0.5 * h * h * (after - w)),
    }[policy]
    assert MODEL.arrays(last.values)["w"] == pytest.approx(expected, rel=1e-12)


def test_a_correction_that_overflows_is_left_out() -> None:
    model = Model.of(w=np.zeros(3, np.float32))
    state = model.state(RULE, w=np.array([1.0, 2.0, 3.0], np.float32))
    op = model.gradient("a", 1, of={"w": np.array([1e30, 1.0, -1e30], np.float32)})
    base = np.array([0.0, 0.0, 3.0], np.float32).view(np.uint8)
    found = model.arrays(model.apply(RULE, state, op._replace(base=base)).state.values)["w"]
    expected = np.array([1e30, 1 + 0.5 * 2, -1e30], np.float32)
    assert found == pytest.approx(np.array([1.0, 2.0, 3.0]) - 0.1 * expected, rel=1e-5)
