"""Where Fashion-MNIST comes from: a folder the user names, the Debian package, or a download.

A download goes into the user's cache folder; each file appears there whole and verified or not at
all, so several processes may download at once, and an interrupted download continues.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import IO, Literal

import numpy as np

from dps.errors import ConfigurationError
from flows.files import NO_HOME
from flows.readers.idx import count_idx, read_idx
from flows.workloads.base import Array, DatasetShape

Pixels = Literal["symmetric", "unit"]

SHAPE = DatasetShape(features=28 * 28, classes=10)
IMAGES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}
FILES = (*IMAGES.values(), *LABELS.values())

WHAT_TO_DO = (
    "install the Debian package (apt install dataset-fashion-mnist), or name a folder with the "
    f"files {', '.join(FILES)} (plain or .gz) as dataset.folder"
)

MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def cache_folder() -> Path:
    """Return the folder for downloads, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # itself, for a user without a name and a HOME
    # The specification has relative paths ignored.
    root = base if os.path.isabs(base) else Path(home if home != "~" else NO_HOME, ".cache")
    return Path(root, "dps", "fashion-mnist")


@dataclass(frozen=True)
class Sources:
    """Where the files are looked for when no folder is named; the defaults are the real places."""

    packaged: Path = Path("/usr/share/datasets/fashion-mnist")
    cache: Path = field(default_factory=cache_folder)
    host: str = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    md5: Mapping[str, str] = field(default_factory=lambda: MD5)
    timeout_seconds: float = 20.0


def find(folder: str | Path | None, sources: Sources) -> Path | None:
    """Return the folder that holds the files already, or None when they must be downloaded.

    Raises
    ------
    ConfigurationError
        A folder was named and lacks a file.
    """
    if folder is not None:
        return _named(Path(os.path.expanduser(folder)))
    for candidate in (sources.packaged, sources.cache):
        if not _missing(candidate):
            return candidate
    return None


def ensure(folder: str | Path | None, sources: Sources) -> Path:
    """Return the folder that holds the files, after downloading them if there is no other way.

    Raises
    ------
    ConfigurationError
        The files are nowhere to be had; the message says what to do.
    """
    found = find(folder, sources)
    if found is None:
        _download(sources)
    return found or sources.cache


def train_rows(folder: str | None) -> int | None:
    """Return how many images there are to train on; None where the files are not here.

    Raises
    ------
    ConfigurationError
        The folder has not all the files, or the file of images cannot be read.
    """
    found = find(folder, Sources())
    return None if found is None else count_idx(_path(found, IMAGES["train"]))


def read(
    folder: Path, part: Literal["train", "test"], pixels: Pixels = "symmetric"
) -> tuple[Array, Array]:
    """Return one part's pixels, scaled to float32, and int64 labels.

    Scaled as (x/255 - 0.5) / 0.5, from -1 to 1, where `pixels` is "symmetric", and as x/255, from
    0 to 1, where it is "unit".
    """
    images_path, labels_path = _path(folder, IMAGES[part]), _path(folder, LABELS[part])
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (28, 28):
        height, width = images.shape[1:]
        raise ConfigurationError(
            f"{images_path} has images of {height} x {width}, expected 28 x 28"
        )
    if not 0 < len(images) == len(labels):
        raise ConfigurationError(
            f"{images_path} has {len(images)} images and {labels_path} {len(labels)} labels, "
            "expected one label for every image, and at least one"
        )
    if labels.max() >= SHAPE.classes:
        raise ConfigurationError(f"{labels_path} has the label {labels.max()}, expected 0 to 9")
    # One look-up per pixel: no intermediate array, and each value rounded only once.
    unit = np.arange(256) / 255
    scaled = (unit if pixels == "unit" else (unit - 0.5) / 0.5).astype(np.float32)
    return scaled[images.reshape(len(images), -1)], labels.astype(np.int64)


def _named(folder: Path) -> Path:
    missing = _missing(folder)
    if missing:
        raise ConfigurationError(
            f"Fashion-MNIST: folder {folder} has no {' and no '.join(missing)} (plain or .gz)"
        )
    return folder


def _missing(folder: Path) -> list[str]:
    return [name for name in FILES if not _path(folder, name).is_file()]


def _path(folder: Path, name: str) -> Path:
    compressed = folder / f"{name}.gz"
    return compressed if compressed.is_file() else folder / name


def _download(sources: Sources) -> None:
    try:
        sources.cache.mkdir(parents=True, exist_ok=True)
        for name in _missing(sources.cache):
            _download_file(f"{name}.gz", sources)
    except (OSError, HTTPException) as error:
        raise ConfigurationError(
            f"Fashion-MNIST is not in {sources.packaged} or {sources.cache}, and downloading it "
            f"from {sources.host} failed: {error}; {WHAT_TO_DO}"
        ) from error


def _download_file(name: str, sources: Sources) -> None:
    descriptor, partial = tempfile.mkstemp(prefix=f".{name}.", dir=sources.cache)
    try:
        with os.fdopen(descriptor, "wb") as file:
            md5 = _copy(f"{sources.host}/{name}", file, sources.timeout_seconds)
            file.flush()
            os.fsync(file.fileno())
        if md5 != sources.md5[name]:
            raise ConfigurationError(
                f"{sources.host}/{name} was refused: its MD5 is {md5}, expected "
                f"{sources.md5[name]}; try again, or {WHAT_TO_DO}"
            )
        os.replace(partial, sources.cache / name)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)


def _copy(url: str, file: IO[bytes], timeout_seconds: float) -> str:
    """Write what `url` serves to `file`, and return its MD5."""
    md5 = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=timeout_seconds) as response:
        while chunk := response.read(1 << 18):
            md5.update(chunk)
            file.write(chunk)
    return md5.hexdigest()
