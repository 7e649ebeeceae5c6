"""RICA (reconstruction ICA) on patches of images: a loss that is not convex, and has no classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads.base import Array, Arrays, DatasetShape, check_dtype

FILTERS = "filters"
SMOOTH = 0.01  # ε: how far around 0 the absolute value is rounded off, squared
EXPLAINED = 0.1  # what share of a patch's squared length its reconstruction may miss


@dataclass(frozen=True, slots=True)
class Rica:
    """Filters W that respond rarely and still explain the patches x (Le et al. 2011).

    The loss of a patch is ½·‖WᵀW·x − x‖² + λ·Σⱼ √((wⱼ·x)² + ε). In place of classes, whatever they
    are, a patch counts as right if its reconstruction misses at most a tenth of its squared length.

    Parameters
    ----------
    shape
        Of the data.
    filters
        How many rows W has.
    sparsity
        λ, 0 or above.
    dtype
        Of the parameters and of all arithmetic: float32 or float64.
    """

    name: ClassVar[str] = "rica"
    parameters: ClassVar[tuple[str, ...]] = (FILTERS,)
    shape: DatasetShape
    filters: int = 64
    sparsity: float = 0.5
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.filters < 1:
            raise ConfigurationError(f"rica: filters={self.filters}, expected 1 or more")
        if not 0 <= self.sparsity < float("inf"):
            raise ConfigurationError(f"rica: sparsity={self.sparsity}, expected 0 or more")
        check_dtype(self.name, self.dtype)

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw filters in random directions, of the length at which patches are about explained."""
        return {FILTERS: random_filters(rng, self.filters, self.shape.features).astype(self.dtype)}

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch, and the gradient."""
        x = x.astype(self.dtype, copy=False)
        loss, gradient = reconstruction(params[FILTERS], x, self.sparsity)
        return loss, {FILTERS: gradient}

    def evaluate(self, params: Arrays, x: Array, y: Array) -> tuple[float, float]:
        """Return the mean loss, and the share of the patches that are explained."""
        if not len(x):
            raise ValueError("no examples to evaluate: was this part of the data set loaded?")
        x, filters = x.astype(self.dtype, copy=False), params[FILTERS]
        responses = x @ filters.T
        missed = _squares(responses @ filters - x)
        smooth = np.sqrt(responses**2 + SMOOTH).sum(axis=1, dtype=np.float64)
        loss = float(np.mean(0.5 * missed + self.sparsity * smooth))
        return loss, float(np.mean(missed <= EXPLAINED * _squares(x)))


def reconstruction(filters: Array, x: Array, sparsity: float) -> tuple[float, Array]:
    """Return the mean loss over some patches, and its gradient.

    Parameters
    ----------
    filters
        W: filters × components.
    x
        Patches × components, of the same dtype.
    sparsity
        λ.
    """
    responses = x @ filters.T
    errors = responses @ filters - x
    smooth = np.sqrt(responses**2 + SMOOTH)
    summed = 0.5 * _squares(errors).sum() + sparsity * smooth.sum(dtype=np.float64)
    through = errors @ filters.T + sparsity * responses / smooth
    return float(summed / len(x)), (responses.T @ errors + through.T @ x) / len(x)


def random_filters(rng: np.random.Generator, filters: int, components: int) -> Array:
    """Draw rows in random directions, of one length; float64, filters × components."""
    drawn = rng.standard_normal((filters, components))
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return np.asarray(drawn * min(1.0, np.sqrt(components / filters)))


def _squares(rows: Array) -> Array:
    return np.asarray(np.sum(rows**2, axis=1, dtype=np.float64))
