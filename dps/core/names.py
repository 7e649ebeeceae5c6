"""Names of nodes, such as "replica-0-1", of their roles, and of the sources of restored shards."""

from __future__ import annotations

NODE_ROLES = ("server", "replica", "spare", "store", "worker", "evaluator")
STORE_ROLES = ("store", "mailbox")  # of nodes that keep states and mail, and no replicas
ROLES = (*NODE_ROLES, "scheduler")  # of all processes whose resources are measured
_SUFFIX = "-b"
_SOURCES = {
    "initial": "its initial values",
    "store": "the state store",
    "worker": "a worker's copy",
}


def restored_from(source: str, version: int) -> str:
    """Describe the source of `dps.events.Restored`."""
    name = "its checkpoint" if source == "checkpoint" else source
    return _SOURCES.get(source, f"{name} at version {version}")


def role_of(name: str) -> str:
    """Return the role of a node with this name: "replica" for "replica-0-1"."""
    return name.partition("-")[0]


def replacement(name: str) -> str:
    """Return the name of the node that replaces one."""
    return f"{name}{_SUFFIX}"


def predecessor(name: str) -> str:
    """Return the name of the node that this one replaced; its own if it replaced none."""
    return name.removesuffix(_SUFFIX)


def original(name: str) -> str:
    """Return the name of the first node in this one's place: "server-0" for "server-0-b-b"."""
    while (before := predecessor(name)) != name:
        name = before
    return name
