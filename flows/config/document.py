"""Reader of configurations: YAML with the line of every key, and `--set` overrides.

This module does not know the valid keys; `flows.config.experiment` validates the document.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dps.core.credentials import holds_secret
from dps.errors import ConfigurationError
from flows.quoting import quoted

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file: its data, and for each dotted key the line that it is on (from 1).

    Paths in it are relative to its `folder`; `text` is what is written in it.
    """

    name: str
    data: dict[str, Any]
    lines: dict[str, int]
    folder: Path = Path()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Override:
    """One `--set key=value` of the command line; the value is read as YAML."""

    key: str
    value: Any
    text: str

    def __str__(self) -> str:
        return f"--set {self.text}"


class FromCommandLine(str):
    """A text that --set has set: if it is a path, it is relative to the working directory."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses a key that is given twice, and reads 1e-3 as a number."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Before what is merged is among its own keys: these may replace it.
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {quoted(key.value)} is given twice; keep one of them",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value)
        super().flatten_mapping(node)


# YAML 1.1, which PyYAML follows, takes 1e-3 for text because it has no dot.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_document(path: Path, name: str | None = None) -> Document:
    """Read a YAML file that holds a mapping; messages call it `name`, by default its path.

    Raises `ConfigurationError` if the file cannot be read, is malformed, is not a mapping, or holds
    a password.
    """
    name = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name} cannot be read: {error}") from error
    return parse_document(text, name, path.parent)


def parse_document(text: str, name: str, folder: Path = Path()) -> Document:
    """Read a YAML mapping; paths in it are relative to `folder`.

    Raises `ConfigurationError` if the text is malformed, is not a mapping, or holds a password.
    """
    for number, line in enumerate(text.splitlines(), 1):
        _refuse_secrets(line, f"{name}, line {number}")
    data, lines = _parse(text, name)
    if not isinstance(data, dict):
        given = "nothing" if data is None else quoted(data)
        raise ConfigurationError(f"{name}: expected keys such as 'experiment: demo', got {given}")
    return Document(name, data, lines, folder, text)


def as_written(document: Document, settings: Sequence[str]) -> str:
    """Return the text of a file, with the changes by `--set` as comments before it."""
    changes = "".join(f"changed by {shlex.join(['--set', text])}\n" for text in settings)
    return "".join(f"# {line}\n" for line in changes.splitlines()) + document.text


def parse_override(text: str) -> Override:
    """Read one `a.b=c`.

    Raises `ConfigurationError` if there is no "=", a part of the key is empty, or the value is
    malformed YAML, or holds a password.
    """
    key, equals, value = text.partition("=")
    _refuse_secrets(text, f"--set {key}")
    if not equals or not all(key.strip().split(".")):
        raise ConfigurationError(
            f"--set {text}: expected key=value, such as --set training.updates=400"
        )
    read = _parse(value, f"--set {text}")[0]
    return Override(key.strip(), _from_command_line(read), text)


def set_key(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of `data` with the value at a dotted key replaced.

    Missing sections are created. A number in the key is an index into a list, and `*` stands for
    every entry of a list. A name in the place of a section (`recovery: chain`) becomes the section
    that it abbreviates.

    Raises `ConfigurationError` if the key leads through a value that is not a section or a list.

    Examples
    --------
    >>> set_key({"recovery": "chain"}, "recovery.spares", 1)
    {'recovery': {'preset': 'chain', 'spares': 1}}
    """
    # An axis is itself a dotted key: axes.recovery.outage is the axis "recovery.outage".
    section, _, rest = key.partition(".")
    parts = [section, rest] if section == "axes" and rest else key.split(".")
    changed: dict[str, Any] = _put(data, parts, value)
    return changed


def place_of(key: str, document: Document, overrides: Sequence[Override] = ()) -> str:
    """Return a key with the origin of its value: the command line, or a line of the file.

    For a key that is not in the file, the line is that of the nearest section.
    """
    for override in reversed(overrides):  # the last one counts
        if f"{key}.".startswith(f"{override.key}.") or override.key.startswith(f"{key}."):
            return f"{override}: {key}"
    section = key
    while section and section not in document.lines:
        section = section.rpartition(".")[0]
    line = f", line {document.lines[section]}" if section else ""
    return f"{document.name}{line}{': ' * bool(key)}{key}"


def _refuse_secrets(text: str, place: str) -> None:
    """Refuse an address with a password: records, reports and MLflow repeat what is configured."""
    if holds_secret(text):
        raise ConfigurationError(
            f"{place}: the address contains a password or another secret, which every record and "
            "report would show: set it in the environment instead"
        )


def _from_command_line(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_command_line(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_from_command_line(each) for each in value]
    return FromCommandLine(value) if isinstance(value, str) else value


def _put(data: Any, parts: Sequence[str], value: Any) -> Any:
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if isinstance(data, dict):
        inner = data.get(part)
        if rest and isinstance(inner, str):  # a section given by its kind only
            inner = {"preset" if part == "recovery" else "kind": inner}
        return {**data, part: _put({} if inner is None else inner, rest, value)}
    if isinstance(data, list | tuple):
        if part == "*":
            return [_put(each, rest, value) for each in data]
        if part not in map(str, range(len(data))):
            raise ConfigurationError(
                f"{quoted(part)} is not an index into this list of length {len(data)} (indices "
                "start at 0); to set the whole list, give a list in [ ]"
            )
        at = int(part)
        return [*data[:at], _put(data[at], rest, value), *data[at + 1 :]]
    raise ConfigurationError(f"{quoted(data)} is not a section, so it has no key {quoted(part)}")


def _parse(text: str, name: str) -> tuple[Any, dict[str, int]]:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_document(node), dict(_lines(node, ""))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}, line {mark.line + 1}" if mark else name
        problem = error.problem or error.context
        raise ConfigurationError(f"{place}: malformed YAML: {problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{name}: malformed YAML: {error}") from error


def _lines(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        entries = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        entries = [(index, value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, start, value in entries:
        yield f"{prefix}{name}", start.start_mark.line + 1
        yield from _lines(value, f"{prefix}{name}.")
