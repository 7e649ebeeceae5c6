"""What users give is taken as it is meant, or refused with a message that names the argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dps
from dps.core.arguments import as_number, as_path, explained
from dps.errors import ConfigurationError

ODD: list[Any] = [
    *(None, True, -1, 2.5, float("nan"), 10**400, "", "1", "x" * 5000, b"x", [], {1: 2}, object()),
    *(int, len, np.array([1.0, 2.0]), np.ma.masked_array([1.0], [True]), 1j, Decimal("0.5"), ...),
]
NEEDED = {
    **dict.fromkeys(("learning_rate", "threshold", "share", "strength", "norm", "limit"), 0.1),
    **dict.fromkeys(("std", "l1", "l2", "l_var", "l_cov"), 0.1),
    **dict.fromkeys(("tau", "every", "updates", "width"), 2),
    **{"rule": dps.SGD(0.1), "penalty": dps.L1(0.1), "schedule": dps.Cosine(1000), "form": "bf16"},
    **{"rules": (("w", dps.SGD(0.1)),), "name": "t", "rows": np.ones((2, 2)), "above": dps.Chain()},
    **{"resource": "server"},
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


SGD, L1 = dps.SGD(0.1), dps.L1(0.1)
NUMBER, ABOVE, SHARE = "expected a number, 0 or above", "expected a number above 0", "below 1"
OTHER_RULE = "expected another update rule such as"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dps.SGD(-0.1), f"SGD: learning_rate=-0.1, {NUMBER}"),
        (lambda: dps.Momentum(0.1, momentum=1.0), f"Momentum: momentum=1.0, .*{SHARE}"),
        (lambda: dps.AdaGrad(eps=0), "AdaGrad: eps=0, expected a number of 1.2e-38"),
        (lambda: dps.Adam(eps=1e-50), "Adam: eps=1e-50, expected a number of 1.2e-38"),
        (lambda: dps.Adam(beta1=-0.1), f"Adam: beta1=-0.1, .*{SHARE}"),
        (lambda: dps.AdamW(beta2=float("nan")), f"AdamW: beta2=nan, .*{SHARE}"),
        (lambda: dps.AdamW(weight_decay=-1), f"AdamW: weight_decay=-1, {NUMBER}"),
        (lambda: dps.WeightDecay(SGD, "0.1"), f"WeightDecay: strength=.*{NUMBER}"),
        (lambda: dps.FTRL(alpha=0), f"FTRL: alpha=0, {ABOVE}"),
        (lambda: dps.FTRL(l1=float("inf")), "FTRL: l1=inf, expected a number"),
        (lambda: dps.L1(-0.1), f"L1: strength=-0.1, {NUMBER}"),
        (lambda: dps.GroupL1(float("nan")), f"GroupL1: strength=nan, {NUMBER}"),
        (lambda: dps.ElasticNet(0.1, -0.1), f"ElasticNet: l2=-0.1, {NUMBER}"),
        (lambda: dps.Proximal(0.1, 0.1), "Proximal: penalty=0.1, expected a penalty such as"),
        (lambda: dps.DelayedProximal(1.0, 1.0, 1.5, L1), "tau=1.5, .*0 or more whole updates"),
        (lambda: dps.DelayedProximal(-1.0, 1.0, 1, L1), "l_var=-1.0, expected a number"),
        (lambda: dps.StalenessAware(0.1), f"rule=0.1, {OTHER_RULE}"),
        (lambda: dps.StalenessAware(dps.StalenessAware(SGD)), OTHER_RULE),
        (lambda: dps.StalenessAware(dps.DelayCompensated(SGD, 1)), "must be outermost"),
        (lambda: dps.DelayCompensated(SGD, -1.0), "DelayCompensated: .*=-1.0, expected"),
        (lambda: dps.Clipped(SGD), "Clipped: expected norm=…, value=… or both"),
        (lambda: dps.Clipped(SGD, 1, -2), f"Clipped: value=-2, {ABOVE}"),
        (
            lambda: dps.Clipped(dps.DelayCompensated(dps.Clipped(SGD, 1), 1), 2),
            "is already Clipped",
        ),
        (lambda: dps.StepDecay(0), "StepDecay: every=0, expected 1 or more whole updates"),
        (lambda: dps.Cosine(10, 1.0), f"Cosine: least=1.0, expected at least 0 and {SHARE}"),
        (lambda: dps.WarmUp(10, 0.5), r"WarmUp: then=0.5, expected a schedule such as Cosine"),
        (lambda: dps.Scheduled(SGD, dps.Cosine), "Scheduled: schedule=.*expected a schedule"),
        (lambda: dps.Scheduled(dps.Scheduled(SGD, dps.Cosine(9)), dps.Cosine(9)), OTHER_RULE),
        (lambda: dps.PerArray((("a", SGD), ("a", SGD))), r"optimizer\['a'\] is given twice"),
        (lambda: dps.SignificantlyModified(1.0, decay="1/sqrt(t)"), "decay=.*expected"),
        (lambda: dps.KKT(1.0, delta=2.0), "delta=2.0, expected"),
        (lambda: dps.RandomSkip(0.5, seed=1 << 63), "seed=.*expected"),
        (lambda: dps.TopK(1.5), "1.5, expected"),
        (lambda: dps.Quantise("fp8"), "form='fp8', expected"),
        (lambda: dps.SSP(-1), "SSP: tau=-1, expected 0 or more whole updates"),
        (lambda: dps.ConsistentHash(10_001), "ConsistentHash: virtual_nodes=10001, expected"),
        (lambda: dps.SparseSpec("emb", 0), "width=0, expected"),
        (lambda: dps.SparseSpec("emb", 2, "int64"), "dtype='int64', expected"),
        (lambda: dps.Uniform(1.0, seed=-1), "seed=-1, expected"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    "number",
    [
        dps.SSP(np.int64(3)).tau,  # type: ignore[arg-type]
        dps.ConsistentHash(np.int64(3)).virtual_nodes,  # type: ignore[arg-type]
        dps.RandomSkip(0.1, np.int64(3)).seed,  # type: ignore[arg-type]
        dps.DelayedProximal(1.0, 1.0, np.int64(3), L1).tau,  # type: ignore[arg-type]
        dps.SparseSpec("emb", np.int64(3)).width,  # type: ignore[arg-type]
        dps.Normal(0.5, np.uint8(3)).seed,  # type: ignore[arg-type]
    ],
)
def test_whole_numbers_of_numpy_become_plain_ones(number: Any) -> None:
    """They cross the wire."""
    assert (type(number), number) == (int, 3)


@pytest.mark.parametrize(
    ("given", "number"),
    [(2, 2.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array([[3.0]]), 3.0), (Decimal(4), 4.0)],
)
def test_what_holds_one_number_is_it(given: Any, number: float) -> None:
    assert as_number("loss", given) == number


def test_a_path_is_text_or_path_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert as_path("path", Path("a/b")) == "a/b"
    assert as_path("path", Path("~/b")) == as_path("path", "~/b") == "/home/me/b"
    assert as_path("path", "s3://bucket/~x") == "s3://bucket/~x"
    assert dps.Checkpoint(path=Path("~/c")).path == "/home/me/c"  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^path='~no-one/a': no such home"):
        as_path("path", "~no-one/a")
    for odd in (b"a", "", "  ", "a\0", 3, None, ["a"]):
        with pytest.raises(ConfigurationError, match=r"^path=.*, expected a path"):
            as_path("path", odd)
