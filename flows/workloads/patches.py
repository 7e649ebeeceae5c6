"""The image patches that RICA is shown on: cut out at random, without their mean, whitened.

`PatchDataset` makes a data set of them for experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.readers import read_images
from flows.workloads.base import Dataset, DatasetShape
from flows.workloads.datasets import Part
from flows.workloads.fashion_mnist import IMAGES, Sources, find

Array = npt.NDArray[np.float64]
Images = npt.NDArray[np.uint8]

CONTRAST = 0.05  # standard deviation below which a patch shows nothing; pixels are from 0 to 1
SIDES = {"digits": 8, "fashion_mnist": 28}  # pixels of the images, either way
SMALLEST_VARIANCE = 1e-12  # of a component, as a share of the largest
VARIANCE = 0.99  # what share of the patches' variance is kept


@dataclass(frozen=True, slots=True)
class PatchSource:
    """Which patches to cut: `count` of `size` × `size` pixels, from the images of a file.

    Without a file they are from Fashion-MNIST where that is installed, else from scikit-learn's
    digits; `digits` takes these anyway. They are whitened to so many `components`, or to as many as
    have 99% of the variance.
    """

    count: int
    size: int
    seed: int = 0
    path: Path | None = None
    digits: bool = False
    components: int | None = None

    @property
    def named(self) -> str:
        """What the images are."""
        if self.path is not None:
            return str(self.path)
        if self.digits:
            return "digits"
        return "Fashion-MNIST" if fashion() else "digits, as Fashion-MNIST is not installed"


@dataclass(frozen=True, eq=False)
class Patches:
    """Whitened patches.

    Attributes
    ----------
    x
        Patches × components, float64: uncorrelated, of variance 1.
    patterns
        Components × pixels: what one unit of each component looks like.
    """

    x: Array
    patterns: Array


@dataclass(frozen=True, slots=True)
class PatchDataset:
    """Patches for experiments, of float32 and of one class; `count` for training and a tenth more.

    Parameters
    ----------
    count
        How many to train on; a tenth as many are to score weights on.
    size
        Pixels on a side.
    components
        To which they are whitened: the most of the variance.
    images
        Scikit-learn's digits, or Fashion-MNIST where that is installed.
    seed
        Of the places that they are cut out at.
    """

    count: int = 10_000
    size: int = 6
    components: int = 24
    images: Literal["digits", "fashion_mnist"] = "digits"
    seed: int = 0

    def __post_init__(self) -> None:
        largest = SIDES[self.images]
        if not 2 <= self.size <= largest:
            raise ConfigurationError(
                f"patches: size={self.size}, expected 2 to {largest}, as the images have "
                f"{largest} × {largest} pixels"
            )
        if not 1 <= self.components < self.size**2:
            raise ConfigurationError(
                f"patches: components={self.components}, expected 1 to {self.size**2 - 1}, as "
                f"patches of {self.size} × {self.size} pixels without their mean have"
            )
        if self.count < self.components:
            raise ConfigurationError(
                f"patches: count={self.count}, expected at least the {self.components} components "
                "that they are whitened to"
            )
        if self.images == "fashion_mnist" and fashion() is None:
            raise ConfigurationError(
                "patches: Fashion-MNIST is not installed; `dps doctor` says where it is looked for"
            )

    @property
    def shape(self) -> DatasetShape:
        """Components, and one class."""
        return DatasetShape(self.components, 1)

    def load(self, part: Part = "both") -> Dataset:
        """Cut patches out; those of a part that is not wanted are left out."""
        test = max(1, self.count // 10)
        source = PatchSource(
            self.count + test,
            self.size,
            self.seed,
            digits=self.images == "digits",
            components=self.components,
        )
        x = load_patches(source).x.astype(np.float32)
        train = x[: self.count if part != "test" else 0]
        scored = x[self.count :] if part != "train" else x[:0]
        none = [np.zeros(len(rows), np.int64) for rows in (train, scored)]
        return Dataset("patches", train, none[0], scored, none[1], 1)


def load_patches(source: PatchSource) -> Patches:
    """Cut and whiten; the same source gives the same patches in every process.

    Raises
    ------
    ConfigurationError
        The images cannot be read, are smaller than a patch, or show too little.
    """
    images = load_images(source)
    rng = np.random.default_rng(source.seed)
    pixels = np.concatenate([_cut(images, source, rng) for _ in range(4)])
    pixels = pixels[pixels.std(axis=1) > CONTRAST][: source.count]
    if len(pixels) < source.count:
        raise ConfigurationError(
            f"{source.named}: only {len(pixels)} of {4 * source.count} patches that were cut out "
            f"at random show anything; {source.count} are needed"
        )
    pixels -= pixels.mean(axis=1, keepdims=True)
    variances, directions = np.linalg.eigh(pixels.T @ pixels / len(pixels))
    variances, directions = variances[::-1], directions[:, ::-1]
    explaining = 1 + int(np.searchsorted(np.cumsum(variances) / variances.sum(), VARIANCE))
    kept = source.components or explaining
    if variances[kept - 1] <= SMALLEST_VARIANCE * variances[0]:
        raise ConfigurationError(
            f"{source.named}: patches of {source.size} × {source.size} pixels do not vary in "
            f"{kept} components; ask for fewer, or for more or other patches"
        )
    deviations = np.sqrt(variances[:kept])
    return Patches(
        pixels @ (directions[:, :kept] / deviations), (directions[:, :kept] * deviations).T
    )


def load_images(source: PatchSource) -> Images:
    """The images that patches are cut out of.

    Raises
    ------
    ConfigurationError
        They cannot be read, or are smaller than a patch.
    """
    images = images_of(None if source.digits else source.path or fashion())
    _, height, width = images.shape
    if min(height, width) < source.size:
        raise ConfigurationError(
            f"{source.named}: images of {height} × {width}, expected {source.size} × {source.size} "
            "at least"
        )
    return images


def _cut(images: Images, source: PatchSource, rng: np.random.Generator) -> Array:
    """Cut patches out at random places, as rows of pixels."""
    number, height, width = images.shape
    size = source.size
    windows = np.lib.stride_tricks.sliding_window_view(images, (size, size), axis=(1, 2))
    image = rng.integers(0, number, source.count)
    top = rng.integers(0, height - size + 1, source.count)
    left = rng.integers(0, width - size + 1, source.count)
    cut: Array = windows[image, top, left].reshape(source.count, -1) / images.max()
    return cut


def images_of(path: Path | None) -> Images:
    """The images of a file; without one, scikit-learn's digits."""
    if path is not None:
        return read_images(path)
    from sklearn.datasets import load_digits

    return np.asarray(load_digits().images, np.uint8)


def fashion() -> Path | None:
    """The file of Fashion-MNIST's images, where that is installed."""
    folder = find(None, Sources())
    if folder is None:
        return None
    name = IMAGES["train"]
    return next((p for p in (folder / f"{name}.gz", folder / name) if p.is_file()), None)
