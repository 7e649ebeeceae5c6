"""Names of nodes and roles, and what a backend offers: the words that all of the package shares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dps.core.names import role_of

KEY_PREFIX = "dps-"  # of the key of every Dask task and actor that may run for long
SERVING = ("server", "replica", "spare")
HOSTING = (*SERVING, "store", "mailbox")
ANY_SHARD = "any-shard"  # a node for servers that offers it is meant for no shard of its own
RESOURCES = ("server", "store", "mailbox", "worker", "evaluator")
_SHARD_OF_NAME = re.compile(r"(server|replica)-(\d+)(-.*)?$")


# Recorded events, in batches; nodes that join; nodes that leave; dropped updates.
Topic = Literal["events", "nodes", "leaving", "dropped"]


def topic(kind: Topic, group: str) -> str:
    """Return the Dask topic on which a group's driver receives messages of a kind."""
    return f"dps-{kind}-{group}"


@dataclass(frozen=True, slots=True)
class Node:
    """A Dask node and its role: one of `HOSTING`, "worker" or "evaluator".

    A "store" keeps states, and mail too unless there is a "mailbox". `home` is the shard that a
    server or replica is meant for, or -1. `resource` is what tasks have to ask for on it, if any;
    `machine` is what it fails with, as others there do.
    """

    address: str
    name: str
    role: str
    home: int
    resource: str | None
    threads: int
    machine: str


def resource_of(name: str) -> str:
    """The Dask resource of a node with this name, on a cluster made for dps."""
    role = role_of(name)
    return "server" if role in SERVING else role


def shard_of(name: str) -> int:
    """The shard that a node with this name is meant for; -1: none."""
    named = _SHARD_OF_NAME.match(name)
    return int(named[2]) if named else -1


def resource_in(info: Mapping[str, Any]) -> str | None:
    """The role that a Dask worker was started for, as its scheduler describes it; None: none."""
    return next((name for name in RESOURCES if name in info["resources"]), None)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node to be started: its name, and the Dask resource that its role is known by.

    It has `threads` threads and as many of the resource: so many workers can run on it at once.
    `lifetime` is for how many seconds its process may run, if that is limited.
    """

    name: str
    resource: str
    threads: int = 1
    lifetime: float | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """A Dask worker that may become a node.

    `host` is what fails as a whole; `resource` is the role that it was started for, if any.
    """

    address: str
    name: str
    host: str
    threads: int
    resource: str | None
