"""Npz files: what is read, and what is said of damage, whatever reads them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array, random, save_npz

from dps.errors import ConfigurationError
from flows.readers import read_images
from flows.readers.npz import read_npz
from flows.readers.ratings import read_ratings

X = np.arange(6.0).reshape(3, 2)
Y = np.array([1, 0, 1])
READERS: dict[str, Callable[[Path], Any]] = {
    "images": read_images,
    "examples": read_npz,
    "ratings": read_ratings,
}
NAMES = ("x", "y", "user", "item", "rating")
DATA = b"0123456789abcdef" * 8


def zipped(member: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in NAMES:
            archive.writestr(f"{name}.npy", member)
    return file.getvalue()


def single(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# What an archive's table of contents says of each member: the version that is needed, then two
# bytes of flags and two of how it is packed.
ENTRY = b"PK\x01\x02\x14\x03\x14"
ARRAY = single(np.frombuffer(DATA, np.uint8))
DAMAGE = {
    "cut off": zipped(ARRAY)[:-30],
    "a checksum that does not fit": zipped(ARRAY).replace(DATA, DATA[::-1]),
    "a single array": ARRAY,
    "what cannot be unpacked": zipped(b"\xff" * 9).replace(
        ENTRY + bytes(5), ENTRY + b"\0\0\0\x08\0"
    ),
    "members that are no arrays": zipped(b"1 2 3"),
    "a header that ends too soon": zipped(ARRAY.replace(b"}", b" ")),
    "a packing of the future": zipped(ARRAY).replace(ENTRY, ENTRY[:-1] + b"\xff"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told(tmp_path: Path, reader: str, damage: str) -> None:
    (tmp_path / "a.npz").write_bytes(DAMAGE[damage])
    with pytest.raises(ConfigurationError, match=r"a\.npz cannot be read as npz: .*numpy\.savez"):
        READERS[reader](tmp_path / "a.npz")


@pytest.mark.parametrize("reader", READERS)
def test_pickles_are_told_with_the_name_of_the_array(tmp_path: Path, reader: str) -> None:
    (tmp_path / "a.npz").write_bytes(zipped(single(np.array([{}]))))
    with pytest.raises(ConfigurationError, match=r"a\.npz: \w+ is of objects.*\.astype\(str\)"):
        READERS[reader](tmp_path / "a.npz")


def test_arrays_are_read_as_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.astype(np.float32), label=Y)
    found = read_npz(tmp_path / "a.npz")
    np.testing.assert_array_equal(found.x, X)
    np.testing.assert_array_equal(found.y, Y)
    assert found.x.dtype == found.y.dtype == np.float64


@pytest.mark.parametrize(
    "labels", [["a", "é", "a"], [b"a", "é".encode(), b"a"]], ids=["texts", "bytes"]
)
def test_labels_may_be_texts_or_bytes(tmp_path: Path, labels: list[Any]) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=np.array(labels), other=np.array([{}]))
    assert read_npz(tmp_path / "a.npz").y.tolist() == ["a", "é", "a"]
    with pytest.raises(ConfigurationError, match=r"y\[0\] is 'a', expected a number"):
        read_npz(tmp_path / "a.npz", regression=True)


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
        ({"x": X, "y": Y[:2]}, r"x is \[3, 2\] and y \[2\], expected .* for each row of x"),
        ({"x": X[0], "y": Y}, r"x is \[2\] and y \[3\]"),
        ({"x": X[:0], "y": Y[:0]}, r"x is \[0, 2\] and y \[0\], expected one example and one"),
        ({"x": X[:, :0], "y": Y}, r"x is \[3, 0\] and y \[3\], expected one example and one"),
        ({"x": np.zeros((0, 2, 2)), "y": Y[:0]}, r"x is \[0, 2, 2\] and y \[0\], expected one"),
        ({"x": np.array([["1.5", "a"]]), "y": [1]}, r"x\[0, 1\] is 'a', expected a number"),
        ({"x": X + 1j, "y": Y}, r"x\[0, 0\] is '1j', expected a number"),
        ({"x": X, "y": ["a", "", "b"]}, r"y\[1\] is empty, expected a class or a number"),
        ({"x": np.where(X == 3, np.nan, X), "y": Y}, r"x\[1, 1\] is missing, expected a number"),
        ({"x": X, "y": np.array([1, np.inf, 0])}, r"y\[1\] is 'inf', expected a number"),
        ({"x": np.array([[{}]]), "y": [1]}, r"x is of objects, .* not loaded; save x\.astype\("),
        ({"x": X, "y": np.array(["a", 1, "b"], object)}, r"y is of objects, .*y\.astype\(str\)"),
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
        with pytest.raises(ConfigurationError, match="its sparse matrix is damaged"):
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
