"""Schedules: their values, and that they follow the version of a shard whatever happens to it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.rules.rule import SGD, Adam, UpdateRule, factor, factor_at
from dps.core.rules.wrappers import (
    Cosine,
    Schedule,
    Scheduled,
    StalenessAware,
    StepDecay,
    WarmUp,
)
from dps.core.shard import ShardState, StateMachine, initial_state
from dps.core.updates import Operation, UpdateId
from dps.protocol.messages import ShardMetadata, Weights
from dps.recovery.worker_cache import rebuilt

LAYOUT = Layout.of({"w": np.zeros(3)}, 1)


def pushed(state: ShardState, rule: UpdateRule, seq: int, **more: Any) -> ShardState:
    op = Operation("gradient", UpdateId("a", 1, seq), gradient=np.ones(3).view(np.uint8), **more)
    return StateMachine(LAYOUT.shards[0], rule).apply(state, op).state


def begun(rule: UpdateRule) -> ShardState:
    return initial_state(np.zeros(3).view(np.uint8), rule)


def change(before: ShardState, after: ShardState) -> float:
    return float((before.values.view(np.float64) - after.values.view(np.float64))[0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (StepDecay(10, 0.5), {0: 1, 9: 1, 10: 0.5, 19: 0.5, 20: 0.25}),
        (StepDecay(1, 1.5), {0: 1, 1: 1.5, 2: 2.25}),
        (Cosine(100), {0: 1, 50: 0.5, 25: (1 + math.sqrt(0.5)) / 2, 100: 0, 10**9: 0}),
        (Cosine(100, least=0.2), {0: 1, 50: 0.6, 100: 0.2, 200: 0.2}),
        (WarmUp(10), {0: 0, 5: 0.5, 10: 1, 11: 1}),
        (WarmUp(10, start=0.5), {0: 0.5, 5: 0.75, 10: 1}),
        (WarmUp(10, Cosine(20)), {9: 0.9, 10: 1, 20: 0.5, 30: 0, 40: 0}),
        (WarmUp(2, WarmUp(4, StepDecay(1))), {1: 0.5, 2: 0, 4: 0.5, 6: 1, 7: 0.1}),
    ],
    ids=str,
)
def test_a_schedule_has_these_values(schedule: Schedule, expected: dict[int, float]) -> None:
    found = {version: schedule.factor(version) for version in expected}
    assert found == pytest.approx(expected, abs=1e-15)


def test_each_step_is_taken_at_the_rate_of_its_version() -> None:
    rule = Scheduled(SGD(0.5), StepDecay(2, 0.1))
    state = begun(rule)
    for seq, rate in enumerate([0.5, 0.5, 0.05, 0.05, 0.005], 1):
        after = pushed(state, rule, seq)
        assert change(state, after) == pytest.approx(rate)
        state = after


def test_updates_that_are_summed_into_one_step_count_each() -> None:
    rule = Scheduled(SGD(1.0), StepDecay(3, 0.5))
    merged = tuple((UpdateId(worker, 1, 1), 0, 0.0, None) for worker in "bc")
    state = pushed(begun(rule), rule, 1, merged=merged)
    assert (state.version, state.steps) == (3, 1)
    assert change(state, pushed(state, rule, 2)) == 0.5


def test_weights_that_are_rebuilt_without_slots_keep_their_place_in_the_schedule() -> None:
    rule = Scheduled(Adam(0.1), WarmUp(3, Cosine(50)))
    state = begun(rule)
    for seq in range(1, 11):
        state = pushed(state, rule, seq)
    metadata = ShardMetadata(1, state.index, state.steps, state.workers, {}, {})
    found = rebuilt(Weights(state.version, 0.0, -1, state.values, metadata), rule)
    assert (found.version, found.steps) == (10, 0)
    # Adam's first step is of the size of its learning rate, whatever the gradient.
    expected = 0.1 * WarmUp(3, Cosine(50)).factor(10)
    assert change(found, pushed(found, rule, 11)) == pytest.approx(expected, rel=1e-6)


def test_what_else_reduces_the_rate_of_a_step_comes_on_top() -> None:
    rule = Scheduled(StalenessAware(SGD(1.0)), StepDecay(1, 0.5))
    assert (factor(rule, 4.0), factor_at(rule, 3)) == (0.25, 0.125)
    within = StalenessAware(Scheduled(SGD(1.0), StepDecay(2, 0.1)))
    twice = Scheduled(within, StepDecay(1, 0.5))
    assert factor_at(twice, 3) == pytest.approx(0.1 * 0.125)
    state = replace(begun(rule), version=3)
    assert change(state, pushed(state, rule, 1, scale=0.5)) == pytest.approx(0.5 * 0.125 / 3)
