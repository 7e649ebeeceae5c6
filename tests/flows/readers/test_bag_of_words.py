"""The bag-of-words reader: counts, vocabulary, and what it says of errors."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import random

from dps.errors import ConfigurationError
from flows.readers import read_bag_of_words

GOOD = "2\n3\n4\n1 1 5\n1 3 1\n2 2 7\n2 3 2\n"


def written(folder: Path, text: str, vocabulary: str | None = None) -> Path:
    path = folder / "docword.small.txt"
    path.write_text(text)
    if vocabulary is not None:
        (folder / "vocab.small.txt").write_text(vocabulary)
    return path


def test_counts_and_words_are_read(tmp_path: Path) -> None:
    corpus = read_bag_of_words(written(tmp_path, GOOD, "apple\npear\nplum\n"))
    np.testing.assert_array_equal(corpus.counts.toarray(), [[5, 0, 1], [0, 7, 2]])
    assert corpus.words == ("apple", "pear", "plum")


def test_without_a_vocabulary_words_have_numbers(tmp_path: Path) -> None:
    corpus = read_bag_of_words(written(tmp_path, GOOD))
    assert corpus.words == ("word 1", "word 2", "word 3")


def test_large_packed_corpora_are_read(tmp_path: Path) -> None:
    counts = random(200, 100, density=0.1, random_state=0, format="coo")
    values = 1 + np.arange(counts.nnz) % 9
    entries = zip(counts.row + 1, counts.col + 1, values, strict=True)
    text = f"200\n100\n{counts.nnz}\n" + "".join(f"{d} {w} {n}\n" for d, w, n in entries)
    path = tmp_path / "docword.large.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    found = read_bag_of_words(path).counts
    assert found.nnz == counts.nnz
    np.testing.assert_array_equal(found.tocoo().data, found[counts.row, counts.col][np.lexsort(
        (counts.col, counts.row))])  # fmt: skip
    assert found.sum() == values.sum()


def test_a_word_that_is_twice_in_a_document_is_summed(tmp_path: Path) -> None:
    corpus = read_bag_of_words(written(tmp_path, "1\n1\n2\n1 1 2\n1 1 3\n"))
    assert corpus.counts.toarray().tolist() == [[5]]


def test_a_sum_of_counts_may_be_more_than_any_line_can_say(tmp_path: Path) -> None:
    most = 2**31 - 1
    corpus = read_bag_of_words(written(tmp_path, f"1\n1\n2\n1 1 {most}\n1 1 {most}\n"))
    assert corpus.counts.toarray().tolist() == [[2 * most]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0\n3\n4\n", "line 1: '0', expected the number of documents (1 to 2147483647)"),
        (f"2\n{2**31}\n4\n", "line 2: '2147483648', expected the number of words (1 to"),
        (f"{3 * 10**12}\n3\n4\n", "line 1: '3000000000000', expected the number of documents"),
        (f"2\n3\n{'9' * 5000}\n", "999...' (5,000 characters), expected the number of entries"),
        ("2\nx\n4\n", "line 2: 'x', expected the number of words"),
        ("2\n", "line 2: '', expected the number of words"),
        (GOOD + "3 1 1\n", "line 8: '3 1 1', expected a document (1 to 2), a word (1 to 3)"),
        (GOOD + "1 0 1\n", "line 8: '1 0 1', expected a document"),
        (GOOD + "1 1 0\n", "line 8: '1 1 0', expected a document"),
        (GOOD + "1 1 1.5\n", "line 8: '1 1 1.5', expected a document"),
        (GOOD + "1 1 nan\n", "line 8: '1 1 nan', expected a document"),
        (GOOD + "\n1 1\n", "line 9: '1 1', expected a document"),
        (GOOD + "1 1\n1 1 1 1\n", "line 8: '1 1', expected a document"),
        (GOOD + "1 one 1\n", "line 8: '1 one 1', expected a document"),
        (GOOD + "1 1 1\n", "has 5 entries, but its line 3 announces 4; is it whole?"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, problem: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as error:
        read_bag_of_words(path)
    assert str(error.value).startswith(str(path))
    assert problem in str(error.value)


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "apple\n")
    with pytest.raises(ConfigurationError, match=r"vocab\.small\.txt has 1 words, but .* says 3"):
        read_bag_of_words(path)
