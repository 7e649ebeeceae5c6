"""Update rules: precision and the factor on the learning rate (references: test_torch_optim)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from dps import ParameterServer, SparseSpec
from dps.core.rules.proximal import FTRL, L1, L2, DelayedProximal, ElasticNet, GroupL1, Proximal
from dps.core.rules.rule import SGD, AdaGrad, Adam, AdamW, Momentum, UpdateRule, by_rows
from dps.core.rules.wrappers import Accumulated, StalenessAware, WeightDecay
from dps.errors import ConfigurationError
from dps.testing import VirtualCluster

STEPS = 30
DTYPES = ("float32", "float64")

OF_ONE_NUMBER: list[Callable[[float], UpdateRule]] = [
    *(SGD, Momentum, AdaGrad, Adam, AdamW, FTRL),
    lambda x: AdamW(x, weight_decay=x),
    lambda x: WeightDecay(SGD(x), x),
    lambda x: FTRL(x, x, x, x),
    lambda x: Proximal(x, L1(x)),
    lambda x: Proximal(x, L2(x)),
    lambda x: Proximal(x, ElasticNet(x, x)),
    lambda x: Proximal(x, GroupL1(x)),
    lambda x: DelayedProximal(x, x, 1, L1(x), eps=x),
    lambda x: StalenessAware(AdaGrad(x, eps=x)),
    lambda x: Accumulated(Adam(x), 3),
]


def problem(dtype: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Values, and the gradients of some steps: of all magnitudes, and zero now and then."""
    random = np.random.default_rng(7)
    size = 20
    scales = 10.0 ** random.integers(-4, 4, size)
    gradients = [
        (random.standard_normal(size) * scales * random.integers(0, 2, size)).astype(dtype)
        for _ in range(STEPS)
    ]
    return random.standard_normal(size).astype(dtype), gradients


def rows_for(
    rule: UpdateRule, values: np.ndarray, gradients: list[np.ndarray]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The problem as the rule gets it: some by rows."""
    if not by_rows(rule):
        return values, gradients
    return values.reshape(-1, 4), [g.reshape(-1, 4) for g in gradients]


def trained(rule: UpdateRule, values: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    slots: Mapping[str, np.ndarray] = {name: np.zeros_like(values) for name in rule.slots}
    for t, gradient in enumerate(gradients, 1):
        values, slots = rule.step(values, gradient, slots, t, 1.0)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [np.float32, np.float64], ids=lambda t: t.__name__)
@pytest.mark.parametrize("rule", OF_ONE_NUMBER)
def test_precision_stays_whatever_kind_of_number_the_learning_rate_is(
    rule: Callable[[float], UpdateRule], number: type, dtype: str
) -> None:
    made = rule(number(0.125))
    values, gradients = rows_for(made, *problem(dtype))
    assert trained(made, values, gradients).dtype == dtype
    assert trained(made, values, gradients).tobytes() == (
        trained(rule(0.125), values, gradients).tobytes()
    )
    slots = {name: np.zeros_like(values) for name in made.slots}
    new_slots = made.step(values, gradients[0], slots, 1, 0.5)[1]
    assert new_slots.keys() == set(made.slots)
    assert all(slot.dtype == dtype for slot in new_slots.values())


@pytest.mark.parametrize(
    ("rule", "slower"),
    [
        (SGD(0.5), SGD(0.125)),
        (Momentum(0.5), Momentum(0.125)),
        (Momentum(0.5, nesterov=True), Momentum(0.125, nesterov=True)),
        (AdaGrad(0.5), AdaGrad(0.125)),
        (Adam(0.5), Adam(0.125)),
        (AdamW(0.5, weight_decay=0.3), AdamW(0.125, weight_decay=0.3)),
        (WeightDecay(Adam(0.5), 0.3), WeightDecay(Adam(0.125), 0.3)),
        *((Proximal(0.5, p), Proximal(0.125, p)) for p in (L1(0.3), L2(0.3), ElasticNet(0.3, 1))),
        (Proximal(0.5, GroupL1(0.3)), Proximal(0.125, GroupL1(0.3))),
        (StalenessAware(SGD(0.5)), SGD(0.125)),
        (Accumulated(SGD(0.5), 2), Accumulated(SGD(0.125), 2)),
    ],
    ids=str,
)
def test_scale_is_a_factor_on_the_learning_rate(rule: UpdateRule, slower: UpdateRule) -> None:
    values, (gradient, *_) = rows_for(rule, *problem("float64"))
    slots = {name: np.ones_like(values) for name in rule.slots}
    scaled, scaled_slots = rule.step(values, gradient, slots, 2, 0.25)
    expected, expected_slots = slower.step(values, gradient, slots, 2, 1.0)
    np.testing.assert_allclose(scaled, expected, rtol=1e-15)
    assert all((scaled_slots[name] == expected_slots[name]).all() for name in slots)


def test_accumulated_gradients_make_one_step_with_their_mean() -> None:
    values, gradients = problem("float64")
    found = trained(Accumulated(Adam(0.1), 5), values, gradients)
    means = [np.mean(gradients[at : at + 5], axis=0) for at in range(0, STEPS, 5)]
    np.testing.assert_allclose(found, trained(Adam(0.1), values, means), rtol=1e-12)


def test_accumulated_is_not_for_itself_nor_for_sparse_tables() -> None:
    with pytest.raises(ConfigurationError, match="already Accumulated"):
        Accumulated(WeightDecay(Accumulated(SGD(0.1), 2), 0.1), 2)
    tables = [SparseSpec("t", 2)]
    with VirtualCluster() as cluster, pytest.raises(ConfigurationError, match="is a sparse table"):
        ParameterServer(cluster, {}, tables=tables, optimizer=Accumulated(SGD(0.1), 2))
