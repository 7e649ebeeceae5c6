"""Owns key caching: a list of indices that the shard's node has had before is sent by its digest.

The lists are soft state of both ends. A node that does not have the one that is meant says so, and
the operation is sent again with it, under the same number. What goes further, down a chain or to a
mailbox, always carries its lists.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

Array = np.ndarray

WORTH = 64  # bytes: a shorter list is sent as it is


def _digest(keys: Array) -> str:
    return blake2b(keys.data, digest_size=16).hexdigest()
