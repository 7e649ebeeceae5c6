"""The placement of blocks on shards: rendezvous hashing with bounded load.

Plain rendezvous hashing leaves shards uneven when there are few blocks. Here each block goes to
the shard that ranks highest for it among those that it still fits under the mean load, and where
there is none to the least loaded one. If no block is larger than a tenth of the mean load, every
shard ends within 10% of it: a shard below 90% would have had room for every block, so none would
have gone above the mean; and a shard that takes a block above the mean was below it before. No
shard stays empty while there are blocks enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


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
