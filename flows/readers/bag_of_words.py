"""The bag-of-words format of the UCI repository: how often each word is in each document.

``docword.NAME.txt`` (or .gz) begins with three lines, the numbers of documents, of words in the
vocabulary and of entries; then each line has a document, a word, both from 1, and a count.
``vocab.NAME.txt`` beside it, if it is there, has the words, one on a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.readers.lines import (
    PIECE_BYTES,
    Piece,
    opened,
    parsed,
    pieces,
    shown,
    word_starts,
    words_per_line,
)

if TYPE_CHECKING:
    from scipy.sparse import csr_array

HEADER = ("documents", "words", "entries")
MOST = np.iinfo(np.int32).max  # of each of them, and of a word in a line
Numbers = npt.NDArray[np.float64]


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


def read_bag_of_words(path: Path, piece_bytes: int = PIECE_BYTES) -> Corpus:
    """Read a whole corpus; the text of the file is in memory only piece by piece.

    Counts of the same word in the same document are summed. Without a vocabulary the words are
    called "word 1", "word 2" and so on.

    Raises
    ------
    ConfigurationError
        A file cannot be read, or a line is wrong; the message has its number.
    """
    with opened(path) as file:
        sizes = _header(file, path)
        kept = [_entries(p, sizes) for p in pieces(file, path, len(HEADER) + 1, piece_bytes)]
    entries = np.concatenate(kept) if kept else np.zeros((0, 3), np.int32)
    documents, words, announced = sizes
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
        line = file.readline()
        # As float first: int refuses thousands of digits.
        if not line.strip().isdigit() or not 1 <= float(line) <= MOST:
            raise Piece(path, number, line).wrong(
                number, f"{shown(line)}, expected the number of {name} (1 to {MOST})"
            )
        sizes.append(int(line))
    return sizes[0], sizes[1], sizes[2]


def _entries(piece: Piece, sizes: tuple[int, int, int]) -> npt.NDArray[np.int32]:
    """The entries of a piece, int32, one row for each."""
    numbers = parsed(piece.text)
    words = words_per_line(piece.text, word_starts(piece.text))
    if numbers is not None and (words == 3).all():
        entries = numbers.reshape(-1, 3)
        if _fit(entries, sizes):
            return entries.astype(np.int32)
    for number, line in piece.lines():
        if line.strip() and not _fits(line, sizes):
            raise piece.wrong(
                number,
                f"{shown(line)}, expected a document (1 to {sizes[0]}), a word (1 to {sizes[1]}) "
                "and how often it is there (1 or more)",
            )
    raise piece.wrong(piece.first, "something after it is no entry")


def _fits(line: bytes, sizes: tuple[int, int, int]) -> bool:
    numbers = parsed(line)
    return numbers is not None and len(numbers) == 3 and _fit(numbers.reshape(1, 3), sizes)


def _fit(entries: Numbers, sizes: tuple[int, int, int]) -> bool:
    """Whether every entry is of whole numbers in range."""
    whole = (entries == np.floor(entries)).all() and (entries >= 1).all()
    most = np.array([sizes[0], sizes[1], MOST])
    return bool(whole and (entries <= most).all())


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
