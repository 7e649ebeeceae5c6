"""The svmlight (libsvm) format: examples with few non-zero features, one on each line.

A line is a label, then ``index:value`` pairs in the order of their indices; what follows a ``#`` is
a comment. Indices begin with 0 or with 1, which no file says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dps.errors import ConfigurationError
from flows.readers.files import first_wrong, opened, shown
from flows.readers.values import Array, Examples

MOST = np.iinfo(np.int32).max  # index; weights are dense, so far less is large already
UNDERLINED = re.compile(rb"^[^#\n]*_", re.MULTILINE)

ZeroBased = bool | Literal["auto"]


def read_svmlight(paths: Sequence[Path], zero_based: ZeroBased = "auto") -> list[Examples]:
    """Read files that have the same features.

    Parameters
    ----------
    paths
        The files, plain or .gz.
    zero_based
        Whether indices begin with 0. "auto": they do if one of all the files is 0, as in
        scikit-learn.

    Returns
    -------
    examples
        Of each file, with `x` a `csr_array` of float64, as wide as the largest index of all files.

    Raises
    ------
    ConfigurationError
        A file cannot be read or has no examples, or a line is wrong; the message has its number.
    """
    first = int(zero_based is False)
    read = [_loaded(path, first) for path in paths]
    if zero_based == "auto" and not any((x.indices == 0).any() for x, _ in read):
        first = 1
        read = [(x[:, 1:], y) for x, y in read]
    width = max(x.shape[1] for x, _ in read)
    note = f"indices {'taken to ' if zero_based == 'auto' else ''}begin with {first}"
    for x, _ in read:
        x.resize(x.shape[0], width)
    return [Examples(x, y, note) for x, y in read]


def _loaded(path: Path, first: int) -> tuple[Any, Array]:
    # Not at the top: every process of a trial imports this package, for images.
    from scipy.sparse import csr_array

    with opened(path) as file:
        text = file.read()
    try:
        x, y = _parsed(text, first)
    except (ValueError, OverflowError) as error:
        raise _complaint(path, text, first) from error
    if not x.nnz:
        raise ConfigurationError(f"{path}: has no examples with a feature, expected one at least")
    kind = np.int32 if x.nnz <= MOST else np.int64  # scipy would not do with less by itself
    positions = x.indices.astype(kind), x.indptr.astype(kind)
    return csr_array((x.data, *positions), shape=x.shape), y


def _parsed(text: bytes, first: int) -> tuple[Any, Array]:
    """Examples with the index `first` in column 0; raises `ValueError` or `OverflowError`."""
    from sklearn.datasets import load_svmlight_file

    if UNDERLINED.search(text):
        raise ValueError("only Python reads 1_000 as 1000")
    x, y = load_svmlight_file(BytesIO(text), zero_based=not first)
    if not (np.isfinite(x.data).all() and np.isfinite(y).all()):
        raise ValueError("a number is not finite")
    return x, y


def _complaint(path: Path, text: bytes, first: int) -> ConfigurationError:
    parse = partial(_parsed, first=first)
    lines = text.splitlines(keepends=True)
    number = first_wrong(lines, parse)
    words = re.findall(rb"\S+\s*", lines[number])
    word = words[first_wrong(words, parse)]
    return ConfigurationError(
        f"{path}, line {number + 1}: {shown(word)} in {shown(lines[number])}, expected a number "
        f"and then pairs such as 7:0.5, whose indices increase, from {first} to {MOST:,}"
    )
