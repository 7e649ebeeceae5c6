"""The svmlight reader: the same examples as scikit-learn's, and what it says of bad lines."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import random, vstack
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

from dps.errors import ConfigurationError
from flows.problems.sparse_data import survey
from flows.readers.lines import Piece
from flows.readers.svmlight import _complaint, _parsed, read_svmlight

LINES = b"1 1:0.5 3:2\n-1 2:1\n"


def written(folder: Path, text: bytes, name: str = "data.svm") -> Path:
    path = folder / name
    path.write_bytes(text)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = random(3000, 500, density=0.05, random_state=0, format="csr")
    path = tmp_path_factory.mktemp("svmlight") / "large.svm"
    dump_svmlight_file(x, np.arange(3000) % 3, str(path), zero_based=False)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [100, 5000, 1 << 23])
def test_it_reads_what_scikit_learn_reads(large: Path, piece_bytes: int) -> None:
    x, y = load_svmlight_file(str(large))
    pieces = list(read_svmlight(large, 500, piece_bytes))
    assert len(pieces) > 100 or piece_bytes > 5000
    assert abs(vstack([piece.x for piece in pieces]) - x).max() < 1e-15
    np.testing.assert_array_equal(np.concatenate([piece.y for piece in pieces]), y)


def test_it_unpacks_on_the_way(large: Path, tmp_path: Path) -> None:
    packed = written(tmp_path, gzip.compress(large.read_bytes()), "data.svm.gz")
    (plain,), (unpacked,) = read_svmlight(large), read_svmlight(packed)
    assert (plain.x != unpacked.x).nnz == 0


def test_only_a_piece_of_the_file_is_in_memory(large: Path) -> None:
    tracemalloc.start()
    for _ in read_svmlight(large, 500, piece_bytes=20_000):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < large.stat().st_size / 2


def test_comments_queries_and_empty_lines_are_passed_over(tmp_path: Path) -> None:
    text = b"# made by hand\n\n1 qid:7 1:0.5 3:2 # the first\n\r\n-1 2:1\r\n3 #\n2"
    first, last = read_svmlight(written(tmp_path, text), 3)  # what no line end follows, alone
    np.testing.assert_array_equal([*first.y, *last.y], [1, -1, 3, 2])
    np.testing.assert_array_equal(first.x.toarray(), [[0.5, 0, 2], [0, 1, 0], [0, 0, 0]])


def test_an_empty_file_has_no_examples(tmp_path: Path) -> None:
    assert list(read_svmlight(written(tmp_path, b"\n# nothing\n"))) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"one 1:2", "the label 'one' is no finite number, in 'one 1:2'"),
        (b"1:2 3:4", "the label '1:2' is no finite number"),
        (b"nan 1:2", "the label 'nan' is no finite number"),
        (b"1 2", "'2' is no pair such as 7:0.5"),
        (b"1 a:2", "'a:2' is no pair"),
        (b"1 1.5:2", "'1.5:2' is no pair"),
        (b"1 1e1:2", "'1e1:2' is no pair"),
        (b"1 -1:2", "'-1:2' is no pair"),
        (b"1 :2", "':2' is no pair"),
        (b"1 2:", "the value of '2:' is no finite number"),
        (b"1 2: 3", "the value of '2:' is no finite number"),
        (b"1 2:3:4 5", "the value of '2:3:4' is no finite number"),
        (b"1 2:x", "the value of '2:x' is no finite number"),
        (b"1 2:inf", "the value of '2:inf' is no finite number"),
        (b"1 0:1", "the index 0, but indices begin with 1"),
        (b"1 3:1 2:1", "the index 2 after 3, but indices must increase"),
        (b"1 3:1 3:1", "the index 3 after 3, but indices must increase"),
        (b"1 10:1", "the index 10, but there are 9 features"),
        (b"1 2:\xff", r"the value of '2:\\xff' is no finite number"),
        (b"9 " + 30 * b"x", f"'{30 * 'x'}' is no pair such as 7:0.5, in '9 {30 * 'x'}'"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = written(tmp_path, 40 * LINES + line + b"\n" + LINES)
    with pytest.raises(ConfigurationError) as error:
        list(read_svmlight(path, 9, piece_bytes=100))
    assert f"{path}, line 81: {problem}" in str(error.value)


@pytest.mark.parametrize("index", [2**31, 99999999999999999999, "9" * 5000])
def test_an_index_that_no_vector_could_have_is_told(tmp_path: Path, index: int | str) -> None:
    path = written(tmp_path, LINES + f"-1 1:1 {index}:1\n".encode())
    with pytest.raises(ConfigurationError, match=r"data\.svm, line 3: an index above 2147483647"):
        survey(path)


def test_the_largest_index_is_read(tmp_path: Path) -> None:
    (found,) = read_svmlight(written(tmp_path, b"1 2147483647:3\n"))
    assert found.x.shape == (1, 2**31 - 1)
    assert found.x.indices.tolist() == [2**31 - 2]


def test_examples_before_a_bad_piece_have_been_read(tmp_path: Path) -> None:
    reader = read_svmlight(written(tmp_path, 40 * LINES + b"bad\n"), piece_bytes=100)
    assert len(next(reader).y) > 0


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.svm cannot be read"):
        list(read_svmlight(tmp_path / "none.svm"))
    cut_off = gzip.compress(1000 * LINES)[:-20]
    with pytest.raises(ConfigurationError, match=r"cut\.svm\.gz cannot be read"):
        list(read_svmlight(written(tmp_path, cut_off, "cut.svm.gz")))


@given(st.text(alphabet="01:. \n-e\tx", max_size=30))
def test_a_piece_is_refused_just_when_a_line_of_it_is_wrong(text: str) -> None:
    """What reads whole pieces and what looks for the bad line agree on what svmlight is."""
    piece = Piece(Path("drawn"), 1, text.encode() + b"\n")
    found = _parsed(piece, None)
    if found is None:
        assert "something after it" not in str(_complaint(piece, None))
    else:
        assert "something after it" in str(_complaint(piece, None))
