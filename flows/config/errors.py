"""The wording of what is wrong with a configuration: one readable line for each mistake.

It turns the errors of pydantic into dotted keys and sentences, with the place of each in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from dps.errors import ConfigurationError
from dps.events.reading import in_a_line
from flows.config.limits import MOST_COMPLAINTS, MOST_LISTED
from flows.config.yaml_document import Document, Override, place_of
from flows.quoting import listed, meant, quoted

THOUSANDS = 10_000
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list, such as [1, 2]",
    "dict_type": "keys and values",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "finite_number": "a finite number",
}
# What may stand at a key that is missing, where its name does not say it.
MAY_STAND = {
    "direction": "less, more or equivalent",
    "metric": "a figure, such as rto_seconds; docs/experiments.md lists all",
    "smallest": "the smallest difference of interest, in the unit of the figure, more than 0",
    "strategy": "the label of a strategy",
    "tau": "a whole number, such as 4; docs/experiments.md says of what",
}
BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


class Complaint(NamedTuple):
    """What is wrong: a dotted key, the reason, and the key it is written at, if another one."""

    key: str
    reason: str
    at: str = ""


def refuse(reason: str, key: str = "") -> NoReturn:
    """Refuse a value; `key` names it where the validator sees more than the one value."""
    # The reason goes in as context, for a brace in it is no placeholder.
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
    """Return the nearest known words as a question, then what there is, for after a semicolon.

    Of more than can be listed, the nearest are all that is said.
    """
    known = list(known)
    question = meant(word, known)
    if question and len(known) > MOST_LISTED:
        return f"{question} There are {len(known):,} in all"
    return f"{question + ' There' if question else 'there'} are: {listed(known, MOST_LISTED)}"


def complaints(error: ValidationError, data: Any) -> list[Complaint]:
    """Return all that a model found wrong with `data`."""
    found = error.errors(include_url=False)
    told = [Complaint(key_of(entry, data), sentence(entry)) for entry in found[:MOST_COMPLAINTS]]
    # One who has been told of so many need not know of each of the rest.
    return told + [Complaint("", "")] * (len(found) - len(told))


def placed(
    found: Iterable[Complaint], document: Document, overrides: Sequence[Override] = ()
) -> ConfigurationError:
    """Return an error with a line for each complaint: where the value is from, and the reason."""
    complaints = list(found)
    lines = [
        f"{place_of(key, document, overrides, at)}: {reason}"
        for key, reason, at in complaints[:MOST_COMPLAINTS]
    ]
    more = len(complaints) - len(lines)
    rest = [f"{document.name}: and {more:,} more such mistakes"] if more else []
    return ConfigurationError("\n".join([*lines, *rest]))


@contextmanager
def reading_kept(path: Path) -> Iterator[None]:
    """Tell what is wrong with a file that was kept beside records, and changed by hand since."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        why = in_a_line(f"{key_of(first, {})}: {sentence(first)}")
        raise ConfigurationError(f"{path}: {why}. Remove it, or run again.") from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no JSON: {error}. Remove it, or run again.") from error


def key_of(error: Mapping[str, Any], data: Any) -> str:
    """Return the dotted key that an error is about, as the user would write it.

    A validator that knows the key better than pydantic puts it into the error's context.
    """
    given = "kind" if error["type"] == "union_tag_invalid" else error.get("ctx", {}).get("key")
    return ".".join(_without_tags([*error["loc"], given] if given else error["loc"], data))


def sentence(error: Mapping[str, Any]) -> str:
    """Return what is wrong and what was expected."""
    kind, context, got = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "missing":
        told = MAY_STAND.get(str(error["loc"][-1]))
        return f"is missing; add it: {told}" if told else "is missing; add it"
    if kind == "union_tag_not_found":
        return "needs a 'kind'"
    if kind == "union_tag_invalid":
        return _unknown("kind", context["tag"], context["expected_tags"])
    if kind == "literal_error":
        return _unknown(error["loc"][-1], got, context["expected"])
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        return f"expected {words} {_number(context[name])}, got {quoted(got)}"
    if kind in EXPECTED:
        return f"expected {EXPECTED[kind]}, got {_short(got)}"
    if kind == "too_long":
        return f"expected at most {context['max_length']:,} entries, got {_length(context)}"
    return str(error["msg"])


def _unknown(what: int | str, got: Any, expected: str) -> str:
    known = re.findall(r"'([^']*)'", expected)
    return f"unknown {what} {quoted(got)}; {suggest(_text(got), known)}"


def _text(got: Any) -> str:
    return got if isinstance(got, str) else quoted(got)


def _number(bound: Any) -> str:
    return f"{bound:,}" if type(bound) is int and bound >= THOUSANDS else str(bound)


def _length(context: Mapping[str, Any]) -> str:
    found = context.get("actual_length")
    return "more" if found is None else f"{found:,}"


def _without_tags(loc: Sequence[int | str], data: Any) -> list[str]:
    """Drop the kinds that pydantic puts into a location, which are no keys of the file."""
    parts: list[str] = []
    tagged = False
    for index, part in enumerate(loc):
        # The kind is written in the section, is all of it, or comes from a preset: then the part
        # is no key of it.
        inner = index + 1 < len(loc)
        if not tagged and inner and isinstance(data, dict | str):
            written = {"kind": data} if isinstance(data, str) else data
            tagged = part == written.get("kind", part if part not in written else None)
            if tagged:
                continue
        parts.append(str(part))
        data, tagged = _inside(data, part), False
    return parts


def _inside(data: Any, part: int | str) -> Any:
    if isinstance(data, dict):
        return data.get(part)
    if isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
        return data[part]
    return None


def _short(value: Any) -> str:
    return "nothing" if value is None else quoted(value)
