"""What users give is taken as it is meant, or refused with a message that names the argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dps
from dps.core.arguments import as_gradient, as_number, as_path, check_function, explained
from dps.errors import ConfigurationError, ShapeMismatch

# -- arguments of constructors ---------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, -1, 2.5, float("nan"), 10**400, "", "1", "x" * 5000, b"x", [], {1: 2}, object()),
    *(int, len, np.array([1.0, 2.0]), np.ma.masked_array([1.0], [True]), 1j, Decimal("0.5"), ...),
]
NEEDED = {
    **dict.fromkeys(("learning_rate", "threshold", "share", "strength", "norm", "limit"), 0.1),
    **dict.fromkeys(("std", "l1", "l2", "l_var", "l_cov"), 0.1),
    **dict.fromkeys(("tau", "every", "updates", "width"), 2),
    **{"rule": dps.SGD(0.1), "penalty": dps.L1(0.1), "schedule": dps.Constant(), "form": "bf16"},
    **{"rules": (("w", dps.SGD(0.1)),), "name": "t", "rows": np.ones((2, 2)), "above": dps.Chain()},
}
# What dps makes itself, and a user reads.
MADE = (dps.Changed, dps.Failover, dps.Loss, dps.Part, dps.Sending)
CHOICES = [
    found
    for found in map(partial(getattr, dps), dps.__all__)
    if isinstance(found, type) and dataclasses.is_dataclass(found) and found not in MADE
]


def refusal(make: Callable[[], Any]) -> str | None:
    """The message of what is refused; None: it is taken."""
    try:
        make()
    except ConfigurationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("cls", CHOICES, ids=lambda cls: cls.__name__)
def test_an_odd_value_is_taken_or_refused_by_its_name(cls: Any) -> None:
    fields = dataclasses.fields(cls)
    needed = {
        field.name: NEEDED[field.name]
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING or cls is dps.Clipped
        if field.name != "value"
    }
    for field in fields:
        for odd in ODD:
            message = refusal(partial(cls, **{**needed, field.name: odd}))
            if message is not None:
                assert len(message) < 400
                assert field.name in message or message.startswith("optimizer"), message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dps.Adam(lr=0.1),  # type: ignore[call-arg]
            "Adam: got an unexpected keyword argument 'lr'; did you mean 'learning_rate'? it takes"
            ": learning_rate, beta1, beta2, eps",
        ),
        (
            lambda: dps.Timings(leese=2.0),  # type: ignore[call-arg]
            "Timings: got an unexpected keyword argument 'leese'; did you mean 'lease'? it takes",
        ),
        (lambda: dps.SGD(), "SGD: missing a required argument: 'learning_rate'; it takes: learn"),  # type: ignore[call-arg]
        (lambda: dps.BSP(4), "BSP: too many positional arguments; it takes: nothing"),  # type: ignore[call-arg]
        (
            lambda: dps.ParameterServer(None, {}, optimiser=None),  # type: ignore[call-arg]
            "ParameterServer: got an unexpected keyword argument 'optimiser'; did you mean 'optimi",
        ),
    ],
)
def test_a_wrong_argument_is_told_which_there_are(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_a_type_error_of_another_kind_stays_one() -> None:
    @explained
    class Own:
        def __init__(self, size: int) -> None:
            "a" + size  # type: ignore[operator]

    with pytest.raises(TypeError, match="can only concatenate"):
        Own(1)


def test_what_was_chosen_is_shown_in_a_line() -> None:
    table = dps.SparseSpec("t", 3, initial=np.zeros((1000, 3)))
    assert "initial=Given(float64[1000, 3])" in repr(table)
    assert "100 in all" in repr(dps.Model({f"w{n}": np.zeros(1) for n in range(100)}))


# -- functions -------------------------------------------------------------------------------------


def plain(weights: Any) -> int:
    return 0


async def later(weights: Any) -> int:
    return 0


def step_by_step(weights: Any) -> Iterator[int]:
    yield 0


class Callables:
    def __call__(self, weights: Any) -> int:
        return 0

    def method(self, weights: Any) -> int:
        return 0

    async def later(self, weights: Any) -> int:
        return 0


class Later:
    async def __call__(self, weights: Any) -> int:
        return 0


def two(first: int, weights: Any, more: int = 0) -> int:
    return 0


@pytest.mark.parametrize(
    "function",
    [plain, Callables(), Callables().method, partial(two, 1), len, lambda *given: 0, int],
)
def test_what_can_be_called_is_a_function(function: Any) -> None:
    check_function("score", function, ["weights"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        *((odd, r"expected a function: function\(weights\)") for odd in (None, 3, "plain")),
        *((odd, "is async or a generator") for odd in (later, Later(), Callables().later)),
        (partial(later), "is async or a generator"),
        (step_by_step, "is async or a generator"),
        (lambda: 0, "too many positional arguments"),
        (two, "missing a required argument: 'weights'"),
    ],
)
def test_what_could_not_run_is_no_function(function: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^score=.*{message}"):
        check_function("score", function, ["weights"])


# -- arrays, numbers, paths ------------------------------------------------------------------------


class Tagged(np.ndarray):
    """A subclass of an array."""


@pytest.mark.parametrize(
    "given",
    [
        np.array([1.0, -2.0]),
        np.array([1.0, -2.0], np.float16),
        np.array([1.0, -2.0], ">f4"),
        np.array([9.0, 1.0, 9.0, -2.0], np.float32)[1::2],
        np.array([-2.0, 1.0], np.float32)[::-1],
        np.array([1.0, -2.0], np.float32).view(Tagged),
        np.rec.array(np.array([1.0, -2.0])),
    ],
)
def test_a_gradient_of_floats_becomes_one_of_the_parameter_s_dtype(given: Any) -> None:
    found = as_gradient("'w'", given, "float32", ShapeMismatch)
    assert type(found) is np.ndarray
    assert found.dtype == np.float32
    assert found.dtype.isnative
    assert found.tolist() == [1.0, -2.0]


def test_a_gradient_that_would_lose_something_is_refused_or_left_as_it_is() -> None:
    with pytest.raises(ShapeMismatch, match="'w' is a masked array; fill it first"):
        as_gradient("'w'", np.ma.masked_array([1.0, 2.0], [True, False]), "float64", ShapeMismatch)
    for odd in (np.ones(2, complex), np.ones(2, int), np.array([None]), None, [1.0]):
        assert as_gradient("'w'", odd, "float32", ShapeMismatch) is odd  # for the layout to refuse


def test_a_matrix_is_an_array_of_two_dimensions() -> None:
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0, 2.0]])
    found = as_gradient("'w'", matrix, "float64", ShapeMismatch)
    assert (type(found), found.shape) == (np.ndarray, (1, 2))


@pytest.mark.parametrize(
    ("given", "number"),
    [(2, 2.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array([[3.0]]), 3.0), (Decimal(4), 4.0)],
)
def test_what_holds_one_number_is_it(given: Any, number: float) -> None:
    assert as_number("loss", given) == number


@pytest.mark.parametrize(
    "odd", [None, "0.5", b"1", 1j, np.ones(2), [1.0], {}, 10**400, np.ma.masked, np.array(1j)]
)
def test_what_is_no_number_is_refused(odd: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^loss=.*, expected a number$"):
        as_number("loss", odd)


def test_a_path_is_text_or_path_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert as_path("path", Path("a/b")) == "a/b"
    assert as_path("path", Path("~/b")) == as_path("path", "~/b") == "/home/me/b"
    assert as_path("path", "s3://bucket/~x") == "s3://bucket/~x"
    assert dps.Checkpoint(path=Path("~/c")).path == "/home/me/c"  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^path='~no-one/a': there is no such home"):
        as_path("path", "~no-one/a")
    for odd in (b"a", "", "  ", "a\0", 3, None, ["a"]):
        with pytest.raises(ConfigurationError, match=r"^path=.*, expected a path"):
            as_path("path", odd)
