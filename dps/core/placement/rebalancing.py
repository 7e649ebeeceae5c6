"""Which replicas move when the set of hosts changes: few of them, and evenly afterwards.

A host is to hold the mean number of replicas, rounded down or up. What is on a host that may hold
none has to move; beyond that, replicas move from the fullest host to the emptiest until they differ
by one at most, and of those the ones that have to move anyway. Where something else says who is to
hold what (`dps.core.placement.hash_ring`), they move there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Move(Generic[H]):
    """A replica of a shard goes from one host to another; `source` None: the shard lacks one."""

    shard: int
    source: H | None
    target: H


def moves(chains: Sequence[Sequence[H]], hosts: Sequence[H], replicas: int) -> tuple[Move[H], ...]:
    """Return what is to move so that the replicas are spread evenly over hosts.

    Parameters
    ----------
    chains
        Each shard's replicas: the hosts that they are on, no host twice.
    hosts
        Those that may hold replicas; of two that are as good, the one that comes first is taken.
    replicas
        How many replicas each shard is to have. With fewer hosts, what has nowhere to go stays.

    Returns
    -------
    moves
        No two replicas of a shard end on one host. With one replica, no fewer moves would do;
        with several, a few more may be made than needed, for the sake of shards that lack one.
    """
    plan = _Plan(chains, hosts)
    for shard, chain in enumerate(chains):
        lacking = [None] * (replicas - len(chain))
        for source in [*(host for host in chain if host not in plan.loads), *lacking]:
            plan.find_place(shard, source)
    while plan.level():
        pass
    found = ((s, source, target) for (s, target), source in plan.sources.items())
    return tuple(Move(*move) for move in sorted(found, key=lambda move: move[0]))


def moves_to(owners: Sequence[Sequence[H]], chains: Sequence[Sequence[H]]) -> tuple[Move[H], ...]:
    """Return what is to move so that each shard's replicas are on its owners.

    Parameters
    ----------
    owners
        Who is to hold each shard. With fewer of them than replicas, what has nowhere to go stays.
    chains
        Each shard's replicas: the hosts that they are on, no host twice.
    """
    found = []
    for shard, (wanted, chain) in enumerate(zip(owners, chains, strict=True)):
        leaving = [host for host in chain if host not in wanted]
        coming = [host for host in wanted if host not in chain]
        pairs = zip(leaving, coming, strict=False)
        found += [Move(shard, source, target) for source, target in pairs]
    return tuple(found)


class _Plan(Generic[H]):
    """Who is to hold what, and where each replica that moves comes from."""

    def __init__(self, chains: Sequence[Sequence[H]], hosts: Sequence[H]) -> None:
        self.loads = dict.fromkeys(hosts, 0)
        self.held = [{host for host in chain if host in self.loads} for chain in chains]
        self.sources: dict[tuple[int, H], H | None] = {}
        for of_shard in self.held:
            for host in of_shard:
                self.loads[host] += 1

    def find_place(self, shard: int, source: H | None) -> None:
        """Have a replica go to the emptiest host that has none of the shard, if there is one."""
        able = [host for host in self.loads if host not in self.held[shard]]
        if able:
            self._put(shard, min(able, key=self.loads.__getitem__), source)

    def level(self) -> bool:
        """Have one replica go from the fullest host to the emptiest; False: they are even."""
        if not self.loads:
            return False
        fullest = max(self.loads, key=self.loads.__getitem__)
        emptiest = min(self.loads, key=self.loads.__getitem__)
        if self.loads[fullest] - self.loads[emptiest] <= 1:
            return False
        # The fullest host has more shards, so one of them at least is not on the other.
        able = [
            shard
            for shard, held in enumerate(self.held)
            if fullest in held and emptiest not in held
        ]
        shard = min(able, key=lambda s: (s, fullest) not in self.sources)
        source = self.sources.pop((shard, fullest), fullest)
        self.held[shard].discard(fullest)
        self.loads[fullest] -= 1
        self._put(shard, emptiest, source)
        return True

    def _put(self, shard: int, host: H, source: H | None) -> None:
        self.held[shard].add(host)
        self.loads[host] += 1
        self.sources[shard, host] = source
