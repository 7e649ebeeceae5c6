"""The check of where replicas are put: on another machine where there is a choice, and on no host
that is to be emptied."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from dps.protocol.coordinator.placement import ReplicaPlacement
from dps.protocol.transport import Endpoint
from dps.sim.patches import Patch, patched
from dps.sim.violation import Violation, require


def choosing(
    drained: Callable[[], set[Endpoint]], report: Callable[[Violation], None]
) -> AbstractContextManager[None]:
    """Have each choice of a host looked at; `drained` are hosts that are to have no more."""
    best = ReplicaPlacement.best

    def best_and_look(
        self: ReplicaPlacement, chain: tuple[Endpoint, ...], last: Endpoint | None
    ) -> Endpoint | None:
        chosen = best(self, chain, last)
        if chosen is not None:
            try:
                _check(self, chain, last, chosen, drained())
            except Violation as violation:
                report(violation)
        return chosen

    return patched(Patch(ReplicaPlacement, "best", best_and_look))


def _check(
    candidates: ReplicaPlacement,
    chain: tuple[Endpoint, ...],
    last: Endpoint | None,
    chosen: Endpoint,
    drained: set[Endpoint],
) -> None:
    around, shard = candidates._port, candidates._shard
    hosts = around.members.hosts
    node = hosts[chosen].node
    text = f"{node} is chosen for shard {shard}, though it is to be emptied"
    require(chosen not in drained, "drained, but chosen", text)
    machines = {hosts[member].machine for member in chain if member in hosts} - {""}
    if hosts[chosen].machine not in machines:
        return

    def as_good(host: Endpoint) -> tuple[object, ...]:
        reserve = around.is_reserve(host)
        home = hosts[host].home == shard
        # Those on a ring are never as good as each other: see `dps.sim.checks.ring`.
        place = [*around.preferred(shard), host].index(host)
        avoided, answers = candidates.is_avoided(host), around.members.answers(host)
        return avoided, answers, reserve, host == last, place, home, around.load(host)

    elsewhere = [
        info.node
        for host, info in hosts.items()
        if host not in chain
        and host not in drained
        and around.may_hold(info, shard)
        and info.machine not in machines
        and as_good(host) == as_good(chosen)
    ]
    text = f"shard {shard}: {node} shares a machine with another replica, {elsewhere} do not"
    require(not elsewhere, "one machine", text)
