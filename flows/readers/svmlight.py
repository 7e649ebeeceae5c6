"""The svmlight (libsvm) format: examples with few non-zero features, one on each line.

A line is a label, then ``index:value`` pairs in the order of their indices, from 1; what follows a
``#`` is a comment. The file is read piece by piece, and each piece with a few operations on whole
arrays; only a piece in which something is wrong is gone through line by line, to say where.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError
from flows.readers.examples import Examples
from flows.readers.lines import (
    BLANK,
    PIECE_BYTES,
    Integers,
    Piece,
    opened,
    parsed,
    pieces,
    shown,
    word_starts,
    words_per_line,
)

MOST = np.iinfo(np.int32).max  # the largest index; weights are dense, so far less is large already


def read_svmlight(
    path: Path, features: int | None = None, piece_bytes: int = PIECE_BYTES
) -> Iterator[Examples]:
    """Read examples in pieces.

    Parameters
    ----------
    path
        The file, plain or .gz.
    features
        How many there are, which makes larger indices an error; None: each piece is as wide as its
        largest index.
    piece_bytes
        About how much of the file to have in memory at once.

    Yields
    ------
    examples
        With a `csr_array` of float64 of which column 0 is the feature of index 1.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or a line is wrong; the message has its number.
    """
    with opened(path) as file:
        for piece in pieces(file, path, size=piece_bytes):
            cleaned = _without_comments(piece)
            found = _parsed(cleaned, features)
            if found is None:
                raise _complaint(cleaned, features)
            if len(found.y):
                yield found


def _without_comments(piece: Piece) -> Piece:
    if b"#" not in piece.text and b"qid:" not in piece.text:
        return piece
    lines = (line.split(b"#", 1)[0] for _, line in piece.lines())
    kept = (b" ".join(w for w in line.split() if not w.startswith(b"qid:")) for line in lines)
    return Piece(piece.path, piece.first, b"\n".join(kept))


def _parsed(piece: Piece, features: int | None) -> Examples | None:
    """The examples of a piece; None if there is something wrong with it."""
    pairs = _pairs_per_line(piece.text)
    numbers = None if pairs is None else parsed(piece.text.replace(b":", b" "))
    if pairs is None or numbers is None or len(numbers) != len(pairs) + 2 * pairs.sum():
        return None
    if not np.isfinite(numbers).all():
        return None
    ends = np.cumsum(1 + 2 * pairs)
    starts = ends - (1 + 2 * pairs)
    is_pair = np.ones(len(numbers), bool)
    # Not at the top: every process of a trial imports this package, for images.
    from scipy.sparse import csr_array

    is_pair[starts] = False
    of_pairs = numbers[is_pair].reshape(-1, 2)
    index = of_pairs[:, 0]
    rows = np.concatenate([[0], np.cumsum(pairs)])
    if not _indices_fit(index, rows, MOST if features is None else min(features, MOST)):
        return None
    width = features if features is not None else int(index.max(initial=0))
    kind = np.int32 if len(index) <= MOST else np.int64  # scipy would not do with less by itself
    positions = (index - 1).astype(kind), rows.astype(kind)
    x = csr_array((of_pairs[:, 1].copy(), *positions), shape=(len(pairs), width))
    return Examples(x, numbers[starts])


def _pairs_per_line(text: bytes) -> Integers | None:
    """How many pairs each line has that is not empty; None if it is not a word, then pairs."""
    starts = word_starts(text)
    words = words_per_line(text, starts)
    characters = np.frombuffer(text, np.uint8)
    colons = np.flatnonzero(characters == ord(":"))
    word = np.cumsum(starts) - 1  # the number of the word that a character is in or after
    is_label = np.zeros(words.sum(), bool)
    is_label[np.cumsum(words) - words] = True
    if not np.array_equal(word[colons], np.flatnonzero(~is_label)):
        return None
    digits = np.cumsum((characters >= ord("0")) & (characters <= ord("9")))
    before = np.flatnonzero(starts)[~is_label] - 1
    long = colons - 1 - before  # how many characters the index has
    if (long < 1).any() or (digits[colons] - digits[before] != long).any():
        return None
    if BLANK[characters[colons + 1]].any():  # a line end follows the last one
        return None
    return words - 1


def _indices_fit(index: npt.NDArray[np.float64], rows: Integers, most: int) -> bool:
    """Whether the indices, which are of digits only, are in range and increase along each row."""
    if not len(index):
        return True
    if index.min() < 1 or index.max() > most:
        return False
    follows = np.ones(len(index), bool)
    follows[rows[:-1][rows[:-1] < len(index)]] = False
    return bool((np.diff(index, prepend=0)[follows] > 0).all())


# -- what is wrong ---------------------------------------------------------------------------------


def _complaint(piece: Piece, features: int | None) -> ConfigurationError:
    """Find the first line that is wrong, and say what is."""
    for number, line in piece.lines():
        problem = _problem(line.split(), features)
        if problem:
            return piece.wrong(number, f"{problem}, in {shown(line)}")
    return piece.wrong(piece.first, "something after it is no svmlight")


def _problem(words: list[bytes], features: int | None) -> str | None:
    if not words:
        return None
    if _number(words[0]) is None:
        return f"the label {shown(words[0])} is no finite number"
    last = 0
    for word in words[1:]:
        index, colon, value = word.partition(b":")
        if not colon or not index.isdigit():
            return f"{shown(word)} is no pair such as 7:0.5"
        if _number(value) is None:
            return f"the value of {shown(word)} is no finite number"
        if float(index) > MOST:
            return f"an index above {MOST}"
        if int(index) < 1:
            return "the index 0, but indices begin with 1"
        if int(index) <= last:
            return f"the index {int(index)} after {last}, but indices must increase"
        if features is not None and int(index) > features:
            return f"the index {int(index)}, but there are {features} features"
        last = int(index)
    return None


def _number(word: bytes) -> float | None:
    numbers = parsed(word) if b":" not in word else None
    if numbers is None or len(numbers) != 1 or not np.isfinite(numbers[0]):
        return None
    return float(numbers[0])
