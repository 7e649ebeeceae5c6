"""The default corpus of the topic model: the docstrings of installed packages.

They are written as a file in the bag-of-words format, and read like any other corpus.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.sparse import csr_array

from dps import ConfigurationError

PACKAGES = ("sklearn", "scipy", "numpy", "matplotlib", "dask", "distributed", "mlflow")
WORD = re.compile(r"[a-z]{3,}")
MIN_WORDS = 60  # in a docstring, for it to be a document
MIN_DOCUMENTS = 8  # that a word must be in, and at most this share of all
MAX_OF_ALL = 0.25


def write_corpus(folder: Path, documents: int, seed: int) -> Path:
    """Write random docstrings as ``docword.docstrings.txt``; return its path.

    Raises `ConfigurationError` if the installed packages have too few docstrings.
    """
    texts = _docstrings(documents, np.random.default_rng(seed))
    bags = [Counter(WORD.findall(text.lower())) for text in texts]
    known = {word: number for number, word in enumerate(_vocabulary(bags), 1)}
    lines = [
        f"{document} {known[word]} {count}\n"
        for document, bag in enumerate(bags, 1)
        for word, count in sorted(bag.items())
        if word in known
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.docstrings.txt").write_text("".join(f"{word}\n" for word in known))
    path = folder / "docword.docstrings.txt"
    path.write_text(f"{len(bags)}\n{len(known)}\n{len(lines)}\n" + "".join(lines))
    return path


@dataclass(frozen=True, eq=False)
class Corpus:
    """Word counts, int64[documents, words], and the word of each column."""

    counts: csr_array
    words: tuple[str, ...]


def read_bag_of_words(path: Path) -> Corpus:
    """Read a corpus in the bag-of-words format of the UCI repository, plain or .gz.

    ``docword.NAME.txt`` begins with three lines, the numbers of documents, of words, of entries;
    then each line has a document, a word, both from 1, and a count. ``vocab.NAME.txt`` beside it
    has the words, one on a line.

    Raises `ConfigurationError` if a file cannot be read, or is not in this format.
    """
    try:
        header = pd.read_csv(path, header=None, nrows=3)
        documents, words, announced = map(int, header[0])
        entries = pd.read_csv(path, sep=" ", skiprows=3, header=None).to_numpy(np.int64)
        if entries.shape != (announced, 3):
            raise ValueError(f"expected {announced} lines of three numbers after the first three")
        document, word, count = entries.T
        if count.min() < 1 or min(document.min(), word.min()) < 1:
            raise ValueError("a number is below 1")
        places = (document - 1, word - 1)
        counts = csr_array((count, places), shape=(documents, words))
        beside = path.with_name(path.name.removesuffix(".gz").replace("docword", "vocab", 1))
        names = tuple(f"word {number}" for number in range(1, words + 1))
        if beside.name.startswith("vocab") and beside.is_file():
            names = tuple(beside.read_text("utf-8").split())
        if len(names) != words:
            raise ValueError(f"{beside} has {len(names)} words, expected {words}")
    except (OSError, EOFError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{path} is no bag of words: {error}") from error
    counts.sum_duplicates()
    return Corpus(counts, names)


def _docstrings(number: int, rng: np.random.Generator) -> list[str]:
    places = (find_spec(package) for package in PACKAGES)
    roots = [Path(place.origin).parent for place in places if place and place.origin]
    files = [file for root in roots for file in sorted(root.rglob("*.py"))]
    found: dict[str, None] = {}
    for i in rng.permutation(len(files)):
        if "test" not in str(files[i].relative_to(files[i].parents[1])):
            found.update(dict.fromkeys(_docstrings_in(files[i])))
        if len(found) >= number:
            return list(found)[:number]
    raise ConfigurationError(
        f"only {len(found)} docstrings of {MIN_WORDS} words are installed, {number} are needed; "
        "give a file in the bag-of-words format of the UCI repository with --data"
    )


def _docstrings_in(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):  # templates and the like: no text to be had
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node, clean=False) or ""
            if len(WORD.findall(text.lower())) >= MIN_WORDS:
                yield text


def _vocabulary(bags: list[Counter[str]]) -> list[str]:
    """Return the words that distinguish documents: no rare words, frequent words or stop words."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    documents = Counter(word for bag in bags for word in bag)
    most = MAX_OF_ALL * len(bags)
    return sorted(
        word
        for word, count in documents.items()
        if MIN_DOCUMENTS <= count <= most and word not in ENGLISH_STOP_WORDS
    )
