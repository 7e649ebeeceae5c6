"""Images, and which reader the name of a file stands for."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dps.errors import ConfigurationError
from flows.readers import read_examples, read_images

X = np.arange(6.0).reshape(3, 2)


# -- images, and names -----------------------------------------------------------------------------


def idx(path: Path, values: np.ndarray) -> Path:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))
    return path


def test_images_come_with_the_labels_beside_them(tmp_path: Path) -> None:
    images = idx(tmp_path / "t-images-idx3-ubyte.gz", np.full((2, 3, 4), 255))
    idx(tmp_path / "t-labels-idx1-ubyte.gz", np.array([7, 1]))
    found = read_examples(images)
    np.testing.assert_array_equal(found.x, np.ones((2, 12)))
    np.testing.assert_array_equal(found.y, [7, 1])
    idx(tmp_path / "t-labels-idx1-ubyte.gz", np.array([7]))
    with pytest.raises(ConfigurationError, match=r"has 2 images, but .* 1 labels"):
        read_examples(images)


def test_images_are_read_alone(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(read_images(idx(tmp_path / "a-idx3-ubyte.gz", images)), images)
    np.savez(tmp_path / "a.npz", x=images)
    np.testing.assert_array_equal(read_images(tmp_path / "a.npz"), images)
    np.savez(tmp_path / "a.npz", x=X)
    with pytest.raises(ConfigurationError, match=r"x is float64\[3, 2\], expected uint8 images"):
        read_images(tmp_path / "a.npz")


def test_no_images_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((0, 3, 4), np.uint8))
    for path in (tmp_path / "a.npz", idx(tmp_path / "a-idx3-ubyte.gz", np.zeros((0, 3, 4)))):
        with pytest.raises(ConfigurationError, match=f"{path.name} has no images"):
            read_images(path)


@pytest.mark.parametrize("name", ["a.svm", "a.libsvm", "a.svmlight", "a.txt", "a.txt.gz"])
def test_svmlight_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    text = b"1 2:3\n"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    found = read_examples(tmp_path / name)
    np.testing.assert_array_equal(found.x.toarray(), [[0, 3]])


@pytest.mark.parametrize("label", ["y", "label", "labels", "target"])
def test_labels_of_parquet_are_known_by_their_name(tmp_path: Path, label: str) -> None:
    pd.DataFrame({"a": X[:, 0], label: [1, 0, 1], "b": X[:, 1]}).to_parquet(tmp_path / "a.parquet")
    found = read_examples(tmp_path / "a.parquet")
    np.testing.assert_array_equal(found.x, X)
    assert found.y.tolist() == [1, 0, 1]
    pd.DataFrame({"a": X[:, 0]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match="there is no column 'y'; there are: 'a'"):
        read_examples(tmp_path / "a.parquet")


def test_a_name_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"what kind of file it is does not show"):
        read_examples(tmp_path / "data.csv")
