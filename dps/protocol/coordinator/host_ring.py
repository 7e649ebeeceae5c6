"""Which hosts are to hold which shard by consistent hashing.

A host is on the ring by the name of its node, so that who takes a lost node's place gets what that
one had. A shard's replicas go to the hosts that follow it, on machines of their own where there are
enough. Who is on the ring is kept: as long as a host can be used, another does not take its place
because it holds more.
"""

from __future__ import annotations

from collections.abc import Sequence

from dps.core.names import original
from dps.core.placement import ConsistentHash, HashRing, apart
from dps.protocol.messages import HostInfo
from dps.protocol.transport import Endpoint


class HostRing:
    """The ring of the hosts that are in use. Used from one event loop.

    Parameters
    ----------
    placement
        How many virtual nodes each host has.
    replicas
        How many replicas each shard is to have.

    Attributes
    ----------
    members
        The hosts that were on it when all shards were last served.
    """

    def __init__(self, placement: ConsistentHash, replicas: int) -> None:
        self.members: frozenset[Endpoint] = frozenset()
        self._virtual_nodes = placement.virtual_nodes
        self._replicas = replicas
        self._names: list[str] = []
        self._ring = HashRing.of([], self._virtual_nodes)

    def owners(self, shard: int, hosts: Sequence[HostInfo]) -> list[Endpoint]:
        """Return which of these hosts are to hold a shard."""
        return self.order(shard, hosts)[: self._replicas]

    def order(self, shard: int, hosts: Sequence[HostInfo]) -> list[Endpoint]:
        """Return these hosts in the order in which they are to hold a shard."""
        around = sorted(hosts, key=lambda info: (info.node, str(info.host)))
        names = [original(info.node) for info in around]
        if names != self._names:
            self._names, self._ring = names, HashRing.of(names, self._virtual_nodes)
        following = [around[i] for i in self._ring.successors(str(shard))] if names else []
        chosen = apart(following, lambda info: info.machine, self._replicas)
        return [info.host for info in chosen]
