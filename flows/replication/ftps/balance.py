"""How evenly keys fall on servers: by the consistent hashing of Pampari and Patel, and by dps.

Their servers share single keys on a ring (`dps.core.placement.hash_ring`). dps cuts arrays into
blocks and places these on shards (`dps.core.placement.of_blocks`); a ring may share out these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dps.core.blocks import Layout
from dps.core.placement.hash_ring import HashRing


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
