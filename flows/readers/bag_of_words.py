"""The bag-of-words format of the UCI repository: how often each word is in each document.

``docword.NAME.txt`` (or .gz) begins with three lines, the numbers of documents, of words in the
vocabulary and of entries; then each line has a document, a word, both from 1, and a count.
``vocab.NAME.txt`` beside it, if it is there, has the words, one on a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.readers.files import first_wrong, opened, shown

if TYPE_CHECKING:
    from scipy.sparse import csr_array

HEADER = ("documents", "words", "entries")
MOST = np.iinfo(np.int32).max  # of each of them, and of a word in a line


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as counts of words.

    Attributes
    ----------
    counts
        `csr_array` of int64, documents × words; no entry is there twice.
    words
        The vocabulary, one word for each column.
    """

    counts: csr_array
    words: tuple[str, ...]


def read_bag_of_words(path: Path) -> Corpus:
    """Read a whole corpus.

    Counts of the same word in the same document are summed. Without a vocabulary the words are
    called "word 1", "word 2" and so on.

    Raises
    ------
    ConfigurationError
        A file cannot be read, or a line is wrong; the message has its number.
    """
    with opened(path) as file:
        documents, words, announced = _header(file, path)
        lines = file.readlines()
    most = (documents, words, MOST)
    try:
        entries = _entries(b"".join(lines), most)
    except ValueError as error:
        number = first_wrong(lines, partial(_entries, most=most))
        raise ConfigurationError(
            f"{path}, line {len(HEADER) + 1 + number}: {shown(lines[number])}, expected a document "
            f"(1 to {documents}), a word (1 to {words}) and how often it is there (1 or more)"
        ) from error
    if len(entries) != announced:
        raise ConfigurationError(
            f"{path} has {len(entries)} entries, but its line 3 announces {announced}; is it whole?"
        )
    # Not at the top: every process of a trial imports this package, for images.
    from scipy.sparse import csr_array

    row, column, count = entries.T
    # A line's count is of int32, but a sum of several need not be.
    counts = csr_array((count.astype(np.int64), (row - 1, column - 1)), shape=(documents, words))
    counts.sum_duplicates()
    return Corpus(counts, _vocabulary(path, words))


def _header(file: IO[bytes], path: Path) -> tuple[int, int, int]:
    sizes = []
    for number, name in enumerate(HEADER, 1):
        line = file.readline().strip()
        # As float first: int refuses thousands of digits.
        if not line.isdigit() or not 1 <= float(line) <= MOST:
            raise ConfigurationError(
                f"{path}, line {number}: {shown(line)}, expected the number of {name} (1 to {MOST})"
            )
        sizes.append(int(line))
    return sizes[0], sizes[1], sizes[2]


def _entries(text: bytes, most: tuple[int, int, int]) -> npt.NDArray[np.int32]:
    """One row for each entry; raises `ValueError` if a line is none."""
    if not text.strip():
        return np.zeros((0, 3), np.int32)  # of which loadtxt would warn
    entries = np.loadtxt(BytesIO(text), np.int32, ndmin=2)
    if entries.shape[1] != 3 or not ((entries >= 1) & (entries <= most)).all():
        raise ValueError("expected three numbers in range")
    return entries


def _vocabulary(path: Path, words: int) -> tuple[str, ...]:
    """The words of ``vocab.NAME.txt`` beside ``docword.NAME.txt``."""
    name = path.name.removesuffix(".gz").replace("docword", "vocab", 1)
    beside = path.with_name(name)
    if not name.startswith("vocab") or not beside.is_file():
        return tuple(f"word {number}" for number in range(1, words + 1))
    try:
        found = tuple(beside.read_text("utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{beside} cannot be read: {error}") from error
    if len(found) != words:
        raise ConfigurationError(f"{beside} has {len(found)} words, but {path} says {words}")
    return found
