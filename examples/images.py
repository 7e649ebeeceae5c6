"""Patches of images, from Fashion-MNIST, digits or the user's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from configs.studies.rica import cut_patches
from dps import ConfigurationError
from flows.workloads.fashion_mnist import IMAGES, find, path_of, read_idx

Array = npt.NDArray[np.float64]
Images = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PatchSource:
    """Patches: `count` of `size` × `size` pixels, from the images of a file.

    Without a file, they are from Fashion-MNIST if it is installed, otherwise from scikit-learn's
    digits.
    """

    count: int
    size: int
    seed: int = 0
    path: Path | None = None

    @property
    def named(self) -> str:
        """Name of the images."""
        if self.path is not None:
            return str(self.path)
        return "Fashion-MNIST" if fashion() else "digits, as Fashion-MNIST is not installed"

    def images(self) -> Images:
        """Return the images; raise `ConfigurationError` if they are smaller than a patch."""
        images = images_of(self.path or fashion())
        _, height, width = images.shape
        if min(height, width) < self.size:
            raise ConfigurationError(
                f"{self.named}: images of {height} × {width}, expected {self.size} × {self.size} "
                "at least"
            )
        return images

    def patches(self) -> tuple[Array, Array]:
        """Return whitened patches and the patterns of their components; see `cut_patches`."""
        images = self.images()
        try:
            return cut_patches(images, self.count, self.size, self.seed)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.named}: {error}") from error


def images_of(path: Path | None) -> Images:
    """Return grey images, images × height × width, from an idx or npz file, or the digits."""
    if path is None:
        from sklearn.datasets import load_digits

        return np.asarray(load_digits().images, np.uint8)
    if path.suffix != ".npz":
        return read_idx(path, 3)
    try:
        with np.load(path, allow_pickle=False) as file:
            images: Images = file["x"]
    except Exception as error:  # for damage, zipfile and numpy raise a dozen kinds
        raise ConfigurationError(f"{path} cannot be read as npz with an x: {error}") from error
    if images.ndim != 3 or images.dtype != np.uint8 or not len(images):
        raise ConfigurationError(
            f"{path}: x is {images.dtype}{list(images.shape)}, expected uint8 images × height × "
            "width"
        )
    return images


def fashion() -> Path | None:
    """Return the file of Fashion-MNIST's images, if it is installed."""
    folder = find(None)
    return None if folder is None else path_of(folder, IMAGES["train"])
