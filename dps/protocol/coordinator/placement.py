"""The choice of the host for one more replica of a shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dps.protocol.coordinator.port import CoordinatorPort
from dps.protocol.messages import HostInfo
from dps.protocol.transport import Endpoint


class ReplicaPlacement:
    """The hosts that one shard may go to. Used from one event loop.

    Parameters
    ----------
    lease
        For how many seconds a host is avoided on which something has failed.
    wake
        Called when that is over.
    """

    def __init__(
        self, shard: int, port: CoordinatorPort, lease: float, wake: Callable[[], None]
    ) -> None:
        self._shard = shard
        self._port = port
        self._lease = lease
        self._wake = wake
        self._avoided: dict[Endpoint, float] = {}

    def best(self, chain: tuple[Endpoint, ...], last: Endpoint | None) -> Endpoint | None:
        """The best host for one more replica: meant for this shard, else with the fewest.

        With consistent hashing it is the one that comes first on the ring. Among equals it is one
        on another machine than those that have a replica, `chain`. `last` is where the shard was
        before; None: there is none.
        """
        hosts = self._port.members.hosts
        machines = {hosts[member].machine for member in chain if member in hosts} - {""}
        candidates = [
            info
            for host, info in hosts.items()
            if host not in chain
            and self._port.may_hold(info, self._shard)
            and not (chain and self.is_avoided(host))
        ]

        preferred = self._port.preferred(self._shard)
        places = {host: place for place, host in enumerate(preferred)}

        def rank(info: HostInfo) -> tuple[bool, bool, bool, bool, int, bool, int, bool, bool, str]:
            around, host = self._port, info.host
            return (
                self.is_avoided(host),
                not around.members.answers(host),
                around.is_reserve(host),
                host != last,
                places.get(host, len(places)),
                info.home != self._shard,
                around.load(host),
                info.machine in machines,
                (info.role == "replica") != bool(chain),  # it is meant for another role
                info.node,
            )

        return min(candidates, key=rank).host if candidates else None

    def avoid(self, host: Endpoint) -> None:
        """Try others before this host for a while: it may be out of reach of what it needs."""
        loop = asyncio.get_running_loop()
        self._avoided[host] = loop.time() + self._lease
        loop.call_later(self._lease, self._wake)

    def is_avoided(self, host: Endpoint) -> bool:
        """Whether others are to be tried before this host."""
        return self._avoided.get(host, 0.0) > asyncio.get_running_loop().time()
