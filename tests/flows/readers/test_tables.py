"""Npz, parquet and idx files, which reader a name stands for, and what is said of errors."""

from __future__ import annotations

import gzip
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array, random, save_npz

from dps.errors import ConfigurationError
from flows.readers import read_examples, read_images
from flows.readers.tables import read_npz, read_parquet

X = np.arange(6.0).reshape(3, 2)
Y = np.array([1, 0, 1])


# -- npz -------------------------------------------------------------------------------------------


def test_arrays_are_read_as_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.astype(np.float32), label=Y)
    found = read_npz(tmp_path / "a.npz")
    np.testing.assert_array_equal(found.x, X)
    np.testing.assert_array_equal(found.y, Y)
    assert found.x.dtype == found.y.dtype == np.float64


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_a_sparse_matrix_is_read(tmp_path: Path, kind: str) -> None:
    x = random(5, 7, density=0.4, format=kind, random_state=0)
    save_npz(tmp_path / "x.npz", x)
    with np.load(tmp_path / "x.npz") as file:
        np.savez(tmp_path / "a.npz", y=np.arange(5), **file)
    found = read_npz(tmp_path / "a.npz")
    assert isinstance(found.x, csr_array)
    np.testing.assert_array_equal(found.x.toarray(), x.toarray())


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"a": X}, "has the arrays a, expected x and y, or a sparse matrix"),
        ({"x": X}, "has the arrays x, and none of them is named y"),
        ({"x": X, "y": Y[:2]}, r"x is \[3, 2\] and y \[2\], expected a row of x for each"),
        ({"x": X[0], "y": Y}, r"x is \[2\] and y \[3\]"),
        ({"x": X[:0], "y": Y[:0]}, r"x is \[0, 2\]: expected one example and one feature at"),
        ({"x": X[:, :0], "y": Y}, r"x is \[3, 0\]: expected one example and one feature at"),
        ({"x": np.zeros((0, 2, 2)), "y": Y[:0]}, r"x is \[0, 2, 2\]: expected one example"),
        ({"x": np.array([["a"]]), "y": Y}, "x is of <U1, expected numbers"),
        ({"x": np.where(X == 3, np.nan, X), "y": Y}, r"x\[1, 1\] is nan, expected a number"),
        ({"x": X, "y": np.array([1, np.inf, 0])}, r"y\[1\] is inf, expected a number"),
        ({"x": np.array([[{}]]), "y": Y}, "cannot be read as npz: Object arrays"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, arrays: Any, problem: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigurationError, match=rf"a\.npz.*{problem}"):
        read_npz(tmp_path / "a.npz")


def test_a_damaged_sparse_matrix_is_refused(tmp_path: Path) -> None:
    parts: Any = {"data": [1.0], "indices": [9], "indptr": [0, 1], "shape": [1, 2]}
    np.savez(tmp_path / "a.npz", y=[1], format="csr", **parts)
    with pytest.raises(ConfigurationError, match="its sparse matrix is damaged"):
        read_npz(tmp_path / "a.npz")
    for kind in ("coo", b"\xff", ["csr", "csc"]):
        np.savez(tmp_path / "a.npz", y=[1], format=kind, **parts)
        with pytest.raises(ConfigurationError, match="expected csr or csc"):
            read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"not an archive"])
def test_what_is_no_npz_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ConfigurationError, match="cannot be read as npz"):
        read_npz(tmp_path / "a.npz")


def test_a_single_array_is_no_npz_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    with pytest.raises(ConfigurationError, match=r"cannot be read as npz.* with numpy\.savez"):
        read_npz(tmp_path / "a.npy")


# -- parquet ---------------------------------------------------------------------------------------


def parquet(path: Path, **columns: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet_module = pytest.importorskip("pyarrow.parquet")
    parquet_module.write_table(pyarrow.table(columns), path)
    return path


def test_columns_are_features_and_a_label(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=X[:, 0], target=Y, b=[1, 3, 5])
    pieces = list(read_parquet(path, rows=2))
    assert [len(piece.y) for piece in pieces] == [2, 1]
    np.testing.assert_array_equal(np.concatenate([piece.x for piece in pieces]), X)
    np.testing.assert_array_equal(np.concatenate([piece.y for piece in pieces]), Y)


def test_the_label_can_be_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=X[:, 0], b=X[:, 1], kind=Y)
    (found,) = read_examples(path, label="kind")
    np.testing.assert_array_equal(found.y, Y)
    with pytest.raises(ConfigurationError, match=r"no column 'y' or 'label' or .* there are: a, b"):
        list(read_parquet(path))


def test_every_kind_of_number_is_read(tmp_path: Path) -> None:
    columns: Any = {
        "a": np.array([1, 2**60], np.uint64),
        "b": np.array([0.5, 1], np.float16),
        "c": [True, False],
        "d": [Decimal("0.25"), Decimal(3)],
    }
    (found,) = read_parquet(parquet(tmp_path / "a.parquet", **columns, y=[1, 2]))
    np.testing.assert_array_equal(found.x, [[1, 0.5, 1, 0.25], [2**60, 1, 0, 3]])


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([[1.0], [2.0], [3]], names=["a", "a", "y"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"a\.parquet has more than one column 'a'"):
        list(read_parquet(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"a": ["1", "2", "3"], "y": [1, 2, 3]}, "column 'a' is of string, expected numbers"),
        ({"a": [datetime(2020, 1, 1)] * 3, "y": [1, 2, 3]}, "'a' is of timestamp.* expected numb"),
        ({"a": [True, None, False], "y": [1, 2, 3]}, "row 2, column 'a': None, expected a number"),
        ({"a": [1.0, 2.0, None], "y": [1, 2, 3]}, "row 3, column 'a': None, expected a number"),
        ({"a": [1, None, 3], "y": [1, 2, 3]}, "row 2, column 'a': None, expected a number"),
        ({"a": [1, 2, 3], "y": [1, np.inf, 3]}, "row 2, column 'y': inf, expected a number"),
        ({"y": [1, 2, 3]}, "has no column besides 'y': no features"),
    ],
)
def test_a_bad_cell_is_told_with_its_place(tmp_path: Path, columns: Any, problem: str) -> None:
    path = parquet(tmp_path / "a.parquet", **columns)
    with pytest.raises(ConfigurationError, match=rf"a\.parquet.*{problem}"):
        list(read_parquet(path, rows=1))


def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigurationError, match="cannot be read as parquet"):
        list(read_parquet(tmp_path / "a.parquet"))
    with pytest.raises(ConfigurationError, match="cannot be read as parquet"):
        list(read_parquet(tmp_path / "none.parquet"))


# -- images, and names -----------------------------------------------------------------------------


def idx(path: Path, values: np.ndarray) -> Path:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))
    return path


def test_images_come_with_the_labels_beside_them(tmp_path: Path) -> None:
    images = idx(tmp_path / "t-images-idx3-ubyte.gz", np.full((2, 3, 4), 255))
    idx(tmp_path / "t-labels-idx1-ubyte.gz", np.array([7, 1]))
    (found,) = read_examples(images)
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
    (found,) = read_examples(tmp_path / name)
    np.testing.assert_array_equal(found.x.toarray(), [[0, 3]])


def test_a_name_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"what kind of file it is does not show"):
        read_examples(tmp_path / "data.csv")
