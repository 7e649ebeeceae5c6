"""How a configuration is read: YAML text, with the line of every key, and `--set` overrides.

Nothing here knows which keys there are; `flows.config.experiment` judges what was read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dps.core.credentials import holds_secret
from dps.errors import ConfigurationError
from flows.config.limits import (
    DEEPEST,
    LARGEST_NUMBER,
    LONGEST_KEY,
    LONGEST_NUMBER,
    LONGEST_TEXT,
    MOST_BYTES,
    MOST_VALUES,
)
from flows.files import read_bytes
from flows.quoting import quoted, shown, unseen

EVERY_ENTRY = "*"  # in a key: of a list, whatever number it has
# Sections that one word may stand for, each with the key that the word is the value of.
_OF_ONE_WORD = {
    "recovery": "preset",
    **dict.fromkeys(
        ("cluster", "consistency", "dataset", "durability", "outage", "workload"), "kind"
    ),
}
_TAG = "tag:yaml.org,2002:"
_KINDS = {
    f"{_TAG}int": "whole number",
    f"{_TAG}float": "number",
    f"{_TAG}bool": "true or false",
    f"{_TAG}timestamp": "date",
}
MERGE_TAG = f"{_TAG}merge"
_NUMBERS = {f"{_TAG}int", f"{_TAG}float"}
_PLAIN_TAGS = {
    *(f"{_TAG}{kind}" for kind in ("null", "bool", "str", "seq", "map", "timestamp", "value")),
    *_NUMBERS,
    MERGE_TAG,
}
LONGEST_PLACE = 200
LONGEST_PROBLEM = 200
_MALFORMED = "malformed YAML: "
_TOO_DEEP = f"more than {DEEPEST} levels, one in the other"
_TOO_MANY = f"more than {MOST_VALUES:,} values"
# What PyYAML's constructors raise at values that are not what their tag says.
_OF_CONSTRUCTORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML file says, and for each dotted key the line that says it (from 1).

    Paths in it are relative to its `folder`; `text` is what is written in it.
    """

    name: str
    data: dict[str, Any]
    lines: dict[str, int]
    folder: Path = Path()
    text: str = ""

    def place(self, key: str) -> str:
        """Return where a dotted key stands, or its nearest section if it is not there itself."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return f"{self.name}, line {self.lines[key]}" if key else self.name


@dataclass(frozen=True, slots=True)
class Override:
    """One `--set key=value` of the command line; the value is read as YAML."""

    key: str
    value: Any
    text: str

    def __str__(self) -> str:
        return f"--set {shown(self.text)}"


class FromCommandLine(str):
    """A text that --set has set: if it is a path, it is relative to the working directory."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """Safe loader that reads plain data only, and refuses what is too much while it reads.

    A key that is given twice is refused, and 1e-3 is read as a number. Whatever the constructors of
    PyYAML make of odd values, it ends in an error with its position.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._flat: set[int] = set()
        self._values = 0

    def position(self) -> yaml.Mark:
        """Where it has got to."""
        mark: yaml.Mark = self.get_mark()
        return mark

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._values += 1
        self._refuse(self._values > MOST_VALUES, _TOO_MANY, self.position())
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode):
            self._check_text(node)
        if node.tag not in _PLAIN_TAGS:
            raise _malformed(f"the tag {quoted(node.tag)} is none of plain data", node.start_mark)
        try:
            made = super().construct_object(node, deep=deep)
        except _OF_CONSTRUCTORS as error:
            kind = _KINDS.get(node.tag, node.tag.rpartition(":")[2])
            value = quoted(node.value) if isinstance(node, yaml.ScalarNode) else "it"
            raise _malformed(f"{value} is no {kind}", node.start_mark) from error
        too_large = type(made) is int and abs(made) > LARGEST_NUMBER
        self._refuse(
            too_large,
            f"a number beyond {LARGEST_NUMBER:,}, the largest there may be",
            node.start_mark,
        )
        return made

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Before what is merged is among its own keys: these may replace it.
        if id(node) not in self._flat:
            self._flat.add(id(node))
            self._refuse_repeated(key for key, _ in node.value)
        super().flatten_mapping(node)

    def _check_text(self, node: yaml.ScalarNode) -> None:
        text, mark = node.value, node.start_mark
        most = LONGEST_NUMBER if node.tag in _NUMBERS else LONGEST_TEXT
        self._refuse(
            len(text) > most, f"a value of {len(text):,} characters; {most:,} at most", mark
        )
        self._refuse(
            (char := unseen(text)) is not None,
            f"the character {char}, which nobody would see; leave it out",
            mark,
        )

    def _refuse_repeated(self, key_nodes: Iterable[yaml.Node]) -> None:
        seen: set[Hashable] = set()
        for node in key_nodes:
            if node.tag == MERGE_TAG:
                continue
            key = self.construct_object(node, deep=True)
            length = len(key) if isinstance(key, str) else 0
            self._refuse(
                length > LONGEST_KEY,
                f"a key of {length:,} characters; {LONGEST_KEY:,} at most",
                node.start_mark,
            )
            if isinstance(key, Hashable) and key in seen:
                raise _malformed(
                    f"the key {quoted(key)} is given twice; keep one of them", node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)

    @staticmethod
    def _refuse(wrong: bool, problem: str, mark: yaml.Mark) -> None:
        if wrong:
            raise _TooMuch(problem=problem, problem_mark=mark)


class _TooMuch(yaml.MarkedYAMLError):
    """Something that is YAML, and more of it or something else than a configuration may hold."""


def _malformed(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=mark)


# YAML 1.1, which PyYAML follows, takes 1e-3 for text because it has no dot.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_document(path: Path, name: str | None = None) -> Document:
    """Read a YAML file that holds a mapping.

    Parameters
    ----------
    path
        The file.
    name
        What messages call it; by default its path.

    Raises
    ------
    ConfigurationError
        The file cannot be read, is malformed, holds something else, or a password.
    """
    name = name or shown(str(path), LONGEST_PLACE)
    return replace(parse_document(read_file(path, name), name), folder=path.parent)


def as_written(document: Document, settings: Sequence[str]) -> str:
    """Return the text of a file, after what `--set` on the command line has changed of it."""
    said = "".join(f"changed by {shlex.join(['--set', text])}\n" for text in settings)
    return "".join(f"# {line}\n" for line in said.splitlines()) + document.text


def read_file(path: Path, name: str) -> bytes:
    """Return what is in a file that messages call `name`.

    Raises
    ------
    ConfigurationError
        The file cannot be read, or is larger than any configuration.
    """
    try:
        return read_bytes(path, MOST_BYTES)
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot be read: {error.strerror or error}") from error


def parse_document(written: bytes, name: str) -> Document:
    """Read what a YAML file holds, which has to be a mapping.

    Raises
    ------
    ConfigurationError
        It is malformed, holds something else, or a password.
    """
    try:
        text = written.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{name}: cannot be read: it is no text in UTF-8") from error
    for number, line in enumerate(text.splitlines(), 1):
        _refuse_secrets(line, f"{name}, line {number}")
    data, lines = _parse(text, name)
    if data is None:
        raise ConfigurationError(f"{name}: the file is empty, expected keys such as 'experiment'")
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{name}: expected keys such as 'experiment: demo', got {_kind(data)}"
        )
    return Document(name, data, lines, text=text)


def parse_override(text: str) -> Override:
    """Read one `a.b=c`.

    Raises
    ------
    ConfigurationError
        There is no "=", a part of the key is empty, or the value is malformed YAML, or holds a
        password.
    """
    key, equals, value = text.partition("=")
    place = f"--set {shown(key)}"
    _refuse_secrets(text, place)
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigurationError(
            f"--set {shown(text)}: expected key=value, such as --set training.updates=400"
        )
    if len(parts) > DEEPEST or len(key) > LONGEST_KEY or unseen(key) is not None:
        raise ConfigurationError(
            f"{place}: there is no such key; expected one such as training.updates"
        )
    read = _parse(value, f"--set {shown(text)}")[0]
    return Override(key.strip(), _from_command_line(read), text)


def _from_command_line(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_command_line(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_from_command_line(each) for each in value]
    return FromCommandLine(value) if isinstance(value, str) else value


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Read every `a.b=c`; raises `ConfigurationError`."""
    return [parse_override(text) for text in texts]


def set_key(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of `data` with the value at a dotted key replaced.

    Sections on the way that are not there are made. A number in the key is an index into a list,
    and `*` stands for every entry of one, of which there may be none.
    A strategy's name on the way (`recovery: chain`) becomes the section that it abbreviates.

    Raises
    ------
    ConfigurationError
        Something on the way is neither a section nor a list.
    """
    changed: dict[str, Any] = _put(data, _parts(key), value)
    return changed


def overridden(data: dict[str, Any], override: Override) -> dict[str, Any]:
    """Return a copy of `data` with a value that the command line sets.

    Raises
    ------
    ConfigurationError
        There is no place for it, or no room.
    """
    try:
        changed = set_key(data, override.key, override.value)
        _refuse_large(changed)
    except ConfigurationError as error:
        raise ConfigurationError(f"{override}: {error}") from error
    return changed


def place_of(key: str, document: Document, overrides: Sequence[Override] = (), at: str = "") -> str:
    """Say where the value of a key is from: the command line, a line of the file, or both.

    Both are named for a section of the file in which the command line sets something. `at` is the
    key that the value is written at, where that is not `key` itself.
    """
    if not key:
        return document.name
    at = at or key
    name, place = shown(key, LONGEST_PLACE), document.place(at)
    for override in reversed(overrides):  # the last one counts
        within = override.key.startswith(f"{at}.")
        made_by_it = within and at not in document.lines
        if made_by_it or f"{at}.".startswith(f"{override.key}."):
            return f"{override}: {name}"
        if within:
            return f"{place}, with {override}: {name}"
    return f"{place}: {name}"


# -- parts -------------------------------------------------------------------------------------


def _refuse_secrets(text: str, place: str) -> None:
    """Refuse an address with a password: records, reports and MLflow repeat what is configured."""
    if holds_secret(text):
        raise ConfigurationError(
            f"{place}: an address with a password or another secret, which would be in every "
            "record and report: leave it out, and give it by the environment"
        )


def _parts(key: str) -> Sequence[str]:
    # An axis is itself a dotted key: axes.recovery.outage is the axis "recovery.outage".
    section, _, rest = key.partition(".")
    return [section, rest] if section == "axes" and rest else key.split(".")


def _put(data: Any, parts: Sequence[str], value: Any) -> Any:
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if isinstance(data, dict):
        inner = data.get(part)
        if rest and isinstance(inner, str) and part in _OF_ONE_WORD:
            inner = {_OF_ONE_WORD[part]: inner}
        return {**data, part: _put({} if inner is None else inner, rest, value)}
    if isinstance(data, list | tuple):
        if part == EVERY_ENTRY:
            return [_put(each, rest, value) for each in data]
        # Digits of other scripts are digits too, and some of them are no numbers.
        known = part.isascii() and part.isdigit() and len(part) <= len(str(len(data)))
        if not known or int(part) >= len(data):
            there = f"its entries are 0 to {len(data) - 1}" if data else "it is empty"
            raise ConfigurationError(
                f"this is a list, and {quoted(part)} is none of its entries: {there}; "
                "to set all of it, give a list in [ ]"
            )
        at = int(part)
        return [*data[:at], _put(data[at], rest, value), *data[at + 1 :]]
    raise ConfigurationError(f"{quoted(data)} has no key {quoted(part)}, for it is not a section")


def _refuse_large(data: Any) -> None:
    """Refuse more values or levels than a document may have, with aliases written out."""
    count, rest = 0, [(data, 1)]
    while rest:
        value, depth = rest.pop()
        inner = value.values() if isinstance(value, dict) else value
        count += 1
        if count > MOST_VALUES or depth > DEEPEST:
            raise ConfigurationError(_TOO_MANY if count > MOST_VALUES else _TOO_DEEP)
        if isinstance(value, dict | list | tuple):
            rest += [(each, depth + 1) for each in inner]


def _parse(text: str, name: str) -> tuple[Any, dict[str, int]]:
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        data = loader.construct_document(node)
        _refuse_large(data)
        return data, dict(_lines(node, "", set()))
    except RecursionError as error:
        raise _misread(name, None, _TOO_DEEP) from error
    except ConfigurationError as error:
        raise _misread(name, None, str(error)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = str(error.problem or error.context)
        malformed = "" if isinstance(error, _TooMuch) else _MALFORMED
        raise _misread(name, line, f"{malformed}{problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character {shown(chr(error.character))}, which may not be there"
        raise _misread(name, line, f"{_MALFORMED}{problem}") from error
    except (yaml.YAMLError, ArithmeticError, ValueError) as error:
        # The scanner of PyYAML raises the latter at an escape that stands for no character.
        line = loader.position().line + 1 if loader is not None else None
        raise _misread(name, line, f"{_MALFORMED}{error}") from error


def _misread(name: str, line: int | None, problem: str) -> ConfigurationError:
    place = name if line is None else f"{name}, line {line}"
    return ConfigurationError(f"{place}: {shown(problem, LONGEST_PROBLEM)}")


def _lines(node: yaml.Node, prefix: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if id(node) in seen:  # an alias, possibly to a node that contains it
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        entries = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        entries = [(index, value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, start, value in entries:
        yield f"{prefix}{name}", start.start_mark.line + 1
        yield from _lines(value, f"{prefix}{name}.", seen)


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else quoted(value)
