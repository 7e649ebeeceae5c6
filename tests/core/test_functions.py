"""Functions on shards: what they see, what they may return, and that each call counts once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from dps.core.functions import RESULT_BYTES, Changed, Part, average, pack, unpack
from dps.core.rules.rule import Momentum
from dps.core.shard import ShardState, StateMachine, Step, result_of
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
    return StateMachine(MODEL.layout.shards[0], RULE, {"f": function}).apply(state, op)


def result(step: Step, op: Operation) -> Any:
    packed = result_of(step.state, op)
    assert packed is not None
    return unpack(packed)


def doubled(arrays: Parts) -> Changed:
    return Changed({"w": arrays["w"].values * 2}, "doubled")


def test_a_function_sees_the_weights_themselves_and_cannot_write_to_them() -> None:
    def write(arrays: Parts) -> None:
        assert all(np.shares_memory(part.values, START.values) for part in arrays.values())
        arrays["w"].values[0] = 7

    with pytest.raises(FunctionFailed, match="read-only"):
        run(write, call())


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


def test_an_average_has_the_share_of_the_caller() -> None:
    half = average({"b": Part(np.ones(2), ((0, 2),))}, {"b": np.array([3.0, 5.0])}, 0.5)
    assert half.arrays["b"].tolist() == [2.0, 3.0]
    assert half.result == {"b": [[[0, 2]], half.arrays["b"]]}


def test_an_average_of_one_caller_replaces_what_is_not_finite() -> None:
    wild = {"b": Part(np.array([np.nan, np.inf, 1.0]), ((0, 3),))}
    assert average(wild, {"b": np.zeros(3)}, 1.0).arrays["b"].tolist() == [0.0, 0.0, 0.0]


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
    follower = StateMachine(MODEL.layout.shards[0], RULE).apply(START, sent)
    assert same_state(follower.state, step.state)
    assert wire.size(wire.encode(sent)) < 3 * START.values.nbytes


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (Changed({"x": np.zeros(3)}), "no array 'x' is on this shard; expected one of b, w"),
        (Changed({"b": np.zeros(4)}), r"float64\[4\], expected float64\[5\]"),
        (Changed({"b": [0.0] * 5}), "are list"),  # type: ignore[dict-item]
        (Changed({"b": np.full(5, np.nan)}), "hold NaN or infinity"),
        (Changed({"b": np.zeros(5)}, {1, 2}), "set cannot be sent, expected None, a number"),
        (np.array([object()]), "ndarray cannot be sent"),
        (np.zeros(RESULT_BYTES), "return less"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_may_not_be_returned_is_refused_whole(returned: Any, told: str) -> None:
    with pytest.raises(FunctionFailed, match=told):
        run(lambda arrays: returned, call())


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_function_cannot_end_the_process(error: type[BaseException]) -> None:
    def end(arrays: object) -> None:
        raise error(3)

    with pytest.raises(FunctionFailed, match=f"{error.__name__}: 3"):
        run(end, call())


def test_what_is_packed_comes_back_and_numbers_of_numpy_as_plain_ones() -> None:
    found = unpack(pack((np.float32(0.5), np.int64(3), np.bool_(True))))
    assert found == (0.5, 3, True)
    assert [type(item) for item in found] == [float, int, bool]
    nested = {"a": [None, "text", 2**60, {"b": np.arange(6, dtype=np.int16).reshape(2, 3)}]}
    back = unpack(pack(nested))["a"]
    assert back[:3] == nested["a"][:3]
    assert (back[3]["b"].dtype, back[3]["b"].tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^function cannot be sent"):
        pack([test_what_cannot_be_packed_is_named])
