"""WordNet's glosses as a sparse data set: those of nouns against those of other words.

`python -m examples.wordnet FOLDER FILE` writes them in svmlight's format, for `python -m examples
l1_logistic --data FILE`. FOLDER has WordNet's `data.noun`, `data.verb`, `data.adj` and `data.adv`,
as Debian's package `wordnet-base` puts them into /usr/share/wordnet. An example is a gloss, a
feature a word that at least two glosses have; the values of an example are equal, and its length 1.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dps import ConfigurationError

PARTS = {"noun": "+1", "verb": "-1", "adj": "-1", "adv": "-1"}
LEAST = 2  # glosses that have a word, for it to be a feature
WORD = re.compile(r"[a-z]+")


def glosses(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield label and words, sorted and once each, of every gloss.

    Raises `ConfigurationError` if a file is missing, or is not a file of WordNet.
    """
    for part, label in PARTS.items():
        path = folder / f"data.{part}"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{path}: {error}; expected WordNet's files, as of Debian's package wordnet-base"
            ) from None
        for number, line in enumerate(lines, 1):
            if line.startswith("  "):
                continue  # the licence
            _, bar, gloss = line.partition("|")
            if not bar:
                raise ConfigurationError(f"{path}, line {number}: expected a gloss after a '|'")
            yield label, sorted(set(WORD.findall(gloss.lower())))


def write_svmlight(folder: Path, target: Path) -> tuple[int, int, int]:
    """Write the examples; return the numbers of examples, features and entries.

    They are mixed, so that every part of the file has examples of both classes.
    """
    found = list(glosses(folder))
    counts = Counter(word for _, words in found for word in words)
    index = {word: i for i, word in enumerate(sorted(w for w in counts if counts[w] >= LEAST), 1)}
    entries = 0
    with target.open("w", encoding="ascii") as file:
        for label, words in _mixed(found):
            chosen = [index[word] for word in words if word in index]
            value = f"{len(chosen) ** -0.5:.6g}" if chosen else ""
            file.write(" ".join([label, *(f"{i}:{value}" for i in chosen)]) + "\n")
            entries += len(chosen)
    return len(found), len(index), entries


def _mixed(found: Sequence[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Yield all of them in strides."""
    stride = max(1, int(len(found) ** 0.5))
    for first in range(stride):
        yield from found[first::stride]


def main(arguments: Sequence[str]) -> int:
    """Write the file that the command line names, and print its size."""
    if len(arguments) != 2:
        print("usage: python -m examples.wordnet FOLDER FILE.svm", file=sys.stderr)
        return 2
    folder, target = map(Path, arguments)
    try:
        examples, features, entries = write_svmlight(folder, target)
    except (ConfigurationError, OSError) as error:
        print(f"dps: {error}", file=sys.stderr)
        return 2
    print(f"{target}: {examples:,} examples × {features:,} features, {entries:,} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
