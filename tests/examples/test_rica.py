"""RICA's gradient, the patches that it is shown on, and the picture of its filters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from configs.studies.rica import reconstruction
from dps.core.rules.proximal import L1
from examples.images import PatchSource
from examples.rica import SPARSITY, objective
from flows.config.experiment import load_experiment
from flows.config.trials import load_trials
from flows.config.workload import workload_of
from flows.workloads import Objective

RNG = np.random.default_rng(0)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    np.savez(tmp_path / "images.npz", x=RNG.integers(0, 256, (20, 12, 12)).astype(np.uint8))
    return tmp_path / "images.npz"


def test_the_objective_is_that_of_the_paper() -> None:
    filters, x = RNG.standard_normal((5, 4)), RNG.standard_normal((30, 4))
    expected = np.mean(
        [
            0.5 * np.sum((filters.T @ (filters @ row) - row) ** 2)
            + 0.5 * np.sqrt((filters @ row) ** 2 + 0.01).sum()
            for row in x
        ]
    )
    assert objective(filters, x)[0] == pytest.approx(expected)


def test_patches_are_white(images: Path) -> None:
    x, patterns = PatchSource(500, 6, seed=1, path=images).patches()
    components = x.shape[1]
    assert x.shape == (500, components)
    assert patterns.shape == (components, 36)
    assert 30 <= components <= 35  # noise has no direction to leave out, but for the mean
    np.testing.assert_allclose(x.T @ x / 500, np.eye(components), atol=1e-9)
    np.testing.assert_allclose(patterns.sum(axis=1), 0, atol=1e-9)


def test_the_reference_of_packaged_experiments_is_a_local_minimum() -> None:
    """Scipy's L-BFGS-B, on the filters' positive and negative parts, whose sum is the penalty."""
    experiment = load_trials("studies/problems-rica-workers")[1][0].config
    workload, data = workload_of(experiment), experiment.dataset.load("train")
    penalty = experiment.optimizer.build_penalty()
    wanted = experiment.evaluation.objective
    assert isinstance(penalty, L1)
    assert wanted is not None
    start = workload.initial(np.random.default_rng([0, 0]))["filters"].astype(float)

    def filters(parts: np.ndarray) -> np.ndarray:
        return np.subtract(*np.split(parts, 2)).reshape(start.shape)

    def split(parts: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = reconstruction(filters(parts), data.x_train.astype(float), SPARSITY)
        slope = np.concatenate([gradient.ravel(), -gradient.ravel()]) + penalty.strength
        return loss + penalty.strength * float(parts.sum()), slope

    parts = np.concatenate([np.maximum(start, 0).ravel(), np.maximum(-start, 0).ravel()])
    options: dict[str, Any] = {"maxiter": 500, "maxfun": 800, "ftol": 1e-8, "maxcor": 20}
    found = minimize(
        split,
        parts,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * parts.size,
        options=options,
    )
    assert wanted.reference == pytest.approx(found.fun, rel=1e-3)
    problem = Objective(workload, penalty)
    score = problem.score({"filters": filters(found.x)}, data.x_train, data.y_train)
    assert score[0] == pytest.approx(found.fun, rel=1e-6)
    assert score[1] < 0.01
    for other in ("studies/problems-rica-delays", "studies/problems-rica-filters"):
        assert load_experiment(other).evaluation.objective == wanted
