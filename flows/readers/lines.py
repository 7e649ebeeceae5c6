"""Text files of numbers that are read in pieces: whole lines, and where each piece begins.

Files that end in .gz are unpacked on the way. A file is never in memory as a whole.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError

PIECE_BYTES = 1 << 23
SHOWN = 40  # characters of a bad line that a message shows

BLANK = np.zeros(256, bool)
BLANK[list(b" \t\r\n\v\f")] = True

Numbers = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some whole lines of a file; `first` is the number of the first of them, from 1."""

    path: Path
    first: int
    text: bytes

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line with its number."""
        return enumerate(self.text.split(b"\n"), self.first)

    def wrong(self, line: int, problem: str) -> ConfigurationError:
        """The error for a line of the file."""
        return ConfigurationError(f"{self.path}, line {line}: {problem}")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a plain or packed file.

    Raises
    ------
    ConfigurationError
        It cannot be opened, or reading it fails later on.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def pieces(file: IO[bytes], path: Path, first: int = 1, size: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut the rest of a file into pieces of whole lines, of about `size` bytes each.

    `first` is the number of the line that comes next.
    """
    rest = b""
    while data := file.read(size):
        whole, newline, after = data.rpartition(b"\n")
        if not newline:
            rest += data
            continue
        piece = Piece(path, first, rest + whole + newline)
        first += piece.text.count(b"\n")
        rest = after
        yield piece
    if rest:
        yield Piece(path, first, rest + b"\n")


def parsed(text: bytes) -> Numbers | None:
    """The numbers of a text, parted by blanks and line ends; None if anything else is in it."""
    if not text or text.isspace():
        return np.zeros(0)
    try:
        return np.fromstring(text, np.float64, sep=" ")
    except ValueError:
        return None


def word_starts(text: bytes) -> Mask:
    """For each character, whether a word begins with it."""
    blank = BLANK[np.frombuffer(text, np.uint8)]
    blank_before = np.concatenate([[True], blank[:-1]])
    return np.asarray(~blank & blank_before[: len(blank)])


def words_per_line(text: bytes, starts: Mask) -> Integers:
    """How many words each line has; lines without any are left out."""
    ends = np.frombuffer(text, np.uint8) == ord("\n")
    line = np.cumsum(ends) - ends
    words = np.bincount(line[starts])
    return np.asarray(words[words > 0], np.int64)


def shown(line: bytes) -> str:
    """A line as a message shows it: readable, and not too long."""
    text = line.decode("utf-8", "backslashreplace").strip()
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
