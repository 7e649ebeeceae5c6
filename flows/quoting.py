"""Values and names in messages: quoted, shortened, listed, and the nearest of those that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

LONGEST_QUOTED = 60
MAX_NEAR = 3


def quoted(value: object, most: int = LONGEST_QUOTED) -> str:
    """Return a value as Python writes it, shortened.

    >>> quoted("chian")
    "'chian'"
    """
    text = repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(text: str, most: int = LONGEST_QUOTED) -> str:
    """Return a text without quotes, in one line and shortened."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def listed(names: Iterable[str], most: int) -> str:
    """Return names with commas between them: the first ones, and how many more there are."""
    return first_few([shown(name) for name in names], most)


def first_few(texts: Sequence[str], most: int = 8) -> str:
    """Return the first texts as they are, with commas between them, and how many more there are."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def nearest(word: str, known: Sequence[str]) -> list[str]:
    """Return names that begin with a word of 3 letters or more, or the name most like it."""
    longer = [each for each in known if each.startswith(word)] if len(word) >= 3 else []
    return longer[:MAX_NEAR] or difflib.get_close_matches(word, known, n=1)


def meant(word: str, known: Sequence[str]) -> str:
    """Return the question whether a known name was meant, or nothing if none is near."""
    near = nearest(word, known)
    return f"did you mean {' or '.join(map(quoted, near))}?" if near else ""
