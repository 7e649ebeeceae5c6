"""One setting of the C library: memory that arrays free is kept for the next array.

By default large arrays are mapped and unmapped one by one, and the page faults of that cost more
than moving the bytes. glibc takes the setting at run time, so it works on any cluster.
"""

from __future__ import annotations

import ctypes
import sys

from dps.cluster.platform import SYSTEM, Platform

# From glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

KEEP_BYTES = 1 << 30
PAD_BYTES = 64 << 20


def keep_memory(platform: Platform = SYSTEM) -> bool:
    """Have freed memory kept by this process; return whether the C library knows how.

    A process in which nodes are simulated is somebody else's, and stays as it is.
    """
    if platform is not SYSTEM or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    settings = (
        (M_MMAP_THRESHOLD, KEEP_BYTES),
        (M_TRIM_THRESHOLD, KEEP_BYTES),
        (M_TOP_PAD, PAD_BYTES),
        # The arenas of other threads cannot hold large arrays and would map them after all.
        (M_ARENA_MAX, 1),
    )
    taken = [libc.mallopt(name, value) for name, value in settings]  # each, whatever came of others
    return all(taken)
