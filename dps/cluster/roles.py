"""Owns which Dask node does what: by its Dask resources where there are any, else by assignment.

On a cluster made for dps, nodes carry a resource named after their role, and their names tell which
shard they are meant for ("server-0", "replica-0-1"). On any other cluster about half the nodes are
taken as servers and the rest are left to the workers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dps.core.names import role_of
from dps.errors import CapacityError
from dps.protocol.group import Group

SERVING = ("server", "replica", "spare")
HOSTING = (*SERVING, "store", "mailbox")
RESOURCES = ("server", "store", "mailbox", "worker", "evaluator")
_SHARD_OF_NAME = re.compile(r"(server|replica)-(\d+)(-.*)?$")


@dataclass(frozen=True, slots=True)
class Node:
    """A Dask node and its role: one of `HOSTING`, "worker" or "evaluator".

    A "store" keeps states, and mail too unless there is a "mailbox". `home` is the shard that a
    server or replica is meant for, or -1.
    """

    address: str
    name: str
    role: str
    home: int
    resource: str | None
    threads: int


def resource_of(name: str) -> str:
    """The Dask resource of a node with this name, on a cluster made for dps."""
    role = role_of(name)
    return "server" if role in SERVING else role


def is_assigned(workers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether any of these nodes (as Dask's scheduler describes them) carries a role."""
    return any(_resource(info) for info in workers.values())


def by_resources(workers: Mapping[str, Mapping[str, Any]]) -> list[Node]:
    """The nodes that carry a role as a Dask resource."""
    return [_by_resource(a, info) for a, info in sorted(workers.items()) if _resource(info)]


def by_assignment(workers: Mapping[str, Mapping[str, Any]], group: Group) -> list[Node]:
    """Give every node of a cluster without roles one: store, servers, and the rest workers."""
    stores = int(group.recovery.needs_store)
    wanted = len(group.layout.shards) * group.replicas
    servers = max(group.replicas, group.servers or 0, min(wanted, (len(workers) - stores) // 2))
    roles = ["server"] * servers + ["store"] * stores
    nodes = []
    for i, (address, info) in enumerate(sorted(workers.items())):
        role = roles[i] if i < len(roles) else "worker"
        nodes.append(Node(address, str(info["name"]), role, -1, None, info["nthreads"]))
    return nodes


def newcomer(
    address: str, workers: Mapping[str, Mapping[str, Any]], nodes: Sequence[Node], group: Group
) -> Node:
    """Give a node that joins a cluster without roles later one: a server if there are too few."""
    wanted = by_assignment(workers, group)
    servers, enough = (sum(n.role == "server" for n in some) for some in (nodes, wanted))
    role = "server" if servers < enough else "worker"
    described = workers[address]
    return Node(address, str(described["name"]), role, -1, None, described["nthreads"])


def check(nodes: Sequence[Node], group: Group) -> None:
    """Refuse a cluster that is too small for the group.

    Raises
    ------
    CapacityError
        Says what is needed and what there is.
    """
    have = {role: sum(n.role == role for n in nodes) for role in ("store", "worker")}
    serving = [n for n in nodes if n.role in SERVING]
    have["server"] = len(serving)
    servers = group.servers or group.replicas
    need = {"server": servers, "store": int(group.recovery.needs_store), "worker": 1}
    short = [role for role in need if have[role] < need[role]]
    if short:
        wanted = ", ".join(f"{need[r]} for {r}s" for r in need if need[r])
        found = ", ".join(f"{have[r]} for {r}s" for r in need)
        raise CapacityError(
            f"the cluster has too few nodes: needed are at least {wanted}; there are {len(nodes)} "
            f"nodes ({found}). Start more Dask workers, or ask for fewer replicas."
        )
    for shard in range(len(group.layout.shards) if group.servers is None else 0):
        able = sum(n.home in (-1, shard) for n in serving)
        if able < group.replicas:
            raise CapacityError(
                f"the cluster has too few nodes for shard {shard}: needed are {group.replicas}; of "
                f"the {len(serving)} for servers, {able} are meant for it, by their names. Start a "
                f"Dask worker named 'server-{shard}', or ask for fewer shards or replicas."
            )


def _resource(info: Mapping[str, Any]) -> str | None:
    return next((name for name in RESOURCES if name in info["resources"]), None)


def _by_resource(address: str, info: Mapping[str, Any]) -> Node:
    name, resource = str(info["name"]), _resource(info)
    role, home = resource or "worker", -1
    if resource == "server":
        named = _SHARD_OF_NAME.match(name)
        role = named[1] if named else "spare"
        home = int(named[2]) if named else -1
    return Node(address, name, role, home, resource, info["nthreads"])
