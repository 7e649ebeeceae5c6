"""Key caching: a list of indices that the shard's node has had before is sent by its digest.

The lists are soft state of both ends. A node that does not have the one that is meant says so, and
the operation is sent again with it, under the same number. What goes further, down a chain or to a
mailbox, always carries its lists.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

Array = np.ndarray

WORTH = 64  # bytes: a shorter list is sent as it is


def is_cached(keys: Array) -> bool:
    """Whether a list is long enough to be sent by its digest."""
    return keys.nbytes >= WORTH


def digest_of(keys: Array) -> str:
    """What a list is called by those who have it."""
    return blake2b(keys.data, digest_size=16).hexdigest()
