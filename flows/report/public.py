"""What a report for the public leaves out: whatever names a machine or its user.

What dps did not word itself, as reasons of failures, is left out whole: no pattern finds every
name of a host or a folder in it. In all else, paths, addresses, process numbers, qualified names,
and the names of the hosts and users that are known.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dps.events import NodeJoined
from flows.records.record import Record

LEFT_OUT = "(left out)"
FREE_TEXT = "left out of a public report"  # in the place of a text that dps did not word
# What a configuration says of its cluster that is the same wherever it is.
CLUSTER_KEYS = ("kind", "profile", "patience")
# Names that tell nothing of a machine.
NO_NAMES = ("", "localhost", "root", "user")

# From where a path begins, all that follows may belong to it: folders have spaces and commas.
_PATH = re.compile(
    r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>)\]]+"  # an address, which has neither
    r"|(?<![\w'])(?P<quote>['\"])[^'\"\n]*[/\\][^'\"\n]*(?P=quote)(?!\w)"
    r"|(?:\b[\w.-]+:|[$~][\w.{}-]*|(?<![\w/.)])\.{1,2}|(?<![\w/.)]))/{1,2}[^\s/][^;\n]*"
    r"|(?:\b[a-z]:\\|\\\\)[^;\n]*",
    re.IGNORECASE,
)
_SLASHED = re.compile(r"[^\s,;()]*[^\s,;()]/[^\s,;()]+")
# What has a slash and is no path: rates, fractions, and what columns of tables say.
_NO_PATH = re.compile(r"[\w.–]*/s\.?|\d+/\d+\.?|and/or|time/grads/money")
_HOST = re.compile(
    r"[^\s\"'<>(),;]+@[^\s\"'<>(),;]+"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|\b[a-z][\w-]*(?:\.[\w-]+)*:\d{2,5}\b"
    r"|(?<![\w.-])(?:[a-z0-9_-]+\.){2,}[a-z]\w*(?![\w-])",
    re.IGNORECASE,
)
_COLONS = re.compile(r"(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])", re.I)
_PROCESS = re.compile(r"\b(pid|process|job)([ =:]+)\d+\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Redaction:
    """Leaves out of texts what names a machine or its user.

    `names` are those of both, in any case of their letters; `axes` are keys of a configuration,
    which look like qualified names of hosts.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, records: Sequence[Record]) -> Redaction:
        """Return one that knows the hosts of all nodes in records, and this machine and user."""
        hosts = {event.host for record in records for event in record.of(NodeJoined)}
        here = (socket.gethostname(), _user(), Path.home().name)
        short = {name.partition(".")[0] for name in (*hosts, here[0]) if not _is_address(name)}
        found = {*hosts, *here, *short} - {*NO_NAMES}
        axes = {axis for record in records for axis in _axes(record)}
        return cls(tuple(sorted(found, key=lambda name: (-len(name), name))), tuple(sorted(axes)))

    def text(self, text: str) -> str:
        """Return a text of dps's own in which nothing names a machine or its user."""
        text = _PROCESS.sub(rf"\1\2{LEFT_OUT}", text)
        for pattern in (_PATH, _SLASHED, _COLONS, _HOST):
            text = pattern.sub(self._left, text)
        for name in self.names:
            text = _as_word(name).sub(LEFT_OUT, text)
        return text

    def found_in(self, text: str) -> list[str]:
        """Return which of the names a text has, as words of it."""
        return [name for name in self.names if _as_word(name).search(text)]

    def configuration(self, document: str) -> str:
        """Return a configuration as YAML without what belongs to one place."""
        import yaml

        loaded = yaml.safe_load(document)
        if not isinstance(loaded, dict):
            return f"# {FREE_TEXT.capitalize()}.\n"
        if isinstance(loaded.get("cluster"), dict):
            cluster = loaded["cluster"]
            loaded["cluster"] = {key: cluster[key] for key in CLUSTER_KEYS if key in cluster}
        text = yaml.safe_dump(self._value(loaded), sort_keys=False, allow_unicode=True, width=88)
        return f"# Without paths, addresses, hosts, users and settings of a cluster.\n{text}"

    def _left(self, found: re.Match[str]) -> str:
        """What is left of what a pattern has found."""
        text = found[0]
        if found.re is _SLASHED and (_NO_PATH.fullmatch(text) or LEFT_OUT in text):
            return text
        if found.re is _COLONS and "::" not in text and text.count(":") < 3:
            return text  # a time of day
        return text if text in self.axes else LEFT_OUT

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            if ("/" in value or "\\" in value) and not _NO_PATH.fullmatch(value):
                return LEFT_OUT
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self._value(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self._value(each) for each in value]
        return value


def _as_word(name: str) -> re.Pattern[str]:
    """A name as a word, or before a "_"; of one with a number, also with an ending ("gpu1-ib")."""
    ending = r"(?:-[a-z]\w*)?" if re.search(r"\d", name) else ""
    return re.compile(rf"(?<![a-z0-9-]){re.escape(name)}{ending}(?![a-z0-9-])", re.IGNORECASE)


def _axes(record: Record) -> Iterable[str]:
    return record.started.settings.get("labels", {}) if record.started else ()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # of a number without a name
        return ""


def _is_address(host: str) -> bool:
    return not re.search("[g-z]", host, re.IGNORECASE)
