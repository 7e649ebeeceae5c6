"""Which Dask worker of a deployment becomes which node, where Dask's names do not define it.

Nodes that must not fail together are kept on different hosts where there is a choice: the replicas
of a shard, the state store and any server, and one state store and another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from dps.cluster.names import NodeSpec, Offer, shard_of
from dps.core.names import role_of
from dps.errors import CapacityError


class NodeAssignment:
    """Which Dask worker, by its address, is which node. Thread-safe: each operation is atomic."""

    def __init__(self) -> None:
        self.specs: dict[str, NodeSpec] = {}
        # Called with the address of each further Dask worker that becomes a node.
        self.listeners: list[Callable[[str], None]] = []

    def take(self, address: str, spec: NodeSpec) -> None:
        """Make a Dask worker a node, and call the listeners."""
        self.specs[address] = spec
        for listen in list(self.listeners):
            listen(address)


def assign(specs: Sequence[NodeSpec], able: Collection[Offer]) -> dict[str, Offer]:
    """Return a Dask worker for each node, by the node's name; leave out nodes without one."""
    taken: dict[str, Offer] = {}
    for spec in sorted(specs, key=_order):
        offer = best(spec, [o for o in able if o not in taken.values()], taken)
        if offer is not None:
            taken[spec.name] = offer
    return taken


def capacity(specs: Sequence[NodeSpec], offers: Collection[Offer]) -> int:
    """Return how many times the Dask workers have room for all of these nodes."""
    left, times = list(offers), 0
    while len(taken := assign(specs, left)) == len(specs):
        left = [offer for offer in left if offer not in taken.values()]
        times += 1
    return times


def best(spec: NodeSpec, free: Collection[Offer], taken: Mapping[str, Offer]) -> Offer | None:
    """Return the best free Dask worker for a node, given the places of others; None without one."""
    fitting = [o for o in free if o.resource in (None, spec.resource) and o.threads >= spec.threads]
    room = Counter(offer.host for offer in free)
    failing = Counter(at.host for name, at in taken.items() if must_be_apart(spec.name, name))
    # A Dask worker of the node's own name comes first, then one on another host than the nodes that
    # must not fail with this one. Servers go to the host with the most free Dask workers, so that
    # the next chain finds room as well; the store goes to the host with the fewest.
    sign = 1 if role_of(spec.name) == "store" else -1

    def rank(offer: Offer) -> tuple[bool, int, int, int, str]:
        left = sign * room[offer.host]
        return offer.name != spec.name, failing[offer.host], left, offer.threads, offer.address

    return min(fitting, key=rank, default=None)


def failing_together(hosts: Mapping[str, str]) -> tuple[str, ...]:
    """Return a sentence for each host with nodes that must not fail together."""
    together: defaultdict[str, set[str]] = defaultdict(set)
    for name, host in hosts.items():
        for other, there in hosts.items():
            if name < other and host == there and must_be_apart(name, other):
                together[host] |= {name, other}
    return tuple(
        f"{', '.join(sorted(names))} share a host, because there are too few hosts: training "
        "cannot recover from the loss of that host"
        for names in together.values()
    )


def must_be_apart(one: str, other: str) -> bool:
    """Whether two nodes, by their names, must not fail together."""
    shard, roles = shard_of(one), {role_of(one), role_of(other)}
    with_store = "store" in roles and roles <= {"store", "server", "replica"}
    return with_store or (shard >= 0 and shard == shard_of(other))


def eligible(offers: Collection[Offer]) -> list[Offer]:
    """Return the Dask workers that may become nodes: those with a role, if any has one."""
    with_roles = [offer for offer in offers if offer.resource is not None]
    return with_roles or list(offers)


def _order(spec: NodeSpec) -> tuple[int, int, int, str]:
    """Sort the nodes that are hardest to place first, and chain after chain."""
    kinds = {"store": 0, "server": 1, "replica": 1, "spare": 2, "worker": 3, "evaluator": 4}
    kind = kinds.get(role_of(spec.name), len(kinds))
    return -spec.threads, kind, shard_of(spec.name), spec.name


def too_few(specs: Sequence[NodeSpec], able: Collection[Offer]) -> CapacityError:
    """Return the error that lists which Dask workers are needed, and which there are."""
    resources = list(dict.fromkeys(spec.resource for spec in specs))
    wanted = Counter(spec.resource for spec in specs)
    threads = {r: max(s.threads for s in specs if s.resource == r) for r in resources}
    needed = ", ".join(
        f"{wanted[r]} as {r}" + (f" with {threads[r]} threads each" if threads[r] > 1 else "")
        for r in resources
    )
    roles = Counter(offer.resource for offer in able if offer.resource is not None)
    offered = ", ".join(f"{roles[r]} as {r}" for r in resources) if roles else "without roles"
    return CapacityError(
        f"the deployment has {len(able)} usable Dask workers ({offered}), expected {len(specs)} "
        f"({needed}). Start more Dask workers, or reduce the shards, replicas or workers."
    )
