"""What a report for the public leaves out: whatever names the machine or its user.

Paths, addresses, process numbers, and the names of hosts and users, in all that is not dps's own
words: reasons of failures, warnings and the configuration.
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
# What a configuration says of its cluster that is the same wherever it is.
CLUSTER_KEYS = ("kind", "profile", "patience")
# Names that tell nothing of a machine.
NO_NAMES = ("", "localhost", "root", "user")

_PLACES = re.compile(
    r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>)\]]+"  # addresses
    r"|(?<![\w/.)])(?:~[\w.-]*|\.{1,2})?(?:/[\w.+@%~=:-]+)+/?"  # paths
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"
    r"|(?<![\w:])(?:[0-9a-f]{0,4}:){3,7}[0-9a-f]{1,4}(?![\w:])",
    re.IGNORECASE,
)
_PROCESS = re.compile(r"\b(pid|process)([ =:]+)\d+\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Redaction:
    """Leaves out of texts what names a machine or its user; `names` are those of both."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, records: Iterable[Record]) -> Redaction:
        """Return one that knows the hosts of all nodes in records, and this machine and user."""
        hosts = {event.host for record in records for event in record.of(NodeJoined)}
        here = (socket.gethostname(), _user(), Path.home().name)
        short = {name.partition(".")[0] for name in (*hosts, here[0]) if not _is_address(name)}
        found = {*hosts, *here, *short} - {*NO_NAMES}
        return cls(tuple(sorted(found, key=lambda name: (-len(name), name))))

    def text(self, text: str) -> str:
        """Return a text in which nothing names a machine or its user."""
        text = _PROCESS.sub(rf"\1\2{LEFT_OUT}", _PLACES.sub(LEFT_OUT, text))
        for name in self.names:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", LEFT_OUT, text)
        return text

    def found_in(self, text: str) -> list[str]:
        """Return which of the names a text has, as words of it."""
        return [n for n in self.names if re.search(rf"(?<![\w-]){re.escape(n)}(?![\w-])", text)]

    def configuration(self, document: str) -> str:
        """Return a configuration as YAML without what belongs to one place."""
        import yaml

        loaded = yaml.safe_load(document)
        if not isinstance(loaded, dict):
            return self.text(document)
        if isinstance(loaded.get("cluster"), dict):
            cluster = loaded["cluster"]
            loaded["cluster"] = {key: cluster[key] for key in CLUSTER_KEYS if key in cluster}
        text = yaml.safe_dump(self._value(loaded), sort_keys=False, allow_unicode=True, width=88)
        return f"# Without paths, addresses, hosts, users and settings of a cluster.\n{text}"

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self._value(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self._value(each) for each in value]
        return value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # of a number without a name
        return ""


def _is_address(host: str) -> bool:
    return not re.search("[g-z]", host, re.IGNORECASE)
