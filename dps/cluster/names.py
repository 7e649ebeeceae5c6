"""Names and roles of nodes, and the Dask workers that can become nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dps.core.arguments import explained
from dps.core.names import role_of

KEY_PREFIX = "dps-"  # of the key of every Dask task and actor that may run for long
SERVING = ("server", "replica", "spare")
HOSTING = (*SERVING, "store", "mailbox")
ANY_SHARD = "any-shard"  # a resource of server nodes that are not meant for a particular shard
RESOURCES = ("server", "store", "mailbox", "worker", "evaluator")
_SHARD_OF_NAME = re.compile(r"(server|replica)-(\d+)(-.*)?$")
# Recorded events, in batches; nodes that join; nodes that leave; dropped updates.
Topic = Literal["events", "nodes", "leaving", "dropped"]


def topic(kind: Topic, group: str) -> str:
    """Return the Dask topic on which a group's driver receives messages of a kind."""
    return f"dps-{kind}-{group}"


@dataclass(frozen=True, slots=True)
class Node:
    """A Dask node and its role: one of `HOSTING`, "worker" or "evaluator"."""

    address: str
    name: str
    role: str
    home: int  # the shard that a server or replica is meant for, or -1
    resource: str | None  # the Dask resource that tasks on it must ask for
    threads: int
    machine: str  # nodes of one machine fail together


@explained
@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node to be started.

    Parameters
    ----------
    name
        Its name, which begins with its role, such as "server-0" or "replica-0-1".
    resource
        The Dask resource of its role: "server" for servers and replicas, "store", "mailbox",
        "worker" or "evaluator".
    threads
        The number of its threads, and of units of its resource. Each worker takes one of each.

    Examples
    --------
    >>> NodeSpec("worker-0", "worker", threads=2)
    NodeSpec(name='worker-0', resource='worker', threads=2)
    """

    name: str
    resource: str
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Offer:
    """A Dask worker that may become a node."""

    address: str
    name: str
    host: str  # nodes of one host fail together
    threads: int
    resource: str | None  # the role that it was started for


def resource_of(name: str) -> str:
    """Return the Dask resource of a node with this name, on a cluster of dps."""
    role = role_of(name)
    return "server" if role in SERVING else role


def shard_of(name: str) -> int:
    """Return the shard that a node with this name is meant for; -1 for none."""
    match = _SHARD_OF_NAME.match(name)
    return int(match[2]) if match else -1


def resource_in(info: Mapping[str, Any]) -> str | None:
    """Return the role that a Dask worker was started for, from its scheduler's description."""
    return next((name for name in RESOURCES if name in info["resources"]), None)
