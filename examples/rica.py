"""RICA (reconstruction ICA) of image patches.

F(W) = (1/N)·Σ ½·‖WᵀW·xᵢ − xᵢ‖² + λ·Σⱼ √((wⱼ·xᵢ)² + ε) over whitened patches x is the objective:
rows of W become filters that respond rarely and still explain the patches (Le et al. 2011). It is
the second problem of Li et al. (NIPS 2014, section 5.2), with a loss that is not convex. Workers
push gradients of batches of their own patches, and the server steps with Adam; the last batches are
large, so that the weights converge. The rounds are synchronous: with stale gradients, Adam would
circle around the minimum at this learning rate.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from configs.studies.rica import random_filters, reconstruction
from dps import BSP, Adam, ParameterServer, Worker
from examples.images import PatchSource
from examples.outcome import PATIENT, Outcome, Task
from flows.workloads import batches

if TYPE_CHECKING:
    from distributed import Client

Array = npt.NDArray[np.float64]

TOLERANCE = 0.01
SPARSITY = 0.5  # λ
RULE = Adam(0.005)
Plan = tuple[tuple[int, int], ...]
PLAN: Plan = ((1500, 200), (400, 1000), (200, 5000))  # steps of all workers, patches in a batch
SIZES = {"small": (10_000, 8, 64), "large": (100_000, 12, 192)}  # patches, pixels, filters


def objective(filters: Array, x: Array) -> tuple[float, Array]:
    """Return F over some patches, and its gradient.

    Parameters
    ----------
    filters
        W: filters × components.
    x
        Patches × components.
    """
    return reconstruction(filters, x, SPARSITY)


def initial(source: PatchSource, filters: int) -> Array:
    """Return filters in random directions, of a length that about reconstructs the patches."""
    components = source.patches()[0].shape[1]
    return random_filters(np.random.default_rng([source.seed, 1]), filters, components)


def train(source: PatchSource, plan: Plan, worker: Worker) -> None:
    """Push gradients of batches of this worker's patches."""
    x = source.patches()[0][worker.index :: worker.workers]
    rng = np.random.default_rng([source.seed, 2, worker.index])
    weights = worker.pull()
    for steps, size in plan:
        chosen = batches(rng, len(x), min(size, len(x)))
        for _ in range(steps // worker.workers):
            value, gradient = objective(weights["filters"], x[next(chosen)])
            worker.report(loss=value)
            weights = worker.push_pull({"filters": gradient})


def check(task: Task) -> None:
    """Refuse images that are smaller than a patch, without solving anything."""
    _source(task).images()


def _source(task: Task) -> PatchSource:
    count, size, _ = SIZES[task.size]
    return PatchSource(count, size, task.seed, task.data)


def solve(client: Client, task: Task) -> Outcome:
    """Train, and compare with L-BFGS from the same filters."""
    count, size, number = SIZES[task.size]
    source = _source(task)
    start = initial(source, number)
    with ParameterServer(
        client,
        {"filters": start},
        shards=task.shards,
        optimizer=RULE,
        consistency=BSP(),
        recovery=task.recovery,
        timings=PATIENT,
    ) as ps:
        client.gather(ps.run(partial(train, source, PLAN), task.workers))
        filters = ps.pull()["filters"]
    x, patterns = source.patches()
    reached, reference = objective(filters, x)[0], l_bfgs(start, x)
    picture = task.output / "rica.png"
    draw(filters @ patterns, picture)
    notes = (
        f"{count:,} patches of {size} × {size} pixels from {source.named}, whitened to "
        f"{start.shape[1]} components; {number} filters, λ = {SPARSITY:g}",
        f"the objective at the start was {objective(start, x)[0]:.5g}",
    )
    named = "scipy's L-BFGS from the same start"
    return Outcome("objective", reached, reference, named, TOLERANCE, notes, (picture,))


def l_bfgs(start: Array, x: Array) -> float:
    """Return the objective of scipy from the same filters, in one process on all patches."""
    from scipy.optimize import minimize

    def flat(values: Array) -> tuple[float, Array]:
        value, gradient = objective(values.reshape(start.shape), x)
        return value, gradient.ravel()

    options: dict[str, Any] = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-7}
    return float(minimize(flat, start.ravel(), jac=True, method="L-BFGS-B", options=options).fun)


def draw(patterns: Array, path: Path) -> None:
    """Draw the pattern of each filter, as one picture of square tiles.

    Parameters
    ----------
    patterns
        Filters × pixels.
    """
    import matplotlib.image

    size = int(np.sqrt(patterns.shape[1]))
    columns = int(np.ceil(np.sqrt(len(patterns))))
    tiles = np.ones((-(-len(patterns) // columns) * columns, size + 1, size + 1))
    tiles[: len(patterns), :size, :size] = _grey(patterns).reshape(-1, size, size)
    rows = tiles.reshape(-1, columns, size + 1, size + 1).transpose(0, 2, 1, 3)
    picture = rows.reshape(-1, columns * (size + 1)).repeat(4, axis=0).repeat(4, axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    matplotlib.image.imsave(path, picture, cmap="gray", vmin=0, vmax=1)


def _grey(patterns: Array) -> Array:
    """Return patterns from 0 to 1, where 0.5 is no change."""
    largest = np.abs(patterns).max(axis=1, keepdims=True)
    grey: Array = 0.5 + 0.5 * patterns / np.where(largest > 0, largest, 1)
    return grey
