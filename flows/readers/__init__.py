"""The files that a user has: which reader a file is for, by its name.

All errors name the file, and the line, row or array in it that is wrong.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dps.errors import ConfigurationError
from flows.readers.bag_of_words import Corpus, read_bag_of_words
from flows.readers.idx import read_idx
from flows.readers.npz import LABELS, open_npz, read_npz
from flows.readers.svmlight import read_svmlight
from flows.readers.tables import parquet_table, read_tables
from flows.readers.values import Examples

__all__ = ["Corpus", "Examples", "read_bag_of_words", "read_examples", "read_images"]

SVMLIGHT = (".svm", ".svmlight", ".libsvm", ".txt")
IDX_IMAGES = "idx3-ubyte"


def read_examples(path: Path) -> Examples:
    """Read the examples of a file.

    Parameters
    ----------
    path
        svmlight (.svm, .svmlight, .libsvm or .txt, also with .gz), .npz, .parquet with a column y,
        label, labels or target, or idx images (…idx3-ubyte, also with .gz), whose labels lie beside
        them in …idx1-ubyte.

    Raises
    ------
    ConfigurationError
        The file is of another kind, or there is something wrong in it.
    """
    name = path.name.removesuffix(".gz")
    if name.endswith(IDX_IMAGES):
        return _idx_examples(path)
    if name.endswith(SVMLIGHT):
        return read_svmlight([path])[0]
    if path.suffix == ".npz":
        return read_npz(path, regression=True)
    if path.suffix == ".parquet":
        table = parquet_table(path)
        label = next((name for name in LABELS if name in table.names), LABELS[0])
        return read_tables([table], label, regression=True)[0]
    raise ConfigurationError(
        f"{path}: what kind of file it is does not show in its name; expected one that ends in "
        f"{', '.join(SVMLIGHT)} (svmlight), .npz, .parquet or {IDX_IMAGES}"
    )


def read_images(path: Path) -> np.ndarray:
    """Read grey images of equal size, at least one, as a uint8 array of images × height × width.

    Parameters
    ----------
    path
        An idx file, or an npz file with an array of that shape named ``x``.

    Raises
    ------
    ConfigurationError
        It is neither, or damaged, or has no images.
    """
    npz = path.suffix == ".npz"
    images = open_npz(path, lambda _: ["x"])["x"] if npz else read_idx(path, 3)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise ConfigurationError(
            f"{path}: x is {images.dtype}{list(images.shape)}, expected uint8 images × height × "
            "width"
        )
    if not len(images):
        raise ConfigurationError(f"{path} has no images, expected at least one")
    return images


def _idx_examples(path: Path) -> Examples:
    images = read_idx(path, 3)
    beside = path.with_name(path.name.replace("images-", "labels-").replace("idx3", "idx1"))
    labels = read_idx(beside, 1)
    if len(images) != len(labels):
        raise ConfigurationError(
            f"{path} has {len(images)} images, but {beside} {len(labels)} labels"
        )
    return Examples(images.reshape(len(images), -1) / 255, labels.astype(np.float64))
