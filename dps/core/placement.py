"""Placement: blocks on shards, shards on a hash ring of servers, and moves of replicas.

On a hash ring, each server has one point per virtual node; a key belongs to the server whose point
comes next, so a server that joins or leaves moves only its own keys. With v virtual nodes, a
server's part of the ring has a coefficient of variation of about 1/√v.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

import numpy as np

from dps.core.ranges import Checked, refused, whole_from
from dps.errors import ConfigurationError

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

BALANCED, CONSISTENT_HASH = "balanced", "consistent_hash"
VIRTUAL_NODES, MAX_VIRTUAL_NODES = 64, 10_000


@dataclass(frozen=True, slots=True)
class Balanced:
    """The server with the fewest shards gets the next shard."""


@dataclass(frozen=True, slots=True)
class ConsistentHash(Checked):
    """Shards go to servers by consistent hashing: each to the server that comes next on a ring.

    Replicas go to the servers after that. If a server is lost or leaves, only its own shards move;
    if one joins, only those that become its own.

    Parameters
    ----------
    virtual_nodes
        Points of the ring for each server, 1 to 10,000: more points spread shards more evenly.

    Examples
    --------
    >>> ConsistentHash(virtual_nodes=128)
    ConsistentHash(virtual_nodes=128)
    """

    virtual_nodes: Annotated[int, whole_from(1, "points")] = VIRTUAL_NODES

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.virtual_nodes > MAX_VIRTUAL_NODES:
            expected = f"at most {MAX_VIRTUAL_NODES:,}"
            raise refused("ConsistentHash: virtual_nodes", self.virtual_nodes, expected)


@dataclass(frozen=True)
class HashRing:
    """Servers on an immutable ring: sorted hashes of virtual nodes, and the server of each."""

    points: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, servers: Sequence[str], virtual_nodes: int) -> HashRing:
        """Put each server at `virtual_nodes` points."""
        points = hashes([f"{server}#{i}" for server in servers for i in range(virtual_nodes)])
        order = np.argsort(points, kind="stable")
        return cls(points[order], np.repeat(np.arange(len(servers)), virtual_nodes)[order])

    def successors(self, key: str) -> list[int]:
        """Return the numbers of all servers, each once, in the order of the ring from a key on."""
        start = int(np.searchsorted(self.points, hashes([key])[0]))
        around = np.roll(self.owners, -start)
        _, firsts = np.unique(around, return_index=True)
        return [int(around[first]) for first in np.sort(firsts)]


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def hashes(names: Sequence[str]) -> np.ndarray:
    """Return the place of each name on the ring."""
    return np.array([int.from_bytes(_digest(name), "big") for name in names], np.uint64)


def apart(hosts: Sequence[T], machine: Callable[[T], str], count: int) -> list[T]:
    """Return hosts in order, but the first `count` on different machines where possible."""
    chosen: list[T] = []
    taken: set[str] = set()
    for host in hosts:
        if len(chosen) < count and machine(host) not in taken:
            chosen.append(host)
            taken |= {machine(host)} - {""}  # a host of an unknown machine is alone on it
    return [*chosen, *(host for host in hosts if host not in chosen)]


def checked_placement(placement: object, servers: int | None) -> ConsistentHash | None:
    """Return the hash that places shards, if any; it needs a number of servers."""
    if isinstance(placement, Balanced) or (isinstance(placement, str) and placement == BALANCED):
        return None
    by_name = isinstance(placement, str) and placement == CONSISTENT_HASH
    chosen = ConsistentHash() if by_name else placement
    if not isinstance(chosen, ConsistentHash):
        known = f"{BALANCED!r}, {CONSISTENT_HASH!r} or ConsistentHash(virtual_nodes=...)"
        raise refused("placement", placement, known)
    if servers is None:
        raise ConfigurationError(
            "consistent hashing needs servers=..., the number of nodes that share the shards; "
            "without it, each replica has a separate node"
        )
    return chosen


def place(weights: Mapping[str, int], shards: int) -> dict[str, int]:
    """Return the shard of each key, the same in every process, by the sizes of their blocks."""
    mean = sum(weights.values()) / shards
    loads = [0] * shards
    homes: dict[str, int] = {}
    for key, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        empty = [shard for shard in range(shards) if not loads[shard]]
        # The remaining blocks may be just enough to give every shard one.
        open_to = empty if len(weights) - len(homes) <= len(empty) else range(shards)
        scores = {shard: _digest(f"{shard}/{key}") for shard in open_to}
        ranked = sorted(open_to, key=scores.__getitem__, reverse=True)
        fitting = (s for s in ranked if loads[s] + weight <= mean)
        home = next(fitting, min(ranked, key=loads.__getitem__))
        homes[key] = home
        loads[home] += weight
    return homes


@dataclass(frozen=True, slots=True)
class Move(Generic[H]):
    """A move of a replica to a host; `source` None: the shard lacks a replica."""

    shard: int
    source: H | None
    target: H


def moves(chains: Sequence[Sequence[H]], hosts: Sequence[H], replicas: int) -> tuple[Move[H], ...]:
    """Return the moves that spread the replicas of shards evenly over hosts."""
    # `chains` has the hosts of each shard's replicas, and `hosts` those that may hold any. Replicas
    # on others move, if there is a place; then replicas move from the fullest host to the emptiest
    # until these differ by at most one, preferably those that move anyway. With one replica of each
    # shard, the moves are the fewest; with several, shards that lack one may cost a few more.
    loads = dict.fromkeys(hosts, 0)
    held = [loads.keys() & chain for chain in chains]
    for host in (host for hosts_of_shard in held for host in hosts_of_shard):
        loads[host] += 1
    sources: dict[tuple[int, H], H | None] = {}

    def put(shard: int, host: H, source: H | None) -> None:
        held[shard].add(host)
        loads[host] += 1
        sources[shard, host] = source

    for shard, chain in enumerate(chains):
        lacking = [None] * (replicas - len(chain))
        for source in [*(host for host in chain if host not in loads), *lacking]:
            if able := [host for host in loads if host not in held[shard]]:
                put(shard, min(able, key=loads.__getitem__), source)
    while loads:
        fullest = max(loads, key=loads.__getitem__)
        emptiest = min(loads, key=loads.__getitem__)
        if loads[fullest] - loads[emptiest] <= 1:
            break
        # The fullest host has more shards, so at least one of them is not on the other.
        movable = [s for s, on in enumerate(held) if fullest in on and emptiest not in on]
        moving = [s for s in movable if (s, fullest) in sources]
        shard = (moving or movable)[0]
        source = sources.pop((shard, fullest), fullest)
        held[shard].discard(fullest)
        loads[fullest] -= 1
        put(shard, emptiest, source)
    ordered = sorted(sources.items(), key=lambda item: item[0][0])
    return tuple(Move(shard, source, target) for (shard, target), source in ordered)


def moves_to(owners: Sequence[Sequence[H]], chains: Sequence[Sequence[H]]) -> tuple[Move[H], ...]:
    """Return the moves that bring each shard's replicas to its owners, as far as there are any."""
    moves = []
    for shard, (wanted, chain) in enumerate(zip(owners, chains, strict=True)):
        leaving = [host for host in chain if host not in wanted]
        coming = [host for host in wanted if host not in chain]
        pairs = zip(leaving, coming, strict=False)
        moves += [Move(shard, source, target) for source, target in pairs]
    return tuple(moves)
