"""The error messages for a configuration: one readable line for each mistake.

It turns the errors of pydantic into dotted keys and sentences, with the place of each in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from dps.errors import ConfigurationError
from flows.config.document import Document, Override, place_of
from flows.quoting import listed, meant, quoted, shown

MAX_LISTED = 24

Complaint = tuple[str, str]  # a dotted key, and the problem with its value


def refuse(reason: str, key: str = "") -> NoReturn:
    """Refuse a value; `key` names it where the validator sees more than the one value."""
    # The reason goes in as context, because a brace in it is no placeholder.
    context = {"reason": reason, **({"key": key} if key else {})}
    raise PydanticCustomError("refused", "{reason}", context)


@contextmanager
def refusing(key: str = "") -> Iterator[None]:
    """Refuse a value, or what `key` names of it, that dps itself refuses."""
    try:
        yield
    except ConfigurationError as error:
        refuse(str(error), key)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the nearest known words as a question, then all, for after a semicolon."""
    question = meant(word, known := list(known))
    return f"{question + ' There' if question else 'there'} are: {listed(known, MAX_LISTED)}"


def check_known(word: str, known: Iterable[str], what: str, key: str = "") -> None:
    """Refuse a word that is not among the known ones, each of which is a `what`."""
    if word not in (known := list(known)):
        refuse(f"no {what} {quoted(word)}; {suggest(word, known)}", key=key)


def complaints(error: ValidationError) -> list[Complaint]:
    """Return all complaints in a validation error."""
    errors = error.errors(include_url=False)
    return [(_key_of(entry), _sentence(entry)) for entry in errors]


def placed(
    found: Iterable[Complaint], document: Document, overrides: Sequence[Override] = ()
) -> ConfigurationError:
    """Return an error with a line for each complaint: where the value is from, and the reason."""
    lines = [f"{place_of(key, document, overrides)}: {reason}" for key, reason in found]
    return ConfigurationError("\n".join(lines))


@contextmanager
def reading_kept(path: Path) -> Iterator[None]:
    """Report a file beside records that cannot be read, or that dps did not write."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        why = str(error)
        if isinstance(error, ValidationError):
            why = "; ".join(map(": ".join, complaints(error)))
        raise ConfigurationError(f"{path}: {shown(why, 300)}. Remove it, or run again.") from error


def _sentence(error: Mapping[str, Any]) -> str:
    kind, context, got = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "missing":
        return "is missing; add it"
    if kind == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"])
        return f"unknown {error['loc'][-1]} {quoted(got)}; {suggest(str(got), known)}"
    if kind.startswith("model_"):
        return f"expected a section with keys, got {quoted(got)}"
    # Rewrites pydantic's wording, such as "Input should be greater than 0".
    expected, count = re.subn(r"^\w+ should (be |have |match )?", "expected ", str(error["msg"]))
    return f"{expected}, got {quoted(got)}" if count else expected


def _key_of(error: Mapping[str, Any]) -> str:
    """Return the dotted key of an error, as the user would write it.

    A validator that knows the key more precisely than pydantic puts it into the error's context.
    """
    given = error.get("ctx", {}).get("key")
    return ".".join(map(str, [*error["loc"], given] if given else error["loc"]))
