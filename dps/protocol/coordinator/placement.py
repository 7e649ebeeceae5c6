"""Which hosts hold which shards: where a replica is placed, and which one is moved next.

Until a user asks for a number of servers, a host is meant for one shard (its `home`) or for any,
and nothing is moved. After that, replicas are kept evenly spread over that many hosts, one move at
a time (`dps.core.placement`). A host that is drained is emptied, and no longer used.

With consistent hashing, a host's place on the ring follows from its node's original name, so that
a lost node's replacement gets the same shards. A shard's replicas go to the next hosts on the ring,
on different machines if there are enough. Hosts that were on the ring when all shards were last
served stay on it as long as they can be used, even if another host holds more.

Stores and mailboxes are chosen elsewhere (`Coordinator._appoint_keepers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dps.core.names import STORE_ROLES, original
from dps.core.placement import HashRing, Move, apart, moves, moves_to
from dps.errors import CapacityError, NotServing
from dps.protocol.messages import HostInfo
from dps.protocol.transport import Endpoint
from dps.recovery.strategy import as_servers

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator


class Rebalancer:
    """Which hosts hold shards, and what is to move. All calls come from one event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        group = coordinator.group
        self.servers = group.servers  # how many hosts are to hold shards; None: any number
        self.leaving: tuple[Endpoint, ...] = ()  # something is still to be moved from these
        self._group = group
        self._coordinator = coordinator
        self._members = coordinator.members
        self._controllers = coordinator.controllers
        self._drained: dict[Endpoint, int] = {}
        self._on_ring: Collection[Endpoint] = ()

    # -- requests --------------------------------------------------------------------------------

    def scale(self, servers: int) -> None:
        """Keep the shards on this many hosts from now on.

        Raises `ConfigurationError` for an impossible number, `CapacityError` for too few hosts.
        """
        servers = as_servers(servers, len(self._controllers), self._group.recovery)
        able = self._able()
        if len(able) < servers:
            raise CapacityError(
                f"servers={servers}, but only {len(able)} nodes can hold shards; start more Dask "
                "workers for servers, or choose fewer"
            )
        self.servers = servers

    def drain(self, host: Endpoint) -> None:
        """Empty a host, unless it has ended, and use it no more.

        Raises `ConfigurationError` if shards cannot move under this recovery, `CapacityError` if
        the other hosts are too few, and `NotServing` if a shard is down that needs what it keeps.
        """
        self._group.recovery.must_allow("moves")
        info = self._members[host].info
        if info is None or host in self._drained:
            return
        if info.role not in STORE_ROLES:
            # A node may be listed twice: as it was before it was lost, and as it is now.
            others = {other.node for other in self._able()} - {info.node}
            if len(others) < self._group.replicas:
                raise CapacityError(
                    f"{info.node} cannot be drained: {len(others)} nodes would remain for shards, "
                    f"expected {self._group.replicas}; start another node for servers first"
                )
            if self.servers is None:  # during an outage, fewer may hold shards than are needed
                loaded = sum(load > 0 for load in self.loads.values())
                self.servers = max(loaded, self._group.replicas)
        elif host in self._coordinator.keepers:
            stores = {o.node for o in self.usable.values() if o.role == "store"} - {info.node}
            if info.role == "store" and len(stores) < self._group.recovery.stores:
                raise CapacityError(
                    f"{info.node} cannot be drained: it is the only node for the state store; "
                    "start another one with the Dask resource 'store' first"
                )
            if self._coordinator.any_down:
                raise NotServing(
                    f"{info.node} cannot be drained now: a shard that is down needs its state; try "
                    "again when every shard is served"
                )
        self._drained[host] = len(self._drained)

    # -- which hosts may hold what ---------------------------------------------------------------

    @property
    def usable(self) -> dict[Endpoint, HostInfo]:
        """The hosts that may be used and are not drained."""
        return {h: i for h, i in self._members.hosts.items() if h not in self._drained}

    def may_hold(self, info: HostInfo, shard: int) -> bool:
        """Whether a host may have a replica of a shard."""
        if info.role in STORE_ROLES or info.host in self._drained:
            return False
        return self.servers is not None or info.home in (-1, shard)

    def _able(self) -> list[HostInfo]:
        members = self._members
        infos = (i for i in self.usable.values() if i.role not in STORE_ROLES)
        return [info for info in infos if not members[info.host].silent]

    def _in_use(self) -> dict[Endpoint, HostInfo]:
        """The hosts that are to hold shards: those on the ring, then those with most replicas."""
        loads = self.loads

        def rank(info: HostInfo) -> tuple[bool, int, str]:
            return info.host not in self._on_ring, -loads[info.host], info.node

        chosen = sorted(self._able(), key=rank)[: self.servers]
        return {info.host: info for info in chosen}

    def _order(self, shard: int, infos: Collection[HostInfo]) -> list[Endpoint]:
        if self._group.placement is None or not infos:
            return []
        around = sorted(infos, key=lambda info: (info.node, str(info.host)))
        names = tuple(original(info.node) for info in around)
        ring = _ring_of(names, self._group.placement.virtual_nodes)
        following = [around[i] for i in ring.successors(str(shard))]
        chosen = apart(following, lambda info: info.machine, self._group.replicas)
        return [info.host for info in chosen]

    @property
    def loads(self) -> Counter[Endpoint]:
        """How many replicas each host has, or is about to have."""
        loads: Counter[Endpoint] = Counter()
        for each in self._controllers:
            loads.update(each.view.chain)
            if each.reserved is not None and each.reserved not in each.view.chain:
                loads[each.reserved] += 1
        return loads

    # -- the best host ---------------------------------------------------------------------------

    def best(
        self, shard: int, chain: tuple[Endpoint, ...], last: Endpoint | None
    ) -> Endpoint | None:
        """Return the best host for one more replica of a shard, or None."""
        members, is_avoided = self._members, self._controllers[shard].is_avoided
        hosts, loads, in_use = members.hosts, self.loads, self._in_use()
        machines = {hosts[member].machine for member in chain if member in hosts} - {""}
        candidates = [
            info
            for host, info in hosts.items()
            if host not in chain and self.may_hold(info, shard) and not (chain and is_avoided(host))
        ]
        places = {host: place for place, host in enumerate(self._order(shard, in_use.values()))}

        # In this order, hosts are preferred that are not avoided, answer, are to hold shards, were
        # the `last` holder, are next on the ring, are meant for this shard, hold the fewest
        # replicas, or are on another machine than the members of `chain`.
        def rank(info: HostInfo) -> tuple[Any, ...]:
            host = info.host
            return (
                is_avoided(host),
                not members.answers(host),
                self.servers is not None and host not in in_use,
                host != last,
                places.get(host, len(places)),
                info.home != shard,
                loads[host],
                info.machine in machines,
                (info.role == "replica") != bool(chain),  # it is meant for another role
                info.node,
            )

        return min(candidates, key=rank).host if candidates else None

    # -- moves -----------------------------------------------------------------------------------

    def consider(self) -> None:
        """Begin the next move, if every shard is served and none is moving."""
        if all(each.view.serving and each.moving is None for each in self._controllers):
            self._on_ring = self._in_use().keys() if self._group.placement else ()
            for move in self._plan():
                if self._controllers[move.shard].can_move_to(move.target):
                    self._controllers[move.shard].move(move)
                    break

    def look(self) -> bool:
        """Update `leaving`; return whether it has changed."""
        loads, keepers = self.loads, self._coordinator.keepers
        left = {
            host
            for host in self._drained
            if loads[host]
            or host in keepers
            or any(host in each.stored for each in self._controllers)
        }
        under_way = [each.moving for each in self._controllers if each.moving is not None]
        left |= {m.source for m in (*under_way, *self._plan()) if m.source is not None}
        before, self.leaving = self.leaving, tuple(sorted(left, key=str))
        return self.leaving != before

    def _plan(self) -> list[Move[Endpoint]]:
        if self.servers is None:
            return []
        chains = [controller.view.chain for controller in self._controllers]
        if self._group.placement is None:
            planned = moves(chains, list(self._in_use()), self._group.replicas)
        else:
            planned = moves_to(self._owners(len(chains)), chains)

        def urgency(move: Move[Endpoint]) -> int:
            # The host that was drained first has the least time left, so it is emptied first.
            last = len(self._drained)
            return last if move.source is None else self._drained.get(move.source, last)

        ready = [move for move in planned if move.source is not None]
        return sorted(ready, key=urgency)

    def _owners(self, shards: int) -> list[list[Endpoint]]:
        infos = self._in_use().values()
        return [self._order(shard, infos)[: self._group.replicas] for shard in range(shards)]


@lru_cache(maxsize=8)
def _ring_of(names: tuple[str, ...], virtual_nodes: int) -> HashRing:
    return HashRing.of(names, virtual_nodes)
