"""The svmlight (libsvm) format: examples with few non-zero features, one on each line.

A line is a label, then ``index:value`` pairs in the order of their indices, from 1; what follows a
``#`` is a comment. The file is read piece by piece, each by scikit-learn; only a piece in which
something is wrong is gone through line by line, to say where.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np

from dps.errors import ConfigurationError
from flows.readers.examples import Examples
from flows.readers.lines import PIECE_BYTES, Piece, opened, parsed, pieces, shown

MOST = np.iinfo(np.int32).max  # the largest index; weights are dense, so far less is large already
LENIENT = re.compile(rb"_|\+\d+:")  # what Python takes for numbers, and the format does not


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
    if LENIENT.search(piece.text):
        return None
    # Not at the top: every process of a trial imports this package, for images.
    from scipy.sparse import csr_array
    from sklearn.datasets import load_svmlight_file

    try:
        x, y = load_svmlight_file(BytesIO(piece.text), n_features=features, zero_based=False)
    except (ValueError, OverflowError):
        return None
    if not (np.isfinite(x.data).all() and np.isfinite(y).all()):
        return None
    # Of no index at all, scikit-learn makes a column.
    width = features if features is not None else 1 + int(x.indices.max(initial=-1))
    kind = np.int32 if x.nnz <= MOST else np.int64  # scipy would not do with less by itself
    positions = x.indices.astype(kind), x.indptr.astype(kind)
    return Examples(csr_array((x.data, *positions), shape=(len(y), width)), y)


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
