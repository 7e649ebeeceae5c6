"""Consistent hashing: servers and keys on a ring; who comes or goes moves its own keys alone.

Every server is on the ring at as many points as it has virtual nodes; a key belongs to the server
whose point comes next. Points are hashes of names, the same in every process. The largest load is
further above the mean the fewer virtual nodes and the fewer keys there are: with n servers of v
virtual nodes each, a server's part of the ring has a coefficient of variation of about 1/√v.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dps.core import ranges
from dps.errors import ConfigurationError, require

T = TypeVar("T")

BALANCED, CONSISTENT_HASH = "balanced", "consistent_hash"
VIRTUAL_NODES = 64
MOST_VIRTUAL_NODES = 10_000


@dataclass(frozen=True, slots=True)
class Balanced:
    """The server with the fewest shards gets the next shard."""


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """Shards go to servers by consistent hashing: each to the one that comes next on a ring.

    Replicas go to the servers after that. When a server is lost or leaves, only shards that it had
    move; when one comes, only those that are its own from then on.

    Parameters
    ----------
    virtual_nodes
        At how many points of the ring each server is, 1 to 10,000: more spread the ring more
        evenly.

    Raises
    ------
    ConfigurationError
        The number of virtual nodes is out of range.
    """

    virtual_nodes: int = VIRTUAL_NODES

    def __post_init__(self) -> None:
        ranges.count(self, "virtual_nodes", 1, "points")
        require(
            self.virtual_nodes <= MOST_VIRTUAL_NODES,
            f"ConsistentHash: virtual_nodes={self.virtual_nodes}, expected at most "
            f"{MOST_VIRTUAL_NODES:,}",
        )


@dataclass(frozen=True)
class HashRing:
    """Servers on a ring. It is never changed; without a server it is another ring.

    Attributes
    ----------
    points
        Where there are virtual nodes, in order, (virtual nodes of all servers,) uint64.
    owners
        The number of the server that each point is of, of the same shape.
    """

    points: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, servers: Sequence[str], virtual_nodes: int) -> HashRing:
        """Put each server at `virtual_nodes` points."""
        points = hashes([f"{server}#{i}" for server in servers for i in range(virtual_nodes)])
        order = np.argsort(points, kind="stable")
        return cls(points[order], np.repeat(np.arange(len(servers)), virtual_nodes)[order])

    def owner(self, keys: np.ndarray) -> np.ndarray:
        """Return the number of the server that each key's hash belongs to."""
        found: np.ndarray = self.owners[np.searchsorted(self.points, keys) % len(self.points)]
        return found

    def successors(self, key: str) -> list[int]:
        """Return the numbers of all servers, each once, as they follow a key: its owner first."""
        start = int(np.searchsorted(self.points, hashes([key])[0]))
        around = np.roll(self.owners, -start)
        _, firsts = np.unique(around, return_index=True)
        return [int(around[first]) for first in np.sort(firsts)]


def hashes(names: Sequence[str]) -> np.ndarray:
    """Return where each name falls on the ring."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.array([int.from_bytes(digest, "big") for digest in digests], np.uint64)


def apart(hosts: Sequence[T], machine: Callable[[T], str], count: int) -> list[T]:
    """Return hosts in order, but the first `count` of them on machines of their own where possible.

    A host whose machine is not known, "", has one of its own.
    """
    chosen: list[T] = []
    taken: set[str] = set()
    for host in hosts:
        if len(chosen) < count and machine(host) not in taken:
            chosen.append(host)
            taken |= {machine(host)} - {""}
    return [*chosen, *(host for host in hosts if host not in chosen)]


def checked_placement(placement: object, servers: int | None) -> ConsistentHash | None:
    """Return what says which server holds which shard; None: they are spread evenly.

    Raises
    ------
    ConfigurationError
        It is no placement, or shards are not shared out over a number of servers.
    """
    if isinstance(placement, Balanced) or (isinstance(placement, str) and placement == BALANCED):
        return None
    by_name = isinstance(placement, str) and placement == CONSISTENT_HASH
    chosen = ConsistentHash() if by_name else placement
    if not isinstance(chosen, ConsistentHash):
        raise ranges.refused(
            "placement",
            placement,
            f"{BALANCED!r}, {CONSISTENT_HASH!r} or ConsistentHash(virtual_nodes=...)",
        )
    if servers is None:
        raise ConfigurationError(
            "consistent hashing needs servers=..., over how many nodes the shards are shared out; "
            "without it each replica of each shard has a node of its own"
        )
    return chosen


def place(weights: Mapping[str, int], shards: int) -> dict[str, int]:
    """Return the shard of each block.

    Parameters
    ----------
    weights
        Block key → bytes.
    shards
        Number of shards, at least 1.

    The result depends on the keys and weights only, not on their order or on the process.
    """
    mean = sum(weights.values()) / shards
    loads = [0] * shards
    homes: dict[str, int] = {}
    for key, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        empty = [shard for shard in range(shards) if not loads[shard]]
        # What is left may be just enough for every shard to get something.
        open_to = empty if len(weights) - len(homes) <= len(empty) else range(shards)
        ranked = sorted(open_to, key=lambda shard: _score(key, shard), reverse=True)
        fitting = (s for s in ranked if loads[s] + weight <= mean)
        home = next(fitting, min(ranked, key=loads.__getitem__))
        homes[key] = home
        loads[home] += weight
    return homes


def _score(key: str, shard: int) -> bytes:
    return hashlib.blake2b(f"{shard}/{key}".encode(), digest_size=8).digest()
