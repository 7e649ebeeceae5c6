"""RICA's gradient, the patches that it is shown on, and the picture of its filters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from scipy.optimize import minimize

from dps.core.rules.penalties import L1
from dps.errors import ConfigurationError
from examples.rica import draw, initial, l_bfgs, objective
from flows.config.experiment import load_experiment
from flows.config.workload import workload_of
from flows.workloads import Objective
from flows.workloads import patches as module
from flows.workloads.patches import PatchSource, load_patches
from flows.workloads.rica import reconstruction

RNG = np.random.default_rng(0)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    np.savez(tmp_path / "images.npz", x=RNG.integers(0, 256, (20, 12, 12)).astype(np.uint8))
    return tmp_path / "images.npz"


def test_the_gradient_equals_central_finite_differences() -> None:
    filters, x = RNG.standard_normal((5, 4)), RNG.standard_normal((30, 4))
    _, gradient = objective(filters, x)
    for i in range(filters.size):
        step = np.zeros_like(filters)
        step.flat[i] = 1e-6
        difference = (objective(filters + step, x)[0] - objective(filters - step, x)[0]) / 2e-6
        assert gradient.flat[i] == pytest.approx(difference, rel=1e-6, abs=1e-7)


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


def test_the_reference_gets_to_where_the_gradient_is_small() -> None:
    x = RNG.standard_normal((200, 4))
    start = RNG.standard_normal((5, 4))
    reached = l_bfgs(start, x)
    assert reached < objective(start, x)[0]
    best = min(l_bfgs(RNG.standard_normal((5, 4)), x) for _ in range(5))
    assert reached < best * 1.05


def test_patches_are_white(images: Path) -> None:
    patches = load_patches(PatchSource(500, 6, seed=1, path=images))
    components = patches.x.shape[1]
    assert patches.x.shape == (500, components)
    assert patches.patterns.shape == (components, 36)
    assert 30 <= components <= 35  # noise has no direction to leave out, but for the mean
    np.testing.assert_allclose(patches.x.T @ patches.x / 500, np.eye(components), atol=1e-9)
    np.testing.assert_allclose(patches.patterns.sum(axis=1), 0, atol=1e-9)


def test_every_process_gets_the_same_patches(images: Path) -> None:
    first, second = (load_patches(PatchSource(50, 6, seed=1, path=images)) for _ in range(2))
    np.testing.assert_array_equal(first.x, second.x)
    other = load_patches(PatchSource(50, 6, seed=2, path=images))
    assert not np.array_equal(first.x, other.x)


def test_images_that_cannot_give_patches_are_refused(tmp_path: Path, images: Path) -> None:
    with pytest.raises(ConfigurationError, match="images of 12 × 12, expected 13 × 13 at least"):
        load_patches(PatchSource(10, 13, path=images))
    np.savez(tmp_path / "grey.npz", x=np.full((3, 12, 12), 99, np.uint8))
    with pytest.raises(ConfigurationError, match=r"only 0 of 40 patches .* show anything"):
        load_patches(PatchSource(10, 6, path=tmp_path / "grey.npz"))


def test_without_fashion_mnist_the_digits_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find", lambda folder, sources: None)
    source = PatchSource(100, 4)
    assert source.named == "digits, as Fashion-MNIST is not installed"
    assert initial(source, 20).shape == (20, load_patches(source).x.shape[1])


def test_filters_are_drawn_as_tiles(tmp_path: Path) -> None:
    patterns = np.zeros((5, 9))
    patterns[1, 4], patterns[2, 0] = 3.0, -0.1
    draw(patterns, tmp_path / "new" / "filters.png")
    picture = matplotlib.image.imread(tmp_path / "new" / "filters.png")[::4, ::4, 0]
    assert picture.shape == (2 * 4, 3 * 4)
    assert picture[1, 5] == pytest.approx(1)  # the middle of the second tile
    assert picture[0, 8] == pytest.approx(0)
    assert picture[0, 0] == pytest.approx(0.5, abs=0.01)


def test_the_reference_of_packaged_experiments_is_a_local_minimum() -> None:
    """Scipy's L-BFGS-B, on the filters' positive and negative parts, whose sum is the penalty."""
    experiment = load_experiment("problems-rica-workers")
    workload, data = workload_of(experiment), experiment.dataset.load("train")
    penalty = experiment.optimizer.build_penalty()
    wanted = experiment.evaluation.objective
    assert isinstance(penalty, L1)
    assert wanted is not None
    start = workload.initial(np.random.default_rng([0, 0]))["filters"].astype(float)

    def filters(parts: np.ndarray) -> np.ndarray:
        return np.subtract(*np.split(parts, 2)).reshape(start.shape)

    def split(parts: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = reconstruction(
            filters(parts), data.x_train.astype(float), workload.sparsity
        )
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
    problem = Objective(replace(workload, dtype="float64"), penalty)
    score = problem.score({"filters": filters(found.x)}, data.x_train, data.y_train)
    assert score[0] == pytest.approx(found.fun, rel=1e-6)
    assert score[1] < 0.01
    for other in ("problems-rica-delays", "problems-rica-filters"):
        assert load_experiment(other).evaluation.objective == wanted
