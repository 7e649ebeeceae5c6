"""Replay policies: each against a result worked out by hand, and no update loses its identity."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.core.replay import Plan, Policy, Replay, plan
from dps.core.rules.rule import SGD
from dps.core.shard import ShardState
from dps.core.updates import Operation, UpdateId
from tests.support.builders import Model

MODEL = Model.of(w=np.zeros(2, np.float32), b=np.zeros(1, np.float64))
POLICIES = get_args(Policy)
RULE = SGD(0.5)


def push(seq: int, w: tuple[float, float], b: float, based_on: int = 0) -> Operation:
    of = {"w": np.array(w, np.float32), "b": np.array([b])}
    return MODEL.gradient("a", seq, of=of, based_on=based_on, based_at=100.0 + seq)


FIRST = push(1, (1, 2), 4, based_on=3)
SECOND = push(2, (5, -4), 0, based_on=1)


def planned(policy: Replay, *ops: Operation, version: int = 3) -> Plan:
    return plan(policy, MODEL.layout.shards[0], version, ops)


def replayed(policy: Replay, *ops: Operation) -> tuple[list[float], list[float], ShardState]:
    """The weights after a replay onto zeros with a learning rate of 0.5."""
    steps = MODEL.apply_all(RULE, MODEL.state(RULE), planned(policy, *ops).operations)
    state = steps[-1].state
    found = MODEL.arrays(state.values)
    return found["w"].tolist(), found["b"].tolist(), state


def entered(ops: tuple[Operation, ...]) -> list[tuple[UpdateId, int, float]]:
    """What each operation brings in: identity, version and time that it was based on."""
    return [
        one
        for op in ops
        for one in ((op.id, op.based_on, op.based_at), *(each[:3] for each in op.merged))
    ]


# With the learning rate of 0.5, the sum (6, -2 | 4) moves the weights by (-3, 1 | -2).


@pytest.mark.parametrize(
    ("policy", "w", "b", "steps"),
    [("sum", [-3, 1], [-2], 1), ("mean", [-1.5, 0.5], [-1], 1), ("each", [-3, 1], [-2], 2)],
)
def test_two_gradients_are_summed_averaged_or_applied_in_order(
    policy: Policy, w: list[float], b: list[float], steps: int
) -> None:
    *found, state = replayed(Replay(policy), FIRST, SECOND)
    assert found == [w, b]
    assert (state.version, state.steps) == (2, steps)


def test_staleness_scaled_divides_the_learning_rate_by_one_more_than_the_staleness() -> None:
    # At version 3, the first is fresh (factor 1) and the second two behind (factor 1/3).
    found = planned(Replay("staleness_scaled"), FIRST, SECOND)
    assert [op.scale for op in found.operations] == [1, 1 / 3]
    w, b, state = replayed(Replay("staleness_scaled"), FIRST, push(2, (6, -3), 0, based_on=1))
    assert (w, b) == ([-0.5 - 1, -1 + 0.5], [-2])
    assert (state.version, state.steps) == (2, 2)


def test_clip_shortens_a_sum_that_is_too_long_over_all_arrays_together() -> None:
    # The sum (2, 3 | 6) has norm 7.
    ops = (push(1, (1, 1), 5), push(2, (1, 2), 1))
    w, b, state = replayed(Replay("clip", clip_norm=3.5), *ops)
    assert (w, b) == ([-0.5, -0.75], [-1.5])
    assert (state.version, state.steps) == (2, 1)


def test_clip_leaves_a_sum_that_is_short_enough_as_it_is() -> None:
    ops = (push(1, (1, 1), 5), push(2, (1, 2), 1))
    for limit in (7.0, 14.0):
        assert replayed(Replay("clip", clip_norm=limit), *ops)[:2] == ([-1, -1.5], [-3])
    assert replayed(Replay("clip"), push(1, (0, 0), 0))[:2] == ([0, 0], [0])


def test_drop_older_leaves_out_what_is_too_stale_and_counts_it() -> None:
    third = push(3, (2, 2), 2, based_on=2)
    found = planned(Replay("drop_older", drop_older_than=1), FIRST, SECOND, third)
    assert found.dropped == 1
    assert [one[0].seq for one in entered(found.operations)] == [1, 3]
    w, b, _ = replayed(Replay("drop_older", drop_older_than=1), FIRST, SECOND, third)
    assert (w, b) == ([-1.5, -2], [-3])
    assert planned(Replay("drop_older", drop_older_than=2), FIRST, SECOND, third).dropped == 0


def test_published_divides_the_learning_rate_by_ten_above_fifty_gradients() -> None:
    ops = [push(seq, (1, 0), 0) for seq in range(1, 52)]
    assert replayed(Replay("published"), *ops[:50])[0] == [-25, 0]
    assert replayed(Replay("published"), *ops)[0] == [pytest.approx(-2.55), 0]
    assert replayed(Replay("published"), *ops)[2].steps == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_an_update_that_was_buffered_twice_enters_once(policy: str) -> None:
    found = planned(Replay(policy), FIRST, SECOND, FIRST, SECOND)
    assert [one[0].seq for one in entered(found.operations)] == [1, 2]
    assert (
        replayed(Replay(policy), FIRST, SECOND, FIRST)[:2]
        == (replayed(Replay(policy), FIRST, SECOND)[:2])
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_has_entered_again_may_count_from_the_start(policy: str) -> None:
    """What it had sent as the one before is left out if it comes after that."""
    again, late = MODEL.gradient("a", 1, incarnation=2, based_on=3), push(3, (1, 1), 1, based_on=3)
    found = planned(Replay(policy), FIRST, again, late)
    assert [one[0][1:] for one in entered(found.operations)] == [(1, 1), (2, 1)]


@st.composite
def buffers(draw: st.DrawFn) -> list[Operation]:
    """Gradients of three workers, whole or partial, in the order in which they were pushed."""
    ops = []
    for seq in range(1, draw(st.integers(0, 8)) + 1):
        of = {"w": np.full(2, seq, np.float32), "b": np.full(1, -float(seq))}
        names = draw(st.sampled_from([("w", "b"), ("w",), ("b",)]))
        ops.append(
            MODEL.gradient(
                draw(st.sampled_from("abc")),
                seq,
                of={name: of[name] for name in names},
                based_on=draw(st.integers(0, 9)),
                based_at=float(seq),
            )
        )
    return ops


@given(st.sampled_from(POLICIES), buffers(), st.integers(0, 9))
def test_every_update_keeps_its_identity_and_place(
    policy: str, ops: list[Operation], version: int
) -> None:
    found = planned(Replay(policy, drop_older_than=4), *ops, version=version)
    kept = [op for op in ops if policy != "drop_older" or version - op.based_on <= 4]
    assert entered(found.operations) == [(op.id, op.based_on, op.based_at) for op in kept]
    assert found.dropped == len(ops) - len(kept)
    assert all(op.replayed for op in found.operations)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_buffered_is_not_written_to(policy: str) -> None:
    ops = (push(1, (1, 2), 4), push(2, (30, 40), 50))
    before = [op.gradient.tobytes() for op in ops if op.gradient is not None]
    planned(Replay(policy, clip_norm=0.1), *ops)
    assert [op.gradient.tobytes() for op in ops if op.gradient is not None] == before
