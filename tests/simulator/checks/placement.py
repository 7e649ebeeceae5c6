"""The checks of placement: who is chosen, who holds what, and that a loss moves no other shards.

Who is to hold a shard on a ring is computed from the definition of the ring, by other means than
in `dps.core.placement`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from dps.core.names import original
from dps.core.placement import Move
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.coordinator.placement import Rebalancer
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.messages import HostInfo, View
from dps.protocol.transport import Endpoint
from tests.simulator.network import Violation
from tests.simulator.patches import Patch, before, require


def check_ring(scaling: Rebalancer, views: Sequence[View]) -> None:
    """Every shard is on those hosts that follow it on the ring; raises `Violation`."""
    for view in views:
        wanted, names = _owners(scaling, view.shard, _in_use(scaling))
        text = f"shard {view.shard} is on {_told(view.chain)}, but is to be on {names}"
        require(set(view.chain) == set(wanted), "not on the ring", text)


def placing(
    drained: Callable[[], set[Endpoint]], report: Callable[[Violation], None]
) -> list[Patch]:
    """Have each choice of a host looked at, and on a ring each move.

    `drained` are hosts that are to have no more replicas.
    """
    rests: WeakKeyDictionary[Rebalancer, _Rest] = WeakKeyDictionary()
    best, consider = Rebalancer.best, Rebalancer.consider

    def best_and_look(
        self: Rebalancer, shard: int, chain: tuple[Endpoint, ...], last: Endpoint | None
    ) -> Endpoint | None:
        chosen = best(self, shard, chain, last)
        if chosen is not None:
            _reported(report, lambda: _check_machine(self, shard, chain, last, chosen, drained()))
        if chosen is not None and _has_ring(self._coordinator):
            _reported(report, lambda: _check_choice(self, shard, chain, chosen))
        return chosen

    def consider_and_look(self: Rebalancer) -> None:
        if self._group.placement is None:
            return consider(self)
        rest = rests.setdefault(self, _Rest())
        rest.look(self)
        consider(self)
        return rest.settle(self)

    def look_at_move(self: ShardController, to: Move[Endpoint]) -> None:
        if _has_ring(self._coordinator):
            scaling = self._coordinator.rebalancer
            _reported(report, lambda: rests.setdefault(scaling, _Rest()).check(scaling, to))

    def note_loss(self: Coordinator, controller: Any, info: HostInfo, by: str) -> None:
        # It may be back at the same address, in another life, before anybody looks.
        rests.setdefault(self.rebalancer, _Rest()).changed.add(info.host)

    return [
        Patch(Rebalancer, "best", best_and_look),
        Patch(Rebalancer, "consider", consider_and_look),
        before(ShardController, "move", look_at_move),
        before(Coordinator, "_detected", note_loss),
    ]


class _Rest:
    """The ring when every replica was last where it is to be, and who has come or gone since."""

    def __init__(self) -> None:
        self.changed: set[Endpoint] = set()
        self._hosts: list[HostInfo] | None = None

    def look(self, scaling: Rebalancer) -> None:
        """Take note of who is on the ring now and was not, or the other way round."""
        now = {info.host for info in _in_use(scaling)}
        self.changed |= now ^ {info.host for info in self._hosts or ()}

    def settle(self, scaling: Rebalancer) -> None:
        """Begin anew if there is nothing to be moved, restored or added."""
        views = [controller.view for controller in scaling._controllers]
        whole = all(v.serving and len(v.chain) == scaling._group.replicas for v in views)
        moving = any(controller.moving is not None for controller in scaling._controllers)
        if whole and not moving and not scaling._plan():
            self._hosts, self.changed = _in_use(scaling), set()

    def check(self, scaling: Rebalancer, move: Move[Endpoint]) -> None:
        """Report a move that no change of the hosts requires.

        If the hosts on the ring were unreachable, a shard was restored elsewhere, and moves back.
        """
        if self._hosts is None:
            return
        self.look(scaling)
        before, _ = _owners(scaling, move.shard, self._hosts)
        after, names = _owners(scaling, move.shard, _in_use(scaling))
        if move.source not in before and move.target in after:
            return
        text = (
            f"shard {move.shard} moves from {move.source} to {move.target.address}, though nobody "
            f"has come or gone of those who had it, {_told(before)}, or are to have it, {names}"
        )
        theirs = {move.source, *before, *after}
        require(not self.changed.isdisjoint(theirs), "moved without need", text)


def _check_choice(
    scaling: Rebalancer, shard: int, chain: tuple[Endpoint, ...], chosen: Endpoint
) -> None:
    """Of the hosts that can be chosen, and answer, it is the first on the ring."""
    answers = scaling._coordinator.members.answers
    is_avoided = scaling._controllers[shard].is_avoided
    order = _order(scaling, shard, _in_use(scaling))
    before = order[: order.index(chosen)] if chosen in order else order
    passed_over = [
        host
        for host in before
        if host not in chain and (not is_avoided(host) or is_avoided(chosen))
        if answers(host) or not answers(chosen)
        if not (chain and is_avoided(host))
    ]
    text = f"shard {shard}: {chosen.address} is chosen, before {_told(passed_over)} on the ring"
    require(not passed_over, "not the next on the ring", text)


def _in_use(scaling: Rebalancer) -> list[HostInfo]:
    return list(scaling._in_use().values())


def _owners(
    scaling: Rebalancer, shard: int, hosts: Sequence[HostInfo]
) -> tuple[list[Endpoint], list[str]]:
    """Who is to hold a shard if these hosts are on the ring, and the names of their nodes."""
    owners = _order(scaling, shard, hosts)[: scaling._group.replicas]
    nodes = {info.host: info.node for info in hosts}
    return owners, [nodes[host] for host in owners]


def _order(scaling: Rebalancer, shard: int, hosts: Sequence[HostInfo]) -> list[Endpoint]:
    """All of these hosts as they follow a shard: first, some of them on machines of their own."""
    placement, replicas = scaling._group.placement, scaling._group.replicas
    assert placement is not None
    key, points = _hash(str(shard)), range(placement.virtual_nodes)

    def distance(info: HostInfo) -> tuple[int, str, str]:
        name = original(info.node)
        way = min((_hash(f"{name}#{i}") - key) % (1 << 64) for i in points)
        return way, info.node, str(info.host)

    following = sorted(hosts, key=distance)
    first: list[HostInfo] = []
    for info in following:
        shared = info.machine and info.machine in {other.machine for other in first}
        if len(first) < replicas and not shared:
            first.append(info)
    return [info.host for info in (*first, *(i for i in following if i not in first))]


@cache
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _has_ring(coordinator: Coordinator) -> bool:
    return coordinator.group.placement is not None


def _reported(report: Callable[[Violation], None], check: Callable[[], None]) -> None:
    try:
        check()
    except Violation as violation:
        report(violation)


def _told(hosts: Sequence[Endpoint]) -> str:
    return ", ".join(host.address for host in hosts) or "nobody"


def _check_machine(
    scaling: Rebalancer,
    shard: int,
    chain: tuple[Endpoint, ...],
    last: Endpoint | None,
    chosen: Endpoint,
    drained: set[Endpoint],
) -> None:
    members, is_avoided = scaling._coordinator.members, scaling._controllers[shard].is_avoided
    hosts = members.hosts
    node = hosts[chosen].node
    text = f"{node} is chosen for shard {shard}, though it is to be emptied"
    require(chosen not in drained, "drained, but chosen", text)
    machines = {hosts[member].machine for member in chain if member in hosts} - {""}
    if hosts[chosen].machine not in machines:
        return

    def as_good(host: Endpoint) -> tuple[object, ...]:
        reserve = scaling.servers is not None and host not in scaling._in_use()
        home = hosts[host].home == shard
        # Those on a ring are never as good as each other: see `_check_choice`.
        place = [*scaling._order(shard, _in_use(scaling)), host].index(host)
        avoided, answers = is_avoided(host), members.answers(host)
        return avoided, answers, reserve, host == last, place, home, scaling.loads[host]

    elsewhere = [
        info.node
        for host, info in hosts.items()
        if host not in chain
        and host not in drained
        and scaling.may_hold(info, shard)
        and info.machine not in machines
        and as_good(host) == as_good(chosen)
    ]
    text = f"shard {shard}: {node} shares a machine with another replica, {elsewhere} do not"
    require(not elsewhere, "one machine", text)
