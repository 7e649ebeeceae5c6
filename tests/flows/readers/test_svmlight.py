"""The svmlight reader: the same examples as scikit-learn's, and what it says of bad lines."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import random
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from dps.errors import ConfigurationError
from flows.readers.svmlight import ZeroBased, read_svmlight

LINES = b"1 1:0.5 3:2\n-1 2:1\n"


def written(folder: Path, text: bytes, name: str = "data.svm") -> Path:
    path = folder / name
    path.write_bytes(text)
    return path


def dumped(folder: Path, x: np.ndarray, zero_based: bool, name: str = "data.svm") -> Path:
    dump_svmlight_file(x, np.arange(len(x)) % 2, str(folder / name), zero_based=zero_based)
    return folder / name


def test_it_reads_what_scikit_learn_reads(tmp_path: Path) -> None:
    x = random(3000, 500, density=0.05, random_state=0, format="csr")
    path = tmp_path / "data.svm"
    dump_svmlight_file(x, np.arange(3000) % 3, str(path), zero_based=False)
    wanted, labels = load_svmlight_file(str(path))
    packed = written(tmp_path, gzip.compress(path.read_bytes()), "data.svm.gz")
    for each in (path, packed):
        (found,) = read_svmlight([each])
        assert (found.x != wanted).nnz == 0
        assert found.x.indices.dtype == np.int32
        np.testing.assert_array_equal(found.y, labels)


def test_comments_queries_and_empty_lines_are_passed_over(tmp_path: Path) -> None:
    text = b"# made_by hand\n\n1 qid:7 1:0.5 3:2 # the_first\n\r\n-1 2:1\r\n3 #\n2"
    (found,) = read_svmlight([written(tmp_path, text)])
    np.testing.assert_array_equal(found.y, [1, -1, 3, 2])
    np.testing.assert_array_equal(found.x.toarray()[:2], [[0.5, 0, 2], [0, 1, 0]])
    assert found.x[2:].nnz == 0


X = np.array([[0, 0, 2.0, 0], [0, 1, 0, 3]])  # of the first feature, nothing is there


@pytest.mark.parametrize(
    ("counted_from_0", "zero_based", "columns", "told"),
    [
        (False, "auto", X, "indices taken to begin with 1"),
        (False, False, X, "indices begin with 1"),
        (True, True, X, "indices begin with 0"),
        (True, "auto", X[:, 1:], "indices taken to begin with 1"),
        (False, True, np.column_stack([[0, 0], X]), "indices begin with 0"),
    ],
)
def test_what_indices_begin_with_is_told(
    tmp_path: Path, counted_from_0: bool, zero_based: ZeroBased, columns: np.ndarray, told: str
) -> None:
    (found,) = read_svmlight([dumped(tmp_path, X, counted_from_0)], zero_based)
    np.testing.assert_array_equal(found.x.toarray(), columns)
    assert found.note == told


def test_an_index_of_0_tells_what_those_of_every_file_begin_with(tmp_path: Path) -> None:
    other = np.array([[5.0, 0, 0, 0, 1]])
    paths = [dumped(tmp_path, X, True), dumped(tmp_path, other, True, "test.svm")]
    train, test = read_svmlight(paths)
    np.testing.assert_array_equal(train.x.toarray(), np.column_stack([X, [0, 0]]))
    np.testing.assert_array_equal(test.x.toarray(), other)
    assert train.note == "indices taken to begin with 0"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"one 1:2", "'one' in 'one 1:2'"),
        (b"1:2 3:4", "'1:2' in"),
        (b"nan 1:2", "'nan' in"),
        (b"1 2", "'2' in '1 2'"),
        (b"1 a:2", "'a:2' in"),
        (b"1 1.5:2", "'1.5:2' in"),
        (b"1 1e1:2", "'1e1:2' in"),
        (b"1 -1:2", "'-1:2' in"),
        (b"1 :2", "':2' in"),
        (b"1 2:", "'2:' in"),
        (b"1 2: 3", "'2:' in"),
        (b"1 2:3:4 5", "'2:3:4' in"),
        (b"1 1:1 2:x 3:4", "'2:x' in '1 1:1 2:x 3:4'"),
        (b"1 2:inf", "'2:inf' in"),
        (b"1 2:1_0", "'2:1_0' in"),
        (b"1 0:1", "'0:1' in '1 0:1'"),
        (b"1 3:1 2:1", "'2:1' in"),
        (b"1 3:1 3:1", "'3:1' in"),
        (b"1 2:\xff", r"'2:\\xff' in"),
        (b"9 " + 90 * b"x", " in '9 xxx"),
        (b"1 1:1 2147483648:1", "'2147483648:1' in"),
        (b"1 " + b"9" * 5000 + b":1", "'9999"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_the_word(
    tmp_path: Path, line: bytes, word: str
) -> None:
    path = written(tmp_path, 40 * LINES + line + b"\n" + LINES)
    with pytest.raises(ConfigurationError) as error:
        read_svmlight([path], zero_based=False)
    assert str(error.value).startswith(f"{path}, line 81: ")
    assert word in str(error.value)
    assert "expected a number and then pairs such as 7:0.5" in str(error.value)


def test_the_largest_index_is_read(tmp_path: Path) -> None:
    (found,) = read_svmlight([written(tmp_path, b"1 2147483647:3\n")])
    assert found.x.shape == (1, 2**31 - 1)
    assert found.x.indices.tolist() == [2**31 - 2]


@pytest.mark.parametrize("text", [b"", b"\n# nothing\n", b"1\n-1\n"])
def test_a_file_without_a_feature_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.svm: has no examples with a feature"):
        read_svmlight([written(tmp_path, text)])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.svm cannot be read"):
        read_svmlight([tmp_path / "none.svm"])
    cut_off = gzip.compress(1000 * LINES)[:-20]
    with pytest.raises(ConfigurationError, match=r"cut\.svm\.gz cannot be read"):
        read_svmlight([written(tmp_path, cut_off, "cut.svm.gz")])
