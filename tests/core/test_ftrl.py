"""FTRL-proximal: each weight is where the problem of the paper is least, written out and solved."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from dps.core.rules.proximal import FTRL

RULES = [
    FTRL(),
    FTRL(0.5, beta=0.1, l1=0.3),
    FTRL(0.5, beta=0.0, l2=0.3),
    FTRL(1.0, beta=1.0, l1=0.5, l2=0.5),
    FTRL(0.05, beta=2.0, l1=2.0, l2=0.1),
]
DTYPES = ("float32", "float64")
SIZE, STEPS = 12, 25


def gradients(dtype: str) -> np.ndarray:
    """Steps × weights: of several magnitudes, with a third of zeros, and one weight without any."""
    random = np.random.default_rng(5)
    found = random.standard_normal((STEPS, SIZE)) + 0.3 * random.standard_normal(SIZE)
    found *= random.integers(0, 3, (STEPS, SIZE)) > 0
    found *= 10.0 ** random.integers(-2, 2, SIZE)
    found[:, -1] = 0
    return found.astype(dtype)


def history(rule: FTRL, start: np.ndarray, scales: list[float] | None = None) -> list[np.ndarray]:
    """The weights before each step, and after the last."""
    weights = [start]
    slots = {name: np.zeros_like(start) for name in rule.slots}
    for t, gradient in enumerate(gradients(str(start.dtype)), 1):
        scale = scales[t - 1] if scales else 1.0
        new, slots = rule.step(weights[-1], gradient, slots, t, scale)
        assert new.dtype == start.dtype
        assert all(slot.dtype == start.dtype for slot in slots.values())
        weights.append(new)
    return weights


def algorithm_1(rule: FTRL, steps: np.ndarray) -> float:
    """The paper's pseudocode for one weight that starts at zero, in plain numbers."""
    z = n = 0.0

    def weight() -> float:
        if abs(z) <= rule.l1:
            return 0.0
        rate = (rule.beta + math.sqrt(n)) / rule.alpha + rule.l2
        return -(z - math.copysign(rule.l1, z)) / rate

    for g in steps[steps != 0].tolist():  # only features of the example are updated
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / rule.alpha
        z += g - sigma * weight()
        n += g * g
    return weight()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_from_zero_it_is_the_papers_algorithm(rule: FTRL, dtype: str) -> None:
    weights = history(rule, np.zeros(SIZE, dtype))[-1]
    steps = gradients(dtype).astype(np.float64)
    expected = [algorithm_1(rule, steps[:, i]) for i in range(SIZE)]
    tolerance = {"float32": 2e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(weights, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("start", [0.0, 0.7])
def test_weights_are_where_the_papers_problem_is_least(rule: FTRL, start: float) -> None:
    steps = gradients("float64")
    weights = history(rule, np.full(SIZE, start))
    for i in range(SIZE - 1):
        for t in (1, 2, 7, STEPS):
            # The gradients so far, and the weights that they were found at.
            past = [(g[i], w[i]) for g, w in zip(steps[:t], weights, strict=False) if g[i]]
            if not past:
                assert weights[t][i] == start
                continue
            squares = np.cumsum([0.0] + [g * g for g, _ in past])
            rates = (rule.beta + np.sqrt(squares[1:])) / rule.alpha  # 1/η after each
            sigmas = np.diff(rates, prepend=0.0)

            def problem(w: float, past: list = past, sigmas: np.ndarray = sigmas) -> float:
                linear = sum(g for g, _ in past) * w
                near = sum(s * (w - x) ** 2 for s, (_, x) in zip(sigmas, past, strict=True))
                return float(linear + near / 2 + rule.l1 * abs(w) + rule.l2 / 2 * w * w)

            found = float(weights[t][i])
            far = 10 * (1 + abs(found))
            options = {"xatol": 1e-10}
            least = minimize_scalar(problem, bounds=(-far, far), method="bounded", options=options)
            assert problem(found) <= least.fun + 1e-9 * (1 + abs(least.fun))
            assert found == pytest.approx(least.x, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_without_a_gradient_stays_as_it_is(dtype: str) -> None:
    start = np.full(SIZE, 0.125, dtype)
    rule = FTRL(0.5, beta=0.0, l1=3.0, l2=1.0)
    last = history(rule, start)[-1]
    assert last[-1] == start[-1]
    # A square that underflows is as good as none.
    slots = {name: np.zeros(1, dtype) for name in rule.slots}
    tiny = np.array([1e-40 if dtype == "float32" else 1e-200], dtype)
    new, new_slots = rule.step(start[:1], tiny, slots, 1, 1.0)
    assert new[0] == start[0]
    assert not any(slot.any() for slot in new_slots.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_whose_square_is_not_finite_leaves_weights_finite(dtype: str) -> None:
    huge = np.array([np.finfo(dtype).max / 4, 1], dtype)
    rule, values = FTRL(), np.zeros(2, dtype)
    slots = {name: np.zeros_like(values) for name in rule.slots}
    with np.errstate(over="ignore"):
        for t in (1, 2):
            values, slots = rule.step(values, huge, slots, t, 1.0)
    assert np.isfinite(values).all()
