"""Staleness-aware learning rates: what a gradient has missed is what its step is divided by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.core.replay import summed
from dps.core.rules.rule import SGD, Adam, Momentum, UpdateRule
from dps.core.rules.wrappers import StalenessAware
from dps.core.shard import ShardState
from tests.support.builders import Model

MODEL = Model.of(w=np.zeros(3))
RULE = StalenessAware(SGD(0.5))


def weights(state: ShardState) -> np.ndarray:
    return MODEL.arrays(state.values)["w"]


def at_version(version: int, rule: UpdateRule = RULE) -> ShardState:
    return replace(MODEL.state(rule), version=version)


@pytest.mark.parametrize(
    ("version", "based_on", "divisor"), [(5, 5, 1), (5, 4, 1), (5, 3, 2), (5, 0, 5), (5, 9, 1)]
)
def test_the_step_is_divided_by_the_staleness(version: int, based_on: int, divisor: int) -> None:
    step = MODEL.apply(RULE, at_version(version), MODEL.gradient("a", 1, based_on=based_on))
    assert weights(step.state).tolist() == [-0.5 / divisor] * 3


def test_a_sum_is_divided_by_the_mean_staleness_of_what_is_in_it() -> None:
    """What is summed with a gradient enters in the same step: it has not missed that."""
    ops = [MODEL.gradient(w, 1, based_on=b) for w, b in (("a", 5), ("b", 1), ("c", 4))]
    (op,) = summed(MODEL.layout.shards[0], ops)
    step = MODEL.apply(RULE, at_version(5), op)
    assert weights(step.state) == pytest.approx(-0.5 * 3 / ((0 + 4 + 1) / 3))
    fresh = summed(MODEL.layout.shards[0], [op._replace(based_on=5) for op in ops])
    assert (weights(MODEL.apply(RULE, at_version(5), *fresh).state) == -1.5).all()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-8, 8)), max_size=8))
def test_steps_are_those_of_the_rule_at_the_learning_rate_of_each(
    pushes: list[tuple[int, int]],
) -> None:
    for make in (SGD, Momentum, Adam):
        state = expected = MODEL.state(make(0.5))
        for seq, (based_on, size) in enumerate(pushes, 1):
            gradient = {"w": np.full(3, float(size))}
            op = MODEL.gradient("a", seq, of=gradient, based_on=based_on)
            divisor = max(1, state.version - based_on)
            state = MODEL.apply(StalenessAware(make(0.5)), state, op).state
            expected = MODEL.apply(make(0.5), expected, op._replace(scale=1 / divisor)).state
            assert weights(state).tobytes() == weights(expected).tobytes()
            assert state.slots.keys() == expected.slots.keys()
