"""Functions on shards: what they see, what they may return, and that each call counts once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dps.core.blocks import Layout
from dps.core.functions import RESULT_BYTES, Changed, Part, pack, parts, unpack
from dps.core.rules.rule import Momentum
from dps.core.shard import ShardState, Step, apply, result_of
from dps.core.updates import Call, Operation, UpdateId
from dps.errors import ConfigurationError, FunctionFailed
from dps.protocol import wire
from tests.support.builders import Model, leave
from tests.support.worlds import same_state

Parts = Mapping[str, Part]

RULE = Momentum(0.5)
MODEL = Model.of(w=np.zeros((40, 3), np.float32), b=np.zeros(5))
START = MODEL.state(RULE, w=np.arange(120, dtype=np.float32).reshape(40, 3), b=np.ones(5))


def call(number: int = 1, *arguments: Any, caller: str = "a/calls") -> Operation:
    return Operation("apply", UpdateId(caller, 1, number), call=Call("f", pack(arguments)))


def run(function: Callable[..., Any], op: Operation, state: ShardState = START) -> Step:
    return apply(MODEL.layout.shards[0], RULE, state, op, {"f": function})


def result(step: Step, op: Operation) -> Any:
    packed = result_of(step.state, op)
    assert packed is not None
    return unpack(packed)


def doubled(arrays: Parts) -> Changed:
    return Changed({"w": arrays["w"].values * 2}, "doubled")


# -- what a function sees --------------------------------------------------------------------------


def test_the_parts_of_all_shards_are_the_arrays() -> None:
    rng = np.random.default_rng(0)
    params = {
        "w": rng.normal(size=(70, 3)).astype(np.float32),
        "b": rng.normal(size=90),
        "c": np.ones(()),
    }
    layout = Layout.of(params, 3)
    found = {name: np.full(array.size, np.nan) for name, array in params.items()}
    for shard, shard_layout in enumerate(layout.shards):
        for name, part in parts(shard_layout, layout.gather(shard, params)[0]).items():
            assert part.values.dtype == params[name].dtype
            assert np.isnan(found[name][part.positions]).all()
            found[name][part.positions] = part.values
    for name, array in params.items():
        assert np.array_equal(found[name].reshape(array.shape), array)


def test_a_function_sees_the_weights_themselves_and_cannot_write_to_them() -> None:
    def write(arrays: Parts) -> None:
        assert all(np.shares_memory(part.values, START.values) for part in arrays.values())
        arrays["w"].values[0] = 7

    with pytest.raises(FunctionFailed, match="read-only"):
        run(write, call())


# -- what comes of it ------------------------------------------------------------------------------


def test_a_result_changes_nothing_else() -> None:
    op = call(1, 2)
    step = run(lambda arrays, k: float(arrays["b"].values.sum()) * k, op)
    assert result(step, op) == 10.0
    assert step.updates == ()
    assert (step.state.version, step.state.index) == (0, 1)
    assert step.state.values is START.values
    assert step.state.clocks == {}


def test_changed_values_are_an_update_and_leave_the_optimizer_alone() -> None:
    op = call()
    step = run(doubled, op)
    arrays = MODEL.arrays(step.state.values)
    assert np.array_equal(arrays["w"], 2 * np.arange(120).reshape(40, 3))
    assert arrays["w"].dtype == np.float32
    assert np.array_equal(arrays["b"], np.ones(5))
    assert (step.state.version, step.state.steps) == (1, 0)
    assert step.state.slots is START.slots
    assert [update.version for update in step.updates] == [1]
    assert result(step, op) == "doubled"


def test_a_call_that_comes_again_is_not_run_again() -> None:
    runs = []

    def once(arrays: Parts) -> Changed:
        runs.append(1)
        return Changed({"b": arrays["b"].values + 1}, len(runs))

    first = run(once, call())
    again = run(once, call(), first.state)
    assert again.outcome == "duplicate"
    assert again.state is first.state
    assert result(again, call()) == 1
    assert runs == [1]
    later = run(once, call(2), first.state)
    assert result(later, call(2)) == 2
    assert result_of(later.state, call(1)) is None, "its caller has gone on"


def test_callers_do_not_share_numbers_and_are_no_workers() -> None:
    state = run(doubled, call(caller="a/calls")).state
    step = run(doubled, call(caller="b/calls"), state)
    assert step.outcome == "applied"
    assert step.state.clocks == {}
    assert sum(p.applied for p in step.state.workers.values()) == step.state.version == 2


@pytest.mark.parametrize("incarnation", [1, 2])
def test_the_result_goes_with_its_caller_and_nothing_runs_again(incarnation: int) -> None:
    after = run(doubled, call()).state
    gone = run(doubled, leave("a/calls", incarnation), after)
    assert (gone.outcome, gone.state.results, gone.state.version) == ("applied", {}, 1)
    assert gone.state.index == after.index + 1
    again = run(doubled, call(), gone.state)
    assert (again.outcome, again.state) == ("duplicate", gone.state)
    assert run(doubled, leave("a/calls", incarnation), gone.state).outcome == "duplicate"
    other = run(doubled, leave("a", incarnation), after)
    assert other.state.results.keys() == {"a/calls"}, "a worker that is silent may yet ask"


def test_a_follower_is_told_what_came_of_it_and_runs_nothing() -> None:
    step = run(doubled, call())
    sent = wire.decode(wire.encode(step.operation))
    follower = apply(MODEL.layout.shards[0], RULE, START, sent, {})
    assert same_state(follower.state, step.state)
    assert wire.size(wire.encode(sent)) < 3 * START.values.nbytes


# -- what it may not -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (Changed({"x": np.zeros(3)}), "no array 'x' is on this shard; there are: b, w"),
        (Changed({"b": np.zeros(4)}), r"float64\[4\], expected float64\[5\]"),
        (Changed({"b": np.zeros(5, np.float32)}), r"float32\[5\], expected float64\[5\]"),
        (Changed({"b": [0.0] * 5}), "are list"),  # type: ignore[dict-item]
        (Changed({"b": np.full(5, np.nan)}), "hold NaN or infinity"),
        (Changed({"b": np.zeros(5)}, {1, 2}), "set is neither None, a number"),
        ({1: "one"}, "dict is neither"),
        (np.array([object()]), "ndarray is neither"),
        (np.zeros(RESULT_BYTES), "return less"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_may_not_be_returned_is_refused_whole(returned: Any, told: str) -> None:
    with pytest.raises(FunctionFailed, match=told):
        run(lambda arrays: returned, call())


def test_an_error_comes_with_its_traceback_and_without_ours() -> None:
    def inner(arrays: Parts) -> None:
        raise KeyError("nothing here")

    with pytest.raises(FunctionFailed, match="'f' failed") as failed:
        run(lambda arrays: inner(arrays), call())
    text = str(failed.value)
    assert "KeyError: 'nothing here'" in text
    assert 'raise KeyError("nothing here")' in text
    assert "dps/core" not in text


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_a_function_cannot_end_the_process(error: type[BaseException]) -> None:
    def end(arrays: object) -> None:
        raise error(3)

    with pytest.raises(FunctionFailed, match=f"{error.__name__}: 3"):
        run(end, call())


# -- how it travels --------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text()
    | npst.arrays(
        npst.integer_dtypes() | npst.floating_dtypes() | npst.boolean_dtypes(),
        npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
        elements={"allow_nan": False},
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


@pytest.mark.slow
@given(values)
def test_arguments_and_results_come_back_as_they_were(value: Any) -> None:
    assert same(unpack(pack(value)), value)


def test_tuples_come_back_as_tuples_and_numbers_of_numpy_as_plain_ones() -> None:
    found = unpack(pack((np.float32(0.5), np.int64(3), np.bool_(True))))
    assert found == (0.5, 3, True)
    assert [type(item) for item in found] == [float, int, bool]


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^function is neither"):
        pack([test_what_cannot_be_packed_is_named])
