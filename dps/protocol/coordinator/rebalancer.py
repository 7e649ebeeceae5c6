"""How many hosts hold shards, and which replica is moved next.

As long as nobody has asked for a number of servers, hosts are meant for certain shards (their home)
and nothing is moved. From then on replicas are kept evenly spread over that many hosts, whichever
have come and gone, by one move at a time (`dps.core.placement.rebalancing`,
`dps.protocol.coordinator.shard_controller`). A host that is drained is emptied, and is made no more
use of. With consistent hashing they are kept where the ring has them instead
(`dps.protocol.coordinator.host_ring`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from dps.core.names import STORE_ROLES
from dps.core.placement.rebalancing import Move, moves, moves_to
from dps.errors import CapacityError, NotServing
from dps.protocol.coordinator.host_ring import HostRing
from dps.protocol.coordinator.liveness import Membership
from dps.protocol.group import Group
from dps.protocol.messages import HostInfo
from dps.protocol.recovery import as_servers
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    from dps.protocol.coordinator.shard_controller import ShardController


class Rebalancer:
    """Which hosts hold shards. All calls come from one event loop.

    Parameters
    ----------
    controllers
        The shards' controllers.
    keepers
        Returns who keeps states and mail now.

    Attributes
    ----------
    servers
        How many hosts are wanted; None: it does not matter.
    leaving
        The hosts from which something is still to be moved away.
    """

    def __init__(
        self,
        group: Group,
        members: Membership,
        controllers: Sequence[ShardController],
        keepers: Callable[[], tuple[Endpoint, ...]],
    ) -> None:
        self.servers = group.servers
        self.leaving: tuple[Endpoint, ...] = ()
        self._group = group
        self._members = members
        self._controllers = controllers
        self._keepers = keepers
        self._drained: dict[Endpoint, int] = {}
        self._ring = HostRing(group.placement, group.replicas) if group.placement else None

    # -- what is asked for -----------------------------------------------------------------------

    def scale(self, servers: int) -> None:
        """Keep the shards on this many hosts from now on.

        Raises
        ------
        ConfigurationError
            So many can never be used.
        CapacityError
            There are fewer.
        """
        servers = as_servers(servers, len(self._controllers), self._group.recovery)
        able = self._able()
        if len(able) < servers:
            raise CapacityError(
                f"servers={servers}, but there are {len(able)} nodes that can hold shards; start "
                "more Dask workers for servers, or ask for fewer"
            )
        self.servers = servers

    def drain(self, host: Endpoint) -> None:
        """Empty a host, unless it has ended, and make no more use of it.

        Raises
        ------
        ConfigurationError
            Shards cannot move under this recovery.
        CapacityError
            The others cannot do without it.
        NotServing
            It keeps what a shard needs that is down now.
        """
        self._group.recovery.must_allow("moves")
        info = self._members.info(host)
        if info is None or host in self._drained:
            return
        if info.role in STORE_ROLES:
            self._check_keeper(info)
        else:
            self._check_server(info)
            if self.servers is None:  # during an outage, fewer may hold shards than are needed
                loaded = sum(load > 0 for load in self._loads().values())
                self.servers = max(loaded, self._group.replicas)
        self._drained[host] = len(self._drained)

    def _check_server(self, info: HostInfo) -> None:
        # A node may be here twice for a while: as what it was before it was lost, and as it is now.
        others = {other.node for other in self._able()} - {info.node}
        if len(others) < self._group.replicas:
            raise CapacityError(
                f"{info.node} cannot be drained: that would leave {len(others)} nodes to hold "
                f"shards, and {self._group.replicas} are needed; start another one for servers "
                "before"
            )

    def _check_keeper(self, info: HostInfo) -> None:
        if info.host not in self._keepers():
            return
        stores = {o.node for o in self.usable.values() if o.role == "store"} - {info.node}
        if info.role == "store" and len(stores) < self._group.recovery.stores:
            raise CapacityError(
                f"{info.node} cannot be drained: it keeps the shards' states, and there is no "
                "other node for a store; start one with the Dask resource 'store' before"
            )
        if any(
            controller.begun and not controller.view.serving for controller in self._controllers
        ):
            raise NotServing(
                f"{info.node} cannot be drained now: a shard is down that needs what it keeps; "
                "try again when every shard is served"
            )

    # -- who may hold what -----------------------------------------------------------------------

    @property
    def usable(self) -> dict[Endpoint, HostInfo]:
        """The hosts that are not to be emptied."""
        return {h: i for h, i in self._members.hosts.items() if h not in self._drained}

    @property
    def drained(self) -> list[Endpoint]:
        """The hosts that are to be emptied, and can still be counted on."""
        return [host for host in self._members.hosts if host in self._drained]

    def may_hold(self, info: HostInfo, shard: int) -> bool:
        """Whether a host may have a replica of a shard."""
        if info.role in STORE_ROLES or info.host in self._drained:
            return False
        return self.servers is not None or info.home in (-1, shard)

    def is_reserve(self, host: Endpoint) -> bool:
        """Whether a host is more than the wanted number of servers."""
        return self.servers is not None and host not in self._in_use()

    def preferred(self, shard: int) -> list[Endpoint]:
        """The hosts that are to hold a shard, the first before others; none: all are alike."""
        return self._ring.order(shard, self._infos_in_use()) if self._ring is not None else []

    def _able(self) -> list[HostInfo]:
        """The hosts that can hold any shard."""
        infos = self.usable.values()
        return [
            i for i in infos if i.role not in STORE_ROLES and not self._members.is_silent(i.host)
        ]

    def _in_use(self) -> list[Endpoint]:
        """The hosts that are to hold shards."""
        return [info.host for info in self._infos_in_use()]

    def _infos_in_use(self) -> list[HostInfo]:
        """Those that are on the ring, if there is one, then those that hold most already."""
        loads = self._loads()
        kept = self._ring.members if self._ring is not None else ()

        def rank(info: HostInfo) -> tuple[bool, int, str]:
            return info.host not in kept, -loads[info.host], info.node

        return sorted(self._able(), key=rank)[: self.servers]

    def _loads(self) -> Counter[Endpoint]:
        loads: Counter[Endpoint] = Counter()
        for controller in self._controllers:
            loads.update(controller.view.chain)
            if controller.reserved is not None and controller.reserved not in controller.view.chain:
                loads[controller.reserved] += 1
        return loads

    # -- moves -----------------------------------------------------------------------------------

    def consider(self) -> None:
        """Begin the next move, if it is time for one."""
        if all(
            controller.view.serving and controller.moving is None
            for controller in self._controllers
        ):
            if self._ring is not None:
                self._ring.members = frozenset(self._in_use())
            ready = (m for m in self._plan() if self._controllers[m.shard].can_move_to(m.target))
            for move in islice(ready, 1):
                self._controllers[move.shard].move(move)

    def look(self) -> bool:
        """Find out who is leaving now; return whether others were before."""
        loads, keepers = self._loads(), self._keepers()
        left = {
            host
            for host in self._drained
            if loads[host]
            or host in keepers
            or any(t.keeps_state_at(host) for t in self._controllers)
        }
        under_way = [
            controller.moving for controller in self._controllers if controller.moving is not None
        ]
        left |= {m.source for m in (*under_way, *self._plan()) if m.source is not None}
        before, self.leaving = self.leaving, tuple(sorted(left, key=str))
        return self.leaving != before

    def _plan(self) -> list[Move[Endpoint]]:
        if self.servers is None:
            return []
        chains = [controller.view.chain for controller in self._controllers]
        if self._ring is None:
            found = moves(chains, self._in_use(), self._group.replicas)
        else:
            infos = self._infos_in_use()
            found = moves_to([self._ring.owners(s, infos) for s in range(len(chains))], chains)
        ready = [move for move in found if move.source is not None]
        return sorted(ready, key=self._urgency)

    def _urgency(self, move: Move[Endpoint]) -> int:
        """Whom to empty first: who was asked to leave first has the least time left."""
        last = len(self._drained)
        return last if move.source is None else self._drained.get(move.source, last)
