"""RICA (reconstruction ICA): learn filters of whitened image patches with a non-convex loss.

`Rica` is the model. `patches` creates its data: randomly cut, centred and whitened patches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

FILTERS = "filters"
SMOOTH = 0.01  # ε: smooths the absolute value near 0, √(v² + ε)
CONTRAST = 0.05  # minimum standard deviation of a usable patch; pixels are in [0, 1]
SMALLEST_VARIANCE = 1e-12  # minimum variance of a component, relative to the largest
VARIANCE = 0.99  # share of the total variance to keep


class Rica:
    """Sparse filters W that reconstruct the patches x (Le et al. 2011).

    The loss of a patch is ½·‖WᵀW·x − x‖² + λ·Σⱼ √((wⱼ·x)² + ε). The prediction for a patch is the
    part of its squared norm that the reconstruction explains.

    Parameters
    ----------
    shape
        Shape of the data; only `shape.features` is used.
    filters
        Number of rows of W.
    sparsity
        λ, at least 0.
    """

    def __init__(self, shape: Any, filters: int = 64, sparsity: float = 0.5) -> None:
        self.features, self.filters, self.sparsity = shape.features, filters, sparsity

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw filters in random directions, scaled to roughly reconstruct the patches."""
        return {FILTERS: random_filters(rng, self.filters, self.features).astype(np.float32)}

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over the batch and its gradient."""
        filters = params[FILTERS]
        loss, gradient = reconstruction(filters, x.astype(filters.dtype), self.sparsity)
        return loss, {FILTERS: gradient}

    def predict(self, params: Arrays, x: Array) -> Array:
        """Return the explained part of the squared norm of each patch."""
        filters = params[FILTERS]
        return _squares(x) - _squares(x @ filters.T @ filters - x)


def reconstruction(filters: Array, x: Array, sparsity: float) -> tuple[float, Array]:
    """Return the mean loss over the patches and its gradient.

    Parameters
    ----------
    filters
        W, shape (filters, components).
    x
        Patches, shape (patches, components), in the same dtype.
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
    """Draw rows of equal norm in random directions: float64, shape (filters, components)."""
    drawn = rng.standard_normal((filters, components))
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return np.asarray(drawn * min(1.0, np.sqrt(components / filters)))


def _squares(rows: Array) -> Array:
    return np.asarray(np.sum(rows**2, axis=1, dtype=np.float64))


# -- patches ---------------------------------------------------------------------------------------


def patches(
    count: int = 10_000, size: int = 6, components: int = 24, seed: int = 0
) -> tuple[Array, ...]:
    """Cut training patches, and a tenth as many test patches, from scikit-learn's digits.

    The target of a patch is its squared norm.

    Parameters
    ----------
    count
        Number of training patches.
    size
        Side length of a patch in pixels.
    components
        Number of leading principal components to keep.
    seed
        Random seed of the patch positions.

    Returns
    -------
    tuple
        Training patches, their targets, test patches, their targets.
    """
    from sklearn.datasets import load_digits

    every = count + max(1, count // 10)
    x, _ = cut_patches(load_digits().images, every, size, seed, components)
    y = _squares(x)
    return x[:count], y[:count], x[count:], y[count:]


def cut_patches(
    images: Array, count: int, size: int, seed: int, components: int | None = None
) -> tuple[Array, Array]:
    """Cut random patches from images and whiten them. Deterministic for a given `seed`.

    Raises `ConfigurationError` if the images have too little contrast or too few varying
    components.

    Parameters
    ----------
    images
        Shape (images, height, width).
    count, size
        Number of patches, and their side length in pixels.
    components
        Number of leading principal components to keep. None: enough for 99% of the variance.

    Returns
    -------
    x
        Whitened patches, float64, shape (count, components): uncorrelated, variance 1.
    patterns
        Shape (components, pixels): the image patch of one unit of each component.
    """
    number, height, width = images.shape
    rng = np.random.default_rng(seed)
    windows: Any = np.lib.stride_tricks.sliding_window_view(images, (size, size), axis=(1, 2))
    cut = []
    for _ in range(4):
        image = rng.integers(0, number, count)
        top = rng.integers(0, height - size + 1, count)
        left = rng.integers(0, width - size + 1, count)
        cut.append(windows[image, top, left].reshape(count, -1) / images.max())
    pixels = np.concatenate(cut)
    pixels = pixels[pixels.std(axis=1) > CONTRAST][:count]
    if len(pixels) < count:
        raise ConfigurationError(
            f"only {len(pixels)} of {4 * count} randomly cut patches have enough contrast; "
            f"{count} are needed"
        )
    pixels -= pixels.mean(axis=1, keepdims=True)
    variances, directions = np.linalg.eigh(pixels.T @ pixels / len(pixels))
    variances, directions = variances[::-1], directions[:, ::-1]
    explaining = 1 + int(np.searchsorted(np.cumsum(variances) / variances.sum(), VARIANCE))
    kept = components or explaining
    if variances[kept - 1] <= SMALLEST_VARIANCE * variances[0]:
        raise ConfigurationError(
            f"patches of {size} × {size} pixels do not vary in {kept} components; reduce the "
            "number of components, or use more or different patches"
        )
    deviations = np.sqrt(variances[:kept])
    patterns = (directions[:, :kept] * deviations).T
    return pixels @ (directions[:, :kept] / deviations), patterns
