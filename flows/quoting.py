"""How a text of somebody's is put into a message: in one line, shortened, and with nothing unseen.

A configuration may hold megabytes in a value, and characters that move the cursor, change colours
or turn the direction of writing; a terminal would do what they say.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

LONGEST_QUOTED = 60  # of a value in a sentence
MOST_LINES = 20
LONGEST_LINE = 1_500
LONGEST_MESSAGE = 4_000
MOST_COMPARED = 500
MOST_NEAR = 3

# Control characters, half characters, other ends of lines, and what turns the direction of writing.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_LAYOUT = "\n\t"


def quoted(value: object, most: int = LONGEST_QUOTED) -> str:
    """Return a value as Python writes it, with what cannot be seen escaped, and shortened."""
    try:
        text = repr(value[: most + 1] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # a number of too many digits, or what holds itself
        return f"a value of type {type(value).__name__}"
    if isinstance(value, str) and len(value) > most:
        return f"{text[: most - 3]}...{text[-1]} ({len(value):,} characters)"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def shown(text: str, most: int = LONGEST_QUOTED) -> str:
    """Return a text without quotes, with what cannot be seen escaped, and shortened."""
    short = text if len(text) <= most else f"{text[: most - 3]}... ({len(text):,} characters)"
    return _UNSEEN.sub(_escape, short)


def listed(names: Iterable[str], most: int) -> str:
    """Return names with commas between them: the first ones, and how many more there are."""
    return first_few([shown(name) for name in names], most)


def first_few(texts: Sequence[str], most: int = 8) -> str:
    """Return the first texts as they are, with commas between them, and how many more there are."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def nearest(word: str, known: Sequence[str]) -> list[str]:
    """Return the names that begin with this word, a part of one; else the one most like it."""
    if len(word) >= 100:  # nobody mistypes a word of this length
        return []
    longer = [each for each in known if each.startswith(word)] if len(word) >= 3 else []
    # A comparison takes longer than in proportion to both.
    return longer[:MOST_NEAR] or difflib.get_close_matches(word, known[:MOST_COMPARED], n=1)


def meant(word: str, known: Sequence[str]) -> str:
    """Return a question after a name, whether one of those that are known was meant, or nothing."""
    near = nearest(word, known)
    return f"did you mean {' or '.join(map(quoted, near))}?" if near else ""


def unseen(text: str) -> str | None:
    """Return the first character that nobody would see, escaped; ends of lines and tabs may be."""
    found = (match[0] for match in _UNSEEN.finditer(text) if match[0] not in _LAYOUT)
    return next((_escaped(char) for char in found), None)


def visible(text: str) -> str:
    """Return a text for the terminal: with what cannot be seen escaped, but for ends of lines."""
    return _UNSEEN.sub(lambda found: found[0] if found[0] in _LAYOUT else _escape(found), text)


def screenful(text: str) -> str:
    """Return what of a message is seen at once: neither too many lines nor too long ones."""
    lines = visible(text).splitlines()
    kept: list[str] = []
    left = LONGEST_MESSAGE
    for line in lines[:MOST_LINES]:
        if left <= 0:
            break
        kept.append(_cut(line, min(left, LONGEST_LINE)))
        left -= len(kept[-1])
    return "\n".join([*kept, *_more(lines[len(kept) :])])


def _more(rest: Sequence[str]) -> list[str]:
    return [f"... and {len(rest):,} more lines"] if rest else []


def _cut(line: str, most: int) -> str:
    if len(line) <= most:
        return line
    return f"{line[:most]}... ({len(line) - most:,} more characters)"


def _escape(found: re.Match[str]) -> str:
    return _escaped(found[0])


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
