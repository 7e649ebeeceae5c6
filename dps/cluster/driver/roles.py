"""The roles of Dask nodes: by their Dask resources where there are any, otherwise assigned here.

On a cluster made for dps, nodes carry a resource named after their role, and their names state the
shard that they are meant for ("server-0", "replica-0-1"), unless they offer `ANY_SHARD` too. On any
other cluster, the seats of an `ExistingCluster` define the nodes; without seats, about half the
nodes become servers, taken from each host in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dps.cluster.names import ANY_SHARD, SERVING, Node, NodeSpec, resource_in, shard_of
from dps.core.names import role_of
from dps.errors import CapacityError
from dps.protocol.group import Group

if TYPE_CHECKING:
    from dps.cluster.backends.assignment import NodeAssignment

# Dask workers by address, as the scheduler describes them.
Workers = Mapping[str, Mapping[str, Any]]


def by_resources(workers: Workers, seats: NodeAssignment | None = None) -> list[Node]:
    """Return the nodes that carry a role as a Dask resource, or those that have a seat."""
    nodes = []
    for address, info in sorted(workers.items()):
        resource, home = resource_in(info), -1
        spec = NodeSpec(str(info["name"]), resource, info["nthreads"]) if resource else None
        if seats is not None:
            spec, resource = seats.specs.get(address), None
        if spec is None:
            continue
        role = spec.resource
        if role == "server":
            home = shard_of(spec.name)
            role = role_of(spec.name) if home >= 0 else "spare"
        if seats is None and ANY_SHARD in info["resources"]:
            home = -1
        host = str(info["host"])
        nodes.append(Node(address, spec.name, role, home, resource, spec.threads, host))
    return nodes


def by_assignment(workers: Workers, group: Group) -> list[Node]:
    """Assign a role to every node of a cluster without roles: servers, stores, the rest workers."""
    stores = group.recovery.stores
    wanted = len(group.layout.shards) * group.replicas
    servers = max(group.replicas, group.servers or 0, min(wanted, (len(workers) - stores) // 2))
    roles = ["server"] * servers + ["store"] * stores
    roles += ["worker"] * (len(workers) - len(roles))
    by_host: dict[str, list[str]] = {}
    for address in sorted(workers):
        by_host.setdefault(str(workers[address]["host"]), []).append(address)
    turns = zip_longest(*by_host.values())  # one node of each host after the other
    addresses = [address for turn in turns for address in turn if address is not None]
    # There may be too few nodes for these roles.
    return [_assigned(a, workers[a], role) for a, role in zip(addresses, roles, strict=False)]


def newcomer(address: str, workers: Workers, nodes: Sequence[Node], group: Group) -> Node:
    """Assign a role to a node that joins later: server or store if one is missing, or worker."""
    wanted = by_assignment(workers, group)
    missing = Counter(n.role for n in wanted) - Counter(n.role for n in nodes)
    role = next((role for role in ("server", "store") if missing[role]), "worker")
    return _assigned(address, workers[address], role)


def check(nodes: Sequence[Node], group: Group) -> None:
    """Refuse a cluster that is too small for the group, by a `CapacityError`."""
    serving = [n for n in nodes if n.role in SERVING]
    have = Counter("server" if n in serving else n.role for n in nodes)
    servers = group.servers or group.replicas
    need = {"server": servers, "store": group.recovery.stores, "worker": 1}
    if any(have[role] < need[role] for role in need):
        wanted = ", ".join(f"{need[r]} for {r}s" for r in need if need[r])
        present = ", ".join(f"{have[r]} for {r}s" for r in need)
        raise CapacityError(
            f"the cluster has {len(nodes)} nodes ({present}), expected at least {wanted}. Start "
            "more Dask workers, or choose fewer replicas."
        )
    for shard in range(len(group.layout.shards) if group.servers is None else 0):
        able = sum(n.home in (-1, shard) for n in serving)
        if able < group.replicas:
            raise CapacityError(
                f"shard {shard} has {able} nodes, expected {group.replicas}: the names of the "
                f"other {len(serving) - able} nodes for servers reserve them for other shards. "
                f"Start a Dask worker named 'server-{shard}', or choose fewer shards or replicas."
            )


def _assigned(address: str, info: Mapping[str, Any], role: str) -> Node:
    return Node(address, str(info["name"]), role, -1, None, info["nthreads"], str(info["host"]))
