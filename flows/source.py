"""Owns how a configuration is read: YAML text, with the line of every key, and `--set` overrides.

Nothing here knows which keys there are; `flows.config` judges what was read.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dps.core.credentials import holds_secret
from dps.errors import ConfigurationError

MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML file says, and for each dotted key the line that says it (from 1)."""

    name: str
    data: dict[str, Any]
    lines: dict[str, int]

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


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses a key that is given twice and reads 1e-3 as a number."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        self._refuse_repeated(key for key, _ in node.value)
        return super().construct_mapping(node, deep=deep)

    def _refuse_repeated(self, key_nodes: Iterable[yaml.Node]) -> None:
        seen: set[Hashable] = set()
        for node in key_nodes:
            if node.tag == MERGE_TAG:
                continue
            key = self.construct_object(node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} is given twice; keep one of them",
                    problem_mark=node.start_mark,
                )
            if isinstance(key, Hashable):
                seen.add(key)


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
    name = name or str(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        _refuse_secrets(line, f"{name}, line {number}")
    data, lines = _parse(text, name)
    if data is None:
        raise ConfigurationError(f"{name}: the file is empty, expected keys such as 'experiment'")
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{name}: expected keys such as 'experiment: demo', got {_kind(data)}"
        )
    return Document(name, data, lines)


def parse_override(text: str) -> Override:
    """Read one `a.b=c`.

    Raises
    ------
    ConfigurationError
        There is no "=", a part of the key is empty, or the value is malformed YAML, or holds a
        password.
    """
    key, equals, value = text.partition("=")
    _refuse_secrets(text, f"--set {key}")
    if not equals or not all(key.strip().split(".")):
        raise ConfigurationError(
            f"--set {text}: expected key=value, such as --set training.updates=400"
        )
    return Override(key.strip(), _parse(value, f"--set {text}")[0], text)


def set_key(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of `data` with the value at a dotted key replaced.

    Sections on the way that are not there are made. A number in the key is an index into a list.
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
        There is no place for it.
    """
    try:
        return set_key(data, override.key, override.value)
    except ConfigurationError as error:
        raise ConfigurationError(f"--set {override.text}: {error}") from error


def place_of(key: str, document: Document, overrides: Sequence[Override] = ()) -> str:
    """Say where the value of a key is from: the command line, or a line of the file."""
    for override in overrides:
        made_by_it = key not in document.lines and override.key.startswith(f"{key}.")
        if made_by_it or f"{key}.".startswith(f"{override.key}."):
            return f"--set {override.text}: {key}"
    return f"{document.place(key)}: {key}" if key else document.name


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
        if rest and part == "recovery" and isinstance(inner, str):
            inner = {"preset": inner}
        return {**data, part: _put({} if inner is None else inner, rest, value)}
    if isinstance(data, list | tuple):
        if not part.isdigit() or int(part) >= len(data):
            raise ConfigurationError(
                f"there is no entry {part!r} in a list of {len(data)}; entries count from 0"
            )
        at = int(part)
        return [*data[:at], _put(data[at], rest, value), *data[at + 1 :]]
    raise ConfigurationError(f"{data!r} has no key {part!r}, for it is not a section")


def _parse(text: str, name: str) -> tuple[Any, dict[str, int]]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_document(node), dict(_lines(node, "", set()))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        problem = error.problem or error.context
        raise ConfigurationError(f"{name}{line}: malformed YAML: {problem}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigurationError(f"{name}: malformed YAML: {error}") from error


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
    return "a list" if isinstance(value, list) else f"{value!r}"
