"""The shard: each update enters exactly once, in order, whole or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.core.filters.chain import Outbox, checked
from dps.core.filters.filter import Quantise
from dps.core.rules.proximal import FTRL, L1, Proximal
from dps.core.rules.rule import SGD, AdaGrad, Adam, Momentum, UpdateRule
from dps.core.rules.wrappers import PerArray
from dps.core.shard import CHUNK_BYTES, ShardState, StateMachine, is_duplicate
from dps.core.updates import Operation, UpdateId
from dps.errors import NonFiniteGradient, ShapeMismatch
from dps.protocol import wire
from dps.protocol.compression import applicable, dense
from tests.support.builders import Model, join, leave
from tests.support.worlds import same_state

MODEL = Model.of(w=np.zeros((2, 3), np.float32), b=np.zeros(3, np.float64))
RULE = SGD(1.0)
RULES = [RULE, Momentum(0.5), AdaGrad(0.5), Adam(0.1), FTRL(l1=0.1, l2=0.1), Proximal(1, L1(0.1))]


def after(*ops: Operation, rule: UpdateRule = RULE) -> ShardState:
    return MODEL.apply_all(rule, MODEL.state(rule), ops)[-1].state


def test_an_update_that_comes_again_is_refused_and_changes_nothing() -> None:
    state = after(MODEL.gradient("a", 1), MODEL.gradient("a", 2))
    for seq in (1, 2):
        step = MODEL.apply(RULE, state, MODEL.gradient("a", seq))
        assert (step.outcome, step.updates) == ("duplicate", ())
        assert step.state is state


def test_updates_of_an_older_incarnation_are_refused() -> None:
    state = after(MODEL.gradient("a", 5), MODEL.gradient("a", 1, incarnation=2))
    for op in (MODEL.gradient("a", 6), join("a")):
        step = MODEL.apply(RULE, state, op)
        assert step.outcome == "duplicate"
        assert step.state is state


def test_a_new_incarnation_counts_from_one_again_and_keeps_what_was_applied() -> None:
    state = after(*(MODEL.gradient("a", seq) for seq in (1, 2, 3)), join("a", incarnation=2))
    assert not is_duplicate(state, UpdateId("a", 2, 1))
    step = MODEL.apply(RULE, state, MODEL.gradient("a", 1, incarnation=2))
    assert step.outcome == "applied"
    assert step.state.workers["a"].applied == step.state.version == 4


def test_joins_and_leaves_count_in_the_order_but_not_in_the_version() -> None:
    state = after(join("a"), MODEL.gradient("a", 1), leave("a"))
    assert (state.index, state.version, state.steps) == (3, 1, 1)


def test_staleness_is_the_version_that_is_found_less_the_version_that_was_read() -> None:
    state = after(*(MODEL.gradient("a", seq) for seq in (1, 2, 3)))
    (update,) = MODEL.apply(RULE, state, MODEL.gradient("b", 1, based_on=1, based_at=9.5)).updates
    assert (update.version, update.staleness, update.based_at) == (4, 2, 9.5)
    assert update.id == UpdateId("b", 1, 1)
    assert not update.replayed


def test_a_newcomer_joins_at_the_slowest_clock() -> None:
    started = [join("a"), join("b")]
    pushed = [MODEL.gradient("a", seq) for seq in (1, 2, 3)] + [MODEL.gradient("b", 1)]
    assert after(*started, *pushed, join("c")).clocks == {"a": 3, "b": 1, "c": 1}
    assert after(*started, *pushed, leave("b"), join("c")).clocks == {"a": 3, "c": 3}


def test_a_newcomer_goes_on_from_the_fastest_when_all_have_left() -> None:
    started = [join("a"), MODEL.gradient("a", 1), join("b"), MODEL.gradient("b", 2)]
    for gone in (leave("a"), leave("a", incarnation=2)):
        assert after(*started, leave("b"), gone, join("c")).clocks == {"c": 2}
        assert after(*started[:2], gone, join("c")).clocks == {"c": 1}


@pytest.mark.parametrize("known", [(), (join("b"), leave("b"))], ids=["unknown", "left"])
def test_a_kept_place_is_where_a_worker_joins_whatever_others_push(
    known: tuple[Operation, ...],
) -> None:
    place = Operation("join", UpdateId("b", 0, 2))  # for its second incarnation
    kept = after(join("a"), *known, place)
    pushed = [MODEL.gradient("a", 1), MODEL.gradient("b", 1), MODEL.gradient("a", 2)]
    steps = MODEL.apply_all(RULE, kept, [*pushed, join("b", incarnation=2)])
    assert [step.outcome for step in steps] == ["applied"] * 4
    assert kept.clocks == {"a": 0, "b": 0}
    assert MODEL.apply(RULE, kept, join("b", incarnation=2)).state.clocks == {"a": 0, "b": 0}
    assert steps[-1].state.clocks == {"a": 2, "b": 1}
    assert MODEL.apply(RULE, kept, place).state is kept
    gone = MODEL.apply_all(RULE, kept, [join("b", incarnation=2), leave("b", incarnation=2)])[-1]
    assert MODEL.apply(RULE, gone.state, place).state is gone.state
    assert MODEL.apply(RULE, after(leave("b", incarnation=2)), place).state.clocks == {}


def test_a_worker_that_left_is_not_waited_for_but_remembered() -> None:
    state = after(join("a"), join("b"), MODEL.gradient("b", 1), leave("b"))
    assert state.clocks == {"a": 0}
    assert is_duplicate(state, UpdateId("b", 1, 1))
    late = MODEL.apply(RULE, state, MODEL.gradient("b", 2)).state
    assert (late.version, late.clocks) == (2, {"a": 0})


def test_a_leave_of_an_older_incarnation_or_a_second_one_changes_nothing() -> None:
    state = after(join("a"), join("a", incarnation=2))
    assert MODEL.apply(RULE, state, leave("a", incarnation=1)).state is state
    gone = MODEL.apply(RULE, state, leave("a", incarnation=2)).state
    assert gone.clocks == {}
    assert MODEL.apply(RULE, gone, leave("a", incarnation=2)).state is gone


def test_a_leave_that_overtakes_its_join_keeps_the_worker_out() -> None:
    assert after(join("a"), leave("b"), join("b")).clocks == {"a": 0}
    state = after(join("a"), MODEL.gradient("a", 1), leave("a", incarnation=2))
    assert MODEL.apply(RULE, state, join("a", incarnation=2)).state.clocks == {}
    assert state.workers["a"].applied == 1


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("name", "wrong"), [("w", np.nan), ("b", np.inf)])
def test_a_gradient_that_is_not_finite_is_refused_by_name_and_nothing_of_it_applied(
    name: str, wrong: float, rule: UpdateRule
) -> None:
    state = after(MODEL.gradient("a", 1), rule=rule)
    kept = replace(state, values=state.values.copy())
    gradients = {"w": np.ones((2, 3), np.float32), "b": np.ones(3)}
    gradients[name].reshape(-1)[-1] = wrong
    with pytest.raises(NonFiniteGradient, match=f"gradient of '{name}' holds NaN or infinity"):
        MODEL.apply(rule, state, MODEL.gradient("a", 2, of=gradients))
    assert same_state(state, kept)
    assert MODEL.apply(rule, state, MODEL.gradient("a", 2)).outcome == "applied"


def test_nan_in_the_last_of_many_chunks_leaves_the_first_unapplied() -> None:
    model = Model.of(w=np.zeros(CHUNK_BYTES))
    state = model.state(RULE)
    gradient = np.ones(CHUNK_BYTES)
    gradient[-1] = np.nan
    with pytest.raises(NonFiniteGradient, match="'w'"):
        model.apply(RULE, state, model.gradient("a", 1, of={"w": gradient}))
    assert not state.values.any()


def test_a_gradient_of_another_size_is_refused() -> None:
    op = MODEL.gradient("a", 1)
    assert op.gradient is not None
    message = r"seq=1.*: 44 bytes of gradient, expected 48"
    with pytest.raises(ShapeMismatch, match=message):
        MODEL.apply(RULE, MODEL.state(RULE), op._replace(gradient=op.gradient[4:]))
    with pytest.raises(ShapeMismatch, match="0 bytes of gradient, expected 48"):
        MODEL.apply(RULE, MODEL.state(RULE), op._replace(gradient=None))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_cutting_a_step_into_chunks_changes_no_bit(rule: UpdateRule) -> None:
    size = CHUNK_BYTES // 4 * 2 + 77
    random = np.random.default_rng(0)
    values, first, second = (random.standard_normal(size).astype(np.float32) for _ in range(3))
    model = Model.of(w=values)
    ops = [model.gradient("a", 1, of={"w": first}), model.gradient("a", 2, of={"w": second})]
    state = model.apply_all(rule, model.state(rule, w=values), ops)[-1].state
    slots = {name: np.zeros_like(values) for name in rule.slots}
    for t, gradient in enumerate((first, second), 1):
        values, slots = rule.step(values, gradient, slots, t, 1.0)
    assert model.arrays(state.values)["w"].tobytes() == values.tobytes()
    assert {n: model.arrays(s)["w"].tobytes() for n, s in state.slots.items()} == {
        n: s.tobytes() for n, s in slots.items()
    }


@pytest.mark.parametrize("names", ["w", "b", "wb"])
@pytest.mark.parametrize("rule", [*RULES, PerArray([("w", Adam(0.1)), ("b", RULE)])], ids=str)
def test_a_gradient_in_bf16_is_applied_as_if_it_were_decoded(rule: UpdateRule, names: str) -> None:
    random = np.random.default_rng(0)
    sizes = {"w": CHUNK_BYTES // 4 + 78, "b": 3}
    model = Model.of(**{name: np.zeros(size, np.float32) for name, size in sizes.items()})
    (layout,) = model.layout.shards
    outbox = Outbox(model.layout, 0, checked({"*": [Quantise("bf16")]}, sizes, rule))
    of = {name: random.standard_normal(sizes[name]).astype(np.float32) for name in names}
    op = outbox.prepared(model.gradient("a", 1, of=of), None).operation
    given = applicable(layout, op)
    assert given.gradient is not None
    assert given.gradient.dtype == np.uint16
    assert same_state(
        model.apply(rule, model.state(rule), given).state,
        model.apply(rule, model.state(rule), dense(layout, op)).state,
    )
    infinite = given.gradient.copy()
    infinite[-2] = 0x7F80
    with pytest.raises(NonFiniteGradient, match=f"the gradient of '{names[-1]}' holds NaN"):
        model.apply(rule, model.state(rule), given._replace(gradient=infinite))
    short = given._replace(gradient=given.gradient[1:])
    with pytest.raises(ShapeMismatch, match="bytes of gradient, expected"):
        model.apply(rule, model.state(rule), short)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_partial_push_steps_its_own_arrays_only(rule: UpdateRule) -> None:
    state = after(MODEL.gradient("a", 1), rule=rule)
    step = MODEL.apply(rule, state, MODEL.gradient("a", 2, of={"b": np.full(3, 2.0)}))
    assert step.state.version == 2
    for old, new in [(state.values, step.state.values)] + [
        (state.slots[name], step.state.slots[name]) for name in rule.slots
    ]:
        assert (MODEL.arrays(old)["w"] == MODEL.arrays(new)["w"]).all()
        assert (MODEL.arrays(old)["b"] != MODEL.arrays(new)["b"]).all()


def test_merged_updates_enter_in_one_step_with_an_identity_each() -> None:
    merged = ((UpdateId("b", 1, 1), 0, 3.0, None), (UpdateId("a", 1, 2), 1, 4.0, None))
    op = MODEL.gradient("a", 1, based_at=2.0, merged=merged, replayed=True)
    step = MODEL.apply(RULE, after(join("a"), join("b")), op)
    assert (step.state.index, step.state.version, step.state.steps) == (3, 3, 1)
    assert [(u.id.worker, u.id.seq, u.version, u.based_at) for u in step.updates] == [
        ("a", 1, 1, 2.0),
        ("b", 1, 2, 3.0),
        ("a", 2, 3, 4.0),
    ]
    assert [u.staleness for u in step.updates] == [0, 1, 1]
    assert all(u.replayed for u in step.updates)
    assert step.state.clocks == {"a": 2, "b": 1}
    assert (MODEL.arrays(step.state.values)["b"] == -1).all()
    for again in (MODEL.gradient("a", 2), MODEL.gradient("b", 1)):
        assert MODEL.apply(RULE, step.state, again).state is step.state


workers = st.sampled_from("abc")
incarnations = st.integers(1, 2)


@st.composite
def gradients(draw: st.DrawFn) -> Operation:
    """Pushes, many of them repeated or out of date, whole or partial, of small whole numbers."""
    of = {
        "w": np.full((2, 3), draw(st.integers(-9, 9)), np.float32),
        "b": np.full(3, draw(st.integers(-9, 9)), np.float64),
    }
    names = draw(st.sampled_from([("w", "b"), ("w",), ("b",)]))
    return MODEL.gradient(
        draw(workers),
        draw(st.integers(1, 6)),
        draw(incarnations),
        {name: of[name] for name in names},
        based_on=draw(st.integers(0, 8)),
    )


operations = st.lists(
    gradients() | st.builds(join, workers, incarnations) | st.builds(leave, workers, incarnations),
    max_size=30,
)


@given(operations)
def test_counts_and_weights_are_those_of_the_updates_that_were_applied(
    ops: list[Operation],
) -> None:
    states = [MODEL.state(RULE)]
    entered: list[Operation] = []
    for op in ops:
        step = MODEL.apply(RULE, states[-1], op)
        if step.outcome == "applied" and op.kind == "gradient":
            entered.append(op)
            assert [u.id for u in step.updates] == [op.id]
            assert step.updates[0].staleness == max(0, states[-1].version - op.based_on)
        assert (step.state.index > states[-1].index) == (step.outcome == "applied")
        states.append(step.state)
    final = states[-1]
    assert final.version == final.steps == len(entered)
    assert final.version == sum(p.applied for p in final.workers.values())
    assert len({op.id for op in entered}) == len(entered)
    for name, progress in final.workers.items():
        mine = [op.id for op in entered if op.id.worker == name]
        assert progress.applied == len(mine)
        assert sorted(mine) == mine
    for name, array in MODEL.arrays(final.values).items():
        pushed = (MODEL.arrays(_whole(op))[name] for op in entered)
        assert (array == -sum(pushed, np.zeros_like(array))).all()
    assert all(is_duplicate(final, op.id) for op in entered)


def _whole(op: Operation) -> np.ndarray:
    """A gradient's buffer with zeros where a partial push has nothing."""
    buffer = np.zeros(MODEL.layout.shards[0].nbytes, np.uint8)
    at = 0
    for i in op.pieces or range(len(MODEL.layout.shards[0].pieces)):
        piece = MODEL.layout.shards[0].pieces[i]
        assert op.gradient is not None
        buffer[piece.offset : piece.end] = op.gradient[at : at + piece.block.nbytes]
        at += piece.block.nbytes
    return buffer


@given(operations, st.sampled_from(RULES))
def test_replicas_that_apply_the_same_operations_are_bitwise_equal(
    ops: list[Operation], rule: UpdateRule
) -> None:
    head = tail = MODEL.state(rule)
    for op in ops:
        head_step = MODEL.apply(rule, head, op)
        # The tail's copy came over the wire: read-only, and not aligned.
        frames = [np.frombuffer(b"." + f.tobytes(), np.uint8)[1:] for f in wire.encode(op)]
        tail_step = MODEL.apply(rule, tail, wire.decode(frames))
        assert (tail_step.outcome, tail_step.updates) == (head_step.outcome, head_step.updates)
        head, tail = head_step.state, tail_step.state
    assert same_state(head, tail)


@given(operations, st.sampled_from(RULES))
def test_a_state_that_somebody_holds_is_never_changed(
    ops: list[Operation], rule: UpdateRule
) -> None:
    held = [MODEL.state(rule)]
    seen = [_bytes(held[0])]
    for op in ops:
        held.append(MODEL.apply(rule, held[-1], op).state)
        seen.append(_bytes(held[-1]))
    assert [_bytes(state) for state in held] == seen


def _bytes(state: ShardState) -> list[bytes]:
    return [frame.tobytes() for frame in wire.encode(state)]


def test_the_weights_after_a_step_lie_where_they_are_told_to_and_are_read_only() -> None:
    model = Model.of(w=np.zeros(9, np.float32))
    made: list[np.ndarray] = []

    def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        made.append(np.empty(shape, dtype))
        return made[-1]

    layout, rule = model.layout.shards[0], SGD(1.0)
    state = model.state(rule)
    step = StateMachine(layout, rule, empty=empty).apply(state, model.gradient("a", 1))
    assert [step.state.values is array for array in made] == [True]
    with pytest.raises(ValueError, match="read-only"):
        step.state.values[0] = 1
