"""Schedules: their values, and that they follow the version of a shard whatever happens to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.rules.clipping import Clipped
from dps.core.rules.decay import WeightDecay
from dps.core.rules.per_array import PerArray
from dps.core.rules.rule import SGD, Adam, UpdateRule, factor, factor_at, learning_rate_at
from dps.core.rules.schedules import Constant, Cosine, Schedule, Scheduled, StepDecay, WarmUp
from dps.core.rules.staleness import StalenessAware
from dps.core.shard import ShardState, apply, initial_state
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError
from dps.protocol.durabilities.worker_cache import rebuilt
from dps.protocol.messages import ShardMetadata, Weights

LAYOUT = Layout.of({"w": np.zeros(3)}, 1)


def pushed(state: ShardState, rule: UpdateRule, seq: int, **more: Any) -> ShardState:
    op = Operation("gradient", UpdateId("a", 1, seq), gradient=np.ones(3).view(np.uint8), **more)
    return apply(LAYOUT.shards[0], rule, state, op).state


def begun(rule: UpdateRule) -> ShardState:
    return initial_state(np.zeros(3).view(np.uint8), rule)


def change(before: ShardState, after: ShardState) -> float:
    return float((before.values.view(np.float64) - after.values.view(np.float64))[0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(), {0: 1, 10**9: 1}),
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
    merged = tuple((UpdateId(worker, 1, 1), 0, 0.0) for worker in "bc")
    state = pushed(begun(rule), rule, 1, merged=merged)
    assert (state.version, state.steps) == (3, 1)
    assert change(state, pushed(state, rule, 2)) == 0.5


def test_an_earlier_state_is_gone_on_from_at_its_rates() -> None:
    rule = Scheduled(Adam(0.1), WarmUp(3, Cosine(5)))
    state = begun(rule)
    saved = [state]
    for seq in range(1, 9):
        state = pushed(state, rule, seq)
        saved.append(state)
    again = saved[4]
    for seq in range(5, 9):
        again = pushed(again, rule, seq)
    assert again.values.tobytes() == state.values.tobytes()


def test_weights_that_are_rebuilt_without_slots_keep_their_place_in_the_schedule() -> None:
    rule = Scheduled(Adam(0.1), WarmUp(3, Cosine(50)))
    state = begun(rule)
    for seq in range(1, 11):
        state = pushed(state, rule, seq)
    metadata = ShardMetadata(1, state.index, state.steps, state.workers, {})
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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: StepDecay(0), "StepDecay: every=0, expected 1 or more whole updates"),
        (lambda: StepDecay(1.5), "StepDecay: every=1.5, expected 1 or more whole"),  # type: ignore[arg-type]
        (lambda: StepDecay(5, 0), "StepDecay: by=0, expected a number above 0"),
        (lambda: Cosine(True), "Cosine: updates=True, expected 1 or more whole"),
        (lambda: Cosine(10, 1.0), "Cosine: least=1.0, expected 0 or more and below 1"),
        (lambda: WarmUp(10, start=-1), "WarmUp: start=-1, expected 0 or more and below 1"),
        (lambda: WarmUp(10, 0.5), r"WarmUp: then=0.5, expected a schedule such as Cosine\(1000"),  # type: ignore[arg-type]
        (lambda: Scheduled(SGD(1), Cosine), "Scheduled: schedule=<class.*expected a schedule"),  # type: ignore[arg-type]
        (lambda: Scheduled(SGD(1), StalenessAware(SGD(1))), "Scheduled: schedule=Stal"),  # type: ignore[arg-type]
        (lambda: Scheduled(Scheduled(SGD(1), Cosine(9)), Cosine(9)), "expected another update"),
        (lambda: Scheduled(Cosine(10), Cosine(10)), "Scheduled: rule=Cosine.*another update rule"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_schedule_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        make()


def test_the_rate_in_force_is_that_of_the_innermost_rule_times_all_schedules() -> None:
    rule = Clipped(Scheduled(WeightDecay(SGD(0.4), 0.01), StepDecay(4, 0.5)), norm=1.0)
    found = [learning_rate_at(rule, version) for version in range(12)]
    assert found == pytest.approx([0.4] * 4 + [0.2] * 4 + [0.1] * 4)
    assert learning_rate_at(SGD(0.4), 1000) == 0.4
    by_name = PerArray((("w", SGD(0.4)), ("*", SGD(0.1))))
    assert learning_rate_at(Scheduled(by_name, StepDecay(4)), 0) is None
