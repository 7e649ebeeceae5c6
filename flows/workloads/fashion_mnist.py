"""Fashion-MNIST, from a folder that the user names, the Debian package, or a download.

A download goes into the user's cache folder; each file appears there whole and verified or not at
all, so several processes may download at once, and an interrupted download continues.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import Literal

import numpy as np

from dps.errors import ConfigurationError
from flows.files import NO_HOME, write_whole
from flows.workloads.base import Array, DatasetShape

Pixels = Literal["symmetric", "unit"]

SHAPE = DatasetShape(features=28 * 28, classes=10)
IMAGES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}
MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}  # of the files with .gz
PACKAGED = Path("/usr/share/datasets/fashion-mnist")
HOST = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
TIMEOUT_SECONDS = 20.0
WHAT_TO_DO = (
    "install the Debian package (apt install dataset-fashion-mnist), or set dataset.folder to a "
    f"folder with the files {', '.join(MD5)} (plain or .gz)"
)


def cache_folder() -> Path:
    """Return the folder for downloads, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # itself, for a user without a name and a HOME
    # The specification requires relative paths to be ignored.
    root = base if os.path.isabs(base) else Path(home if home != "~" else NO_HOME, ".cache")
    return Path(root, "dps", "fashion-mnist")


def find(folder: Path | None) -> Path | None:
    """Return the folder that holds the files already, or None when they must be downloaded.

    Raises `ConfigurationError` if a folder was named and lacks a file.
    """
    if folder is None:
        places = (PACKAGED, cache_folder())
        return next((place for place in places if not _missing(place)), None)
    named = Path(os.path.expanduser(folder))
    if missing := _missing(named):
        raise ConfigurationError(
            f"Fashion-MNIST: folder {named} has no {' and no '.join(missing)} (plain or .gz)"
        )
    return named


def download() -> Path:
    """Download the files that are missing in the cache folder, and return the folder.

    Raises `ConfigurationError` if the download failed; the message describes the remedy.
    """
    cache = cache_folder()
    try:
        for name in _missing(cache):
            _download_file(name, cache)
    except (OSError, HTTPException) as error:
        raise ConfigurationError(
            f"Fashion-MNIST is not in {PACKAGED} or {cache}, and downloading it from {HOST} "
            f"failed: {error}; {WHAT_TO_DO}"
        ) from error
    return cache


def train_rows(folder: Path | None) -> int | None:
    """Return how many images there are to train on; None where the files are not here."""
    place = find(folder)
    return None if place is None else len(read_idx(path_of(place, LABELS["train"]), 1))


def read(
    folder: Path, part: Literal["train", "test"], pixels: Pixels = "symmetric"
) -> tuple[Array, Array]:
    """Return one part's pixels, scaled to float32, and int64 labels.

    Scaled as (x/255 - 0.5) / 0.5, from -1 to 1, where `pixels` is "symmetric", and as x/255, from
    0 to 1, where it is "unit".
    """
    images_path, labels_path = path_of(folder, IMAGES[part]), path_of(folder, LABELS[part])
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    expected = (len(labels), 28, 28)
    if not len(labels) or images.shape != expected or labels.max() >= SHAPE.classes:
        raise ConfigurationError(
            f"{images_path} is {list(images.shape)}, expected {list(expected)} with a label from 0 "
            f"to 9 for each image in {labels_path}"
        )
    # One look-up per pixel: no intermediate array, and each value rounded only once.
    unit = np.arange(256) / 255
    scaled = (unit if pixels == "unit" else (unit - 0.5) / 0.5).astype(np.float32)
    return scaled[images.reshape(len(images), -1)], labels.astype(np.int64)


def read_idx(path: Path, dimensions: int) -> Array:
    """Return the values of an idx file of unsigned bytes, plain or .gz, as an array.

    The format is four bytes (0, 0, type, number of dimensions), each dimension as a big-endian
    uint32, then the values, row-major.

    Raises `ConfigurationError` if the file cannot be read, or is no complete idx file with this
    number of dimensions.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read()
        if data[:4] != bytes([0, 0, 8, dimensions]):
            raise ValueError(f"it begins with {data[:4].hex(' ')!r}")
        shape = np.frombuffer(data, ">u4", dimensions, offset=4).astype(int)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"{path} cannot be read: {reason}; expected an idx file of unsigned bytes in "
            f"{dimensions} dimensions. If it is damaged, download it again"
        ) from error


def path_of(folder: Path, name: str) -> Path:
    """Return the path of a file, with .gz if that is there."""
    compressed = folder / f"{name}.gz"
    return compressed if compressed.is_file() else folder / name


def _missing(folder: Path) -> list[str]:
    return [name for name in MD5 if not path_of(folder, name).is_file()]


def _download_file(name: str, cache: Path) -> None:
    url = f"{HOST}/{name}.gz"
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        data: bytes = response.read()
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if md5 != MD5[name]:
        raise ConfigurationError(
            f"{url} was refused: its MD5 is {md5}, expected {MD5[name]}; try again, or {WHAT_TO_DO}"
        )
    write_whole(cache / f"{name}.gz", data, "Fashion-MNIST")
