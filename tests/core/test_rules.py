"""Update rules: they agree with independent references and never write into what they are given."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer

from dps.core.rules.clipping import Clipped
from dps.core.rules.decay import WeightDecay
from dps.core.rules.ftrl import FTRL
from dps.core.rules.penalties import L1, L2, ElasticNet, GroupL1
from dps.core.rules.proximal import DelayedProximal, Proximal
from dps.core.rules.rule import SGD, AdaGrad, Adam, AdamW, Momentum, UpdateRule, by_rows
from dps.core.rules.schedules import Cosine, Scheduled
from dps.core.rules.staleness import StalenessAware
from dps.errors import ConfigurationError

STEPS = 30
PLAIN = [
    SGD(0.1),
    Momentum(0.05),
    Momentum(0.2, momentum=0.0),
    Adam(),
    Adam(0.1, beta1=0.5, beta2=0.9, eps=1e-3),
    Adam(0.1, beta1=0.0, beta2=0.0),
]
ADAMW = [AdamW(), AdamW(0.1, 0.5, 0.9, 1e-3, 0.3), AdamW(0.1, weight_decay=0.0)]
ADAGRAD = [AdaGrad(), AdaGrad(0.5, eps=1e-3)]
RULES = [
    *PLAIN,
    *ADAGRAD,
    *ADAMW,
    FTRL(0.5, beta=0.5, l1=0.1, l2=0.2),
    *(Proximal(0.1, penalty) for penalty in (L1(0.5), L2(0.5), ElasticNet(0.5, 0.2))),
    DelayedProximal(2.0, 1.0, 4, L1(0.1)),
    StalenessAware(Adam()),
    WeightDecay(Momentum(0.05), 0.1),
    Scheduled(Clipped(AdamW(), norm=1.0), Cosine(10)),
]
DTYPES = ("float32", "float64")
RELATIVE = {"float32": 2e-5, "float64": 1e-12}


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
]
EVERY_ONE = [*RULES, Proximal(0.1, GroupL1(0.5))]


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


# One parameter at a time, in plain Python floats, as the textbooks write it.


def textbook_sgd(rule: SGD, w: float, gradients: list[float]) -> float:
    for g in gradients:
        w -= rule.learning_rate * g
    return w


def textbook_momentum(rule: Momentum, w: float, gradients: list[float]) -> float:
    m = 0.0
    for g in gradients:
        m = rule.momentum * m + g
        w -= rule.learning_rate * m
    return w


def textbook_adagrad(rule: AdaGrad, w: float, gradients: list[float]) -> float:
    s = 0.0
    for g in gradients:
        s += g**2
        w -= rule.learning_rate * g / (math.sqrt(s) + rule.eps)
    return w


def textbook_adam(rule: Adam, w: float, gradients: list[float]) -> float:
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m = rule.beta1 * m + (1 - rule.beta1) * g
        v = rule.beta2 * v + (1 - rule.beta2) * g**2
        unbiased_m, unbiased_v = m / (1 - rule.beta1**t), v / (1 - rule.beta2**t)
        w -= rule.learning_rate * unbiased_m / (math.sqrt(unbiased_v) + rule.eps)
    return w


def textbook_adamw(rule: AdamW, w: float, gradients: list[float]) -> float:
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        w -= rule.learning_rate * rule.weight_decay * w
        m = rule.beta1 * m + (1 - rule.beta1) * g
        v = rule.beta2 * v + (1 - rule.beta2) * g**2
        unbiased_m, unbiased_v = m / (1 - rule.beta1**t), v / (1 - rule.beta2**t)
        w -= rule.learning_rate * unbiased_m / (math.sqrt(unbiased_v) + rule.eps)
    return w


TEXTBOOK: dict[type, Callable[..., float]] = {
    SGD: textbook_sgd,
    Momentum: textbook_momentum,
    AdaGrad: textbook_adagrad,
    Adam: textbook_adam,
    AdamW: textbook_adamw,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [*PLAIN, *ADAGRAD, *ADAMW], ids=str)
def test_rule_agrees_with_the_textbook(rule: UpdateRule, dtype: str) -> None:
    values, gradients = problem(dtype)
    expected = [
        TEXTBOOK[type(rule)](rule, float(w), [float(g[i]) for g in gradients])
        for i, w in enumerate(values)
    ]
    np.testing.assert_allclose(
        trained(rule, values, gradients), expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", PLAIN, ids=str)
def test_rule_agrees_with_scikit_learn(rule: UpdateRule, dtype: str) -> None:
    values, gradients = problem(dtype)
    expected = values.copy()
    match rule:
        case SGD():
            optimizer = SGDOptimizer([expected], rule.learning_rate, momentum=0.0, nesterov=False)
        case Momentum():
            optimizer = SGDOptimizer(
                [expected], rule.learning_rate, momentum=rule.momentum, nesterov=False
            )
        case Adam():
            rule = replace(rule, eps=1e-30)  # scikit-learn adds it before the bias correction
            optimizer = AdamOptimizer(
                [expected], rule.learning_rate, rule.beta1, rule.beta2, rule.eps
            )
    for gradient in gradients:
        optimizer.update_params([expected], [gradient])
    np.testing.assert_allclose(
        trained(rule, values, gradients), expected, rtol=RELATIVE[dtype], atol=RELATIVE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", EVERY_ONE, ids=str)
def test_nothing_that_goes_in_is_written_to_or_handed_out_again(
    rule: UpdateRule, dtype: str
) -> None:
    values, (gradient, *_) = rows_for(rule, *problem(dtype))
    slots = {name: np.ones_like(values) for name in rule.slots}
    given = [values, gradient, *slots.values()]
    before = [array.tobytes() for array in given]
    for array in given:
        array.flags.writeable = False
    new, new_slots = rule.step(values, gradient, slots, 3, 1.0)
    assert [array.tobytes() for array in given] == before
    made = [new, *new_slots.values()]
    assert not any(np.shares_memory(a, b) for a in made for b in given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float, np.float32, np.float64], ids=lambda t: t.__name__)
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
        (AdaGrad(0.5), AdaGrad(0.125)),
        (Adam(0.5), Adam(0.125)),
        (AdamW(0.5, weight_decay=0.3), AdamW(0.125, weight_decay=0.3)),
        (WeightDecay(Adam(0.5), 0.3), WeightDecay(Adam(0.125), 0.3)),
        *((Proximal(0.5, p), Proximal(0.125, p)) for p in (L1(0.3), L2(0.3), ElasticNet(0.3, 1))),
        (Proximal(0.5, GroupL1(0.3)), Proximal(0.125, GroupL1(0.3))),
        (StalenessAware(SGD(0.5)), SGD(0.125)),
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


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "rule", [SGD, Momentum, AdaGrad, Adam, AdamW, lambda x: Proximal(x, L1(1))]
)
def test_a_learning_rate_that_is_negative_or_no_number_is_refused(
    rule: Callable[[float], UpdateRule], wrong: float
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"learning_rate=\S+, expected a number, 0 or above"
    ):
        rule(wrong)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda x: Momentum(0.1, momentum=x), "Momentum: momentum"),
        (lambda x: Adam(beta1=x), "Adam: beta1"),
        (lambda x: Adam(beta2=x), "Adam: beta2"),
        (lambda x: AdamW(beta1=x), "AdamW: beta1"),
        (lambda x: AdamW(beta2=x), "AdamW: beta2"),
    ],
)
@pytest.mark.parametrize("wrong", [-0.1, 1.0, 1.5, math.nan])
def test_a_decay_outside_of_its_range_is_refused(
    make: Callable[[float], UpdateRule], field: str, wrong: float
) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}=.*expected 0 or more and below 1"):
        make(wrong)


@pytest.mark.parametrize("eps", [0, 1e-50, math.nan])
@pytest.mark.parametrize("rule", [AdaGrad, Adam, AdamW])
def test_an_eps_that_is_nothing_in_float32_is_refused(
    rule: Callable[..., UpdateRule], eps: float
) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"Ada\w+: eps={eps}, expected a number of 1.2e-38"
    ):
        rule(eps=eps)


@pytest.mark.parametrize("strength", [-0.1, math.nan, math.inf, "0.1"])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda x: AdamW(weight_decay=x), "AdamW: weight_decay"),
        (lambda x: WeightDecay(SGD(0.1), x), "WeightDecay: strength"),
    ],
)
def test_a_weight_decay_that_is_none_is_refused(
    make: Callable[[float], UpdateRule], field: str, strength: float
) -> None:
    with pytest.raises(ConfigurationError, match=f"{field}=.*expected a number, 0 or above"):
        make(strength)


def test_weight_decay_is_the_gradient_of_half_the_squares() -> None:
    values, gradients = problem("float64")
    found = trained(WeightDecay(SGD(0.1), 0.5), values, gradients)
    for gradient in gradients:
        values = values - 0.1 * (gradient + 0.5 * values)
    np.testing.assert_allclose(found, values, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", EVERY_ONE, ids=str)
def test_where_the_result_goes_changes_no_bit(rule: UpdateRule, dtype: str) -> None:
    values, (gradient, *_) = rows_for(rule, *problem(dtype))
    slots = {name: np.full_like(values, 0.5) for name in rule.slots}
    expected, expected_slots = rule.step(values, gradient, slots, 2, 0.5)
    out = np.full_like(values, np.nan)
    found, found_slots = rule.step(values, gradient, slots, 2, 0.5, out=out)
    assert found is out
    assert found.tobytes() == expected.tobytes()
    assert {k: v.tobytes() for k, v in found_slots.items()} == {
        k: v.tobytes() for k, v in expected_slots.items()
    }


@pytest.mark.parametrize("rule", EVERY_ONE, ids=str)
def test_rules_are_values(rule: UpdateRule) -> None:
    assert rule == replace(rule)  # type: ignore[type-var]
    assert hash(rule) == hash(replace(rule))  # type: ignore[type-var]
    assert pickle.loads(pickle.dumps(rule)) == rule  # noqa: S301 - what was pickled just now
    with pytest.raises(FrozenInstanceError):
        setattr(rule, fields(rule)[0].name, 1.0)  # type: ignore[arg-type]
