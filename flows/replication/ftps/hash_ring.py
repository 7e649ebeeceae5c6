"""How evenly keys fall on servers: by the consistent hashing of Pampari and Patel, and by dps.

Consistent hashing puts every server on a ring at as many points as it has virtual nodes; a key
belongs to the server whose point comes next. dps cuts arrays into blocks and places these
(`dps.core.placement`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dps.core.blocks import Layout


@dataclass(frozen=True)
class HashRing:
    """Servers on a ring. It is never changed; without a server it is another ring."""

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


def hashes(names: Sequence[str]) -> np.ndarray:
    """Return where each name falls on the ring."""
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.array([int.from_bytes(digest, "big") for digest in digests], np.uint64)


def ring_balance(keys: np.ndarray, servers: Sequence[str], virtual_nodes: int) -> float:
    """Return the largest load of a server over the mean, in keys."""
    loads = np.bincount(HashRing.of(servers, virtual_nodes).owner(keys), minlength=len(servers))
    return float(loads.max() / loads.mean())


def dps_balance(name: str, parameters: int, servers: int) -> float:
    """Return the largest load of a shard over the mean, in bytes, as dps places one array."""
    layout = Layout.of({name: np.zeros(parameters, np.float32)}, servers)
    loads = [shard.nbytes for shard in layout.shards]
    return max(loads) / (sum(loads) / len(loads))


@dataclass(frozen=True, slots=True)
class Move:
    """What the loss of a server moves: its keys, and others, which a ring should leave alone."""

    own: int
    others: int
    keys: int


def lose_first(keys: np.ndarray, servers: Sequence[str], virtual_nodes: int) -> Move:
    """Return how many keys have another server once the first one is gone."""
    before = HashRing.of(servers, virtual_nodes).owner(keys)
    after = HashRing.of(servers[1:], virtual_nodes).owner(keys) + 1
    moved = before != after
    own = int(np.count_nonzero(moved & (before == 0)))
    return Move(own, int(np.count_nonzero(moved)) - own, len(keys))
