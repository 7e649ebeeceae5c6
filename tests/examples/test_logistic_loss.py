"""L1-logistic regression's arithmetic: gradients, norms, the bound, and the data it is shown on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import vstack

from dps import L1, Proximal
from examples.aggregated import Aggregated
from examples.l1_logistic import step_rule
from examples.logistic_loss import Share, Spread, liblinear, objective_and_bound
from examples.sparse_data import Digits, Source, Synthetic, survey

SYNTHETIC = Synthetic(examples=600, features=40, seed=3, nonzeros=5, piece=100)
SPREAD = Spread.of(SYNTHETIC, blocks=3, workers=2)
RNG = np.random.default_rng(0)


def split(whole: np.ndarray, spread: Spread = SPREAD) -> dict[str, np.ndarray]:
    return {name: whole[columns] for name, columns in spread.blocks.items()}


def rows(source: Source, workers: int = 1) -> np.ndarray:
    shares = [vstack(list(source.share(i, workers))).toarray() for i in range(workers)]
    found: np.ndarray = np.concatenate(shares)
    return found


def loss(whole: np.ndarray) -> float:
    return float(np.logaddexp(0, -(rows(SYNTHETIC) @ whole)).mean())


def share_at(whole: np.ndarray, index: int) -> Share:
    share = SPREAD.share(index)
    share.follow(split(whole))
    return share


def test_the_shares_gradients_sum_to_central_finite_differences() -> None:
    whole = RNG.standard_normal(40)
    shares = [share_at(whole, index) for index in range(2)]
    found = [sum(share.gradient(name) for share in shares) for name in SPREAD.blocks]
    steps = 1e-6 * np.eye(40)
    differences = [(loss(whole + step) - loss(whole - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(np.concatenate(found), differences, atol=1e-9)


@pytest.mark.parametrize("penalty", [0.001, 0.03])
def test_no_weights_get_below_the_bound_and_the_best_ones_get_there(penalty: float) -> None:
    best = np.concatenate([*liblinear(SPREAD, penalty).values()])
    reached = []
    for whole in (best, np.zeros(40), best + 0.1 * RNG.standard_normal(40)):
        parts = [share_at(whole, index).part() for index in range(2)]
        objective, bound = objective_and_bound(parts, penalty)
        assert objective == pytest.approx(loss(whole) + penalty * np.abs(whole).sum())
        reached.append((objective, bound))
    (least, highest), *others = reached
    assert least == pytest.approx(highest, rel=1e-4)
    assert all(bound <= least <= objective for objective, bound in [(least, highest), *others])


def test_the_step_is_the_papers_for_the_delays_that_can_be() -> None:
    curvature = np.array([[4.0, 2.0], [2.0, 3.0]])
    rule = step_rule(curvature, workers=3, penalty=0.5)
    # A round of 2 blocks by 3 workers, and two others that may be 1 ahead or behind.
    assert rule.tau == 3 * 2 + 2 * 3
    assert rule.learning_rate == pytest.approx(1 / (4 + 12 * 3), rel=1e-6)


# -- the rule of the sum ---------------------------------------------------------------------------


def test_the_sum_is_that_of_every_workers_latest_gradient() -> None:
    rule, inner = Aggregated(Proximal(0.1, L1(0.2))), Proximal(0.1, L1(0.2))
    values, slots = np.ones(4, np.float32), {"sum": np.zeros(4, np.float32)}
    latest = {0: np.zeros(4, np.float32), 1: np.zeros(4, np.float32)}
    for t, worker in enumerate([0, 1, 1, 0, 1], 1):
        gradient = RNG.standard_normal(4).astype(np.float32)
        change, latest[worker] = gradient - latest[worker], gradient
        expected, _ = inner.step(values, latest[0] + latest[1], {}, t, 1.0)
        values, slots = rule.step(values, change, slots, t, 1.0)
        np.testing.assert_allclose(values, expected, atol=1e-6)
        assert values.dtype == slots["sum"].dtype == np.float32


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [SYNTHETIC, Digits()], ids=["synthetic", "digits"])
def test_the_examples_do_not_depend_on_how_many_share_them(source: Source) -> None:
    whole = rows(source)
    assert whole.shape == (source.examples, source.features)
    for workers in (2, 3):
        shared = rows(source, workers)
        np.testing.assert_array_equal(np.sort(shared, axis=0), np.sort(whole, axis=0))


def test_a_file_is_shared_by_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.svm"
    path.write_text("".join(f"{1 + i % 2} {1 + i % 3}:{i}\n" for i in range(7)))
    source = survey(path)
    assert (source.examples, source.features) == (7, 4)
    expected = np.zeros((7, 4))
    expected[np.arange(7), np.arange(7) % 3] = np.arange(7)
    expected[:, 3] = np.sqrt((3**2 + 6**2) / 7)  # the root mean square of the largest feature
    expected *= np.where(np.arange(7) % 2, 1, -1)[:, None]
    (share,) = source.share(1, 2)
    np.testing.assert_array_equal(share.toarray(), expected[1::2])
