"""Rows of sparse tables in a shard: one state with the dense part, exactly once, all or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.replay import Policy, Replay, plan, summed
from dps.core.rules.rule import SGD, Adam
from dps.core.shard import ShardState, StateMachine, Step, check_gradient, initial_state
from dps.core.tables.key_routing import dealt
from dps.core.tables.table import KEYS, Rows, SparseSpec, table_of
from dps.core.updates import Operation, UpdateId
from dps.errors import NonFiniteGradient, ShapeMismatch

SPEC = SparseSpec("emb", 2, "float64")
LAYOUT = Layout.of({"w": np.zeros(3), "v": np.zeros(2)}, 1, tables=[SPEC])
SHARD = LAYOUT.shards[0]
RULE = SGD(1.0)


def start(rule: Any = RULE) -> ShardState:
    return initial_state(np.zeros(SHARD.nbytes, np.uint8), rule)


def op(
    seq: int, rows: dict[int, float] | None = None, dense: bool = True, **fields: Any
) -> Operation:
    """A push that adds 1 to the dense part, and to each row what is given for its key."""
    pushed: tuple[Rows, ...] = ()
    if rows:
        gradient = np.array([[-x, -x] for x in rows.values()])
        (pushed,) = dealt(LAYOUT, {"emb": (list(rows), gradient)}, values=False).values()
    arrays = {"w": np.full(3, -1.0), "v": np.full(2, -1.0)}
    buffer = LAYOUT.gather(0, arrays)[0] if dense else None
    update = UpdateId(fields.pop("worker", "a"), 1, seq)
    return Operation("gradient", update, gradient=buffer, rows=pushed, **fields)


def applied(state: ShardState, operation: Operation, rule: Any = RULE) -> Step:
    return StateMachine(SHARD, rule).apply(state, operation)


def held(state: ShardState) -> dict[int, float]:
    """The rows that are there; both columns of each must agree."""
    level = table_of(state.tables, "emb").between(0, KEYS, SPEC)
    assert (level.values[:, 0] == level.values[:, 1]).all()
    return dict(zip(level.keys.tolist(), level.values[:, 0].tolist(), strict=True))


def dense(state: ShardState) -> float:
    (value,) = set(state.values.view(np.float64).tolist())
    return float(value)


def test_rows_and_dense_arrays_are_one_update_and_one_version() -> None:
    step = applied(start(), op(1, {7: 2.0, 3: 1.0}))
    assert (step.outcome, step.state.version, step.state.steps) == ("applied", 1, 1)
    assert held(step.state) == {3: 1.0, 7: 2.0}
    assert dense(step.state) == 1.0
    again = applied(step.state, op(1, {7: 2.0}))
    assert again.outcome == "duplicate"
    assert again.state is step.state


def test_rows_alone_leave_the_dense_part_as_it_is() -> None:
    state = applied(start(), op(1, {7: 2.0}, dense=False)).state
    assert (held(state), dense(state), state.version) == ({7: 2.0}, 0.0, 1)
    state = applied(state, op(2)).state
    assert (held(state), dense(state), state.version) == ({7: 2.0}, 1.0, 2)


BAD_ROWS = {
    "unknown table": (Rows("x", np.array([1]), np.ones((1, 2))), "no sparse table is named 'x'"),
    "width": (Rows("emb", np.array([1]), np.ones((1, 3))), r"'emb' are float64\[1, 3\]"),
    "count": (Rows("emb", np.array([1, 2]), np.ones((1, 2))), r"expected an array float64\[2, 2\]"),
    "repeated": (Rows("emb", np.array([1, 1]), np.ones((2, 2))), "are not in order"),
    "NaN": (Rows("emb", np.array([1]), np.array([[1.0, np.nan]])), "'emb' hold NaN"),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_bad_rows_are_refused_with_the_dense_part(bad: str) -> None:
    rows, said = BAD_ROWS[bad]
    whole = op(2)
    wrong = Operation("gradient", whole.id, gradient=whole.gradient, rows=(rows,))
    state = applied(start(), op(1, {1: 1.0})).state
    for check in (lambda: applied(state, wrong), lambda: check_gradient(SHARD, wrong)):
        with pytest.raises((ShapeMismatch, NonFiniteGradient), match=said) as caught:
            check()
        assert "a" in str(caught.value)
    assert (held(state), dense(state)) == ({1: 1.0}, 1.0)


def test_optimizer_state_of_rows_starts_at_zero_when_they_are_first_pushed_to() -> None:
    """As for torch's SparseAdam: t counts the steps of the shard, not those of a row."""
    rule = Adam(0.1)
    state = applied(start(rule), op(1, {1: 1.0}), rule).state
    state = applied(state, op(2, {2: 1.0}), rule).state
    expected, _ = rule.step(
        np.zeros(1), -np.ones(1), {"mean": np.zeros(1), "square": np.zeros(1)}, 2, 1.0
    )
    assert held(state)[2] == expected[0]


def test_summed_gradients_have_the_sum_of_the_rows_of_each_key() -> None:
    ops = [op(1, {1: 1.0, 2: 2.0}), op(1, {2: 3.0, 9: 1.0}, worker="b"), op(1, worker="c")]
    (total,) = summed(SHARD, ops)
    assert [update.worker for update, *_ in total.merged] == ["b", "c"]
    step = applied(start(), total)
    assert held(step.state) == {1: 1.0, 2: 5.0, 9: 1.0}
    assert (dense(step.state), step.state.version, step.state.steps) == (3.0, 3, 1)


def test_gradients_with_and_without_a_dense_part_are_steps_of_their_own() -> None:
    ops = [op(1, {1: 1.0}), op(2, {1: 1.0}, dense=False), op(3, {2: 1.0}, dense=False)]
    first, second = summed(SHARD, ops)
    assert len(second.merged) == 1
    state = applied(applied(start(), first).state, second).state
    assert (held(state), dense(state), state.steps) == ({1: 2.0, 2: 1.0}, 1.0, 2)


BUFFERED = [op(seq, {1: 1.0, seq: 2.0}, based_on=seq) for seq in (3, 4, 5)]


@pytest.mark.parametrize(
    ("policy", "rows", "of_dense"),
    [
        ("sum", {1: 3.0, 3: 2.0, 4: 2.0, 5: 2.0}, 3.0),
        ("mean", {1: 1.0, 3: 2 / 3, 4: 2 / 3, 5: 2 / 3}, 1.0),
        ("each", {1: 3.0, 3: 2.0, 4: 2.0, 5: 2.0}, 3.0),
        ("staleness_scaled", {1: 1 / 3 + 1 / 2 + 1, 3: 2 / 3, 4: 1.0, 5: 2.0}, 1 / 3 + 1 / 2 + 1),
        ("drop_older", {1: 2.0, 4: 2.0, 5: 2.0}, 2.0),
        ("published", {1: 3.0, 3: 2.0, 4: 2.0, 5: 2.0}, 3.0),
    ],
)
def test_a_replay_treats_rows_as_it_does_the_dense_part(
    policy: Policy, rows: dict[int, float], of_dense: float
) -> None:
    state = start()
    for operation in plan(Replay(policy, drop_older_than=1), SHARD, 5, BUFFERED).operations:
        state = applied(state, operation).state
    assert held(state) == pytest.approx(rows)
    assert dense(state) == pytest.approx(of_dense)


def test_a_clipped_replay_counts_rows_in_the_norm() -> None:
    (operation,) = plan(Replay("clip", clip_norm=2.0), SHARD, 5, BUFFERED).operations
    norm = np.sqrt(5 * 3.0**2 + 2 * (3.0**2 + 3 * 2.0**2))
    state = applied(start(), operation).state
    assert dense(state) == pytest.approx(3 * 2 / norm)
    assert held(state) == pytest.approx({1: 6 / norm, 3: 4 / norm, 4: 4 / norm, 5: 4 / norm})
