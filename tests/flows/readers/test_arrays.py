"""npz and svmlight files: what is read, and the errors for a user's file."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file

from dps.errors import ConfigurationError
from flows.readers import read_npz, read_svmlight

X = np.arange(12.0).reshape(4, 3)


def npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "a.npz", **arrays)
    return folder / "a.npz"


def svmlight(folder: Path, text: str, name: str = "a.svm") -> Path:
    (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return folder / name


def test_arrays_of_any_dimension_and_dtype_are_read(tmp_path: Path) -> None:
    for y, expected in (
        (np.array([0, 1, 1, 0]), [0, 1, 1, 0]),
        (np.array(["u", "v", "v", "u"]), ["u", "v", "v", "u"]),
        (np.array([b"u", b"v", b"v", b"u"]), ["u", "v", "v", "u"]),
        (np.array([True, False, True, False]), [1, 0, 1, 0]),
    ):
        found = read_npz(npz(tmp_path, x=X.reshape(4, 1, 3).astype(np.int8), y=y))
        assert (found.x.tolist(), found.y.tolist()) == (X.tolist(), expected)
    assert read_npz(npz(tmp_path, a=X, b=X[:, 0]), "a", "b", regression=True).y.tolist()[1] == 3


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"x": X}, "has the arrays x, but no 'y'"),
        ({"x": X, "y": X[0]}, r"x is \[4, 3\] and y \[3\], expected at least one example"),
        ({"x": X * np.nan, "y": X[:, 0]}, r"a\.npz: x\[0, 0\] is missing, expected a number"),
        ({"x": np.full((4, 3), "a"), "y": X[:, 0]}, r"x\[0, 0\] is 'a', expected a number"),
        ({"x": np.full((4, 3), "1_0"), "y": X[:, 0]}, r"x\[0, 0\] is '1_0', expected a number"),
        ({"x": X * 1j, "y": X[:, 0]}, r"x\[0, 0\] is '0j', expected a number"),
        ({"x": X.astype("M8[D]"), "y": X[:, 0]}, r"x\[0, 0\] is '1970-.*', expected a number"),
        ({"x": X, "y": np.array(["u", "v", "", "u"])}, r"y\[2\] is missing, expected a class"),
        ({"x": X, "y": np.array(["1", "2", "1,5", "2"])}, r"y\[2\] is '1,5', expected a number"),
        ({"x": X, "y": np.array(["u", None])}, r"cannot be read as npz: .*strings as array.astype"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path: Path, arrays: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        read_npz(npz(tmp_path, **arrays))


def test_svmlight_is_read_plain_or_packed_with_indices_from_0_or_1(tmp_path: Path) -> None:
    path = svmlight(tmp_path, "1 1:2 3:4 # why\n-1\n")
    found = read_svmlight(path)
    assert found.x.toarray().tolist() == [[2, 0, 4], [0, 0, 0]]
    assert found.y.tolist() == [1, -1]
    packed = tmp_path / "c.svm.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_svmlight(packed).x.shape == (2, 3)
    x, y = np.eye(3)[:, ::-1], np.arange(3)
    for zero_based in (True, False):
        dump_svmlight_file(x, y, str(tmp_path / "a.svm"), zero_based=zero_based)
        assert read_svmlight(tmp_path / "a.svm").x.toarray().tolist() == x.tolist()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1 1:2\n1 2:x\n", "line 2: '1 2:x', expected a number and then pairs such as 7:0.5"),
        ("1 1:2\n\n1 2:1 1:1\n", "line 3: '1 2:1 1:1', expected .* whose indices increase"),
        ("1 1:2\n1 1:inf\n", "line 2: '1 1:inf', expected .*: a number is not finite"),
        ("", "expected at least one example with a feature"),
        ("1 1:2\n\udcff\n", r"line 2: '.+xff', expected a number"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"a\.svm.*{problem}"):
        read_svmlight(svmlight(tmp_path, text))
