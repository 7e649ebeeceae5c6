"""Which units of a shard to write, where a checkpoint holds a part of it only.

A unit is a block of weights, or some rows of a table, each with its optimizer state. What has
changed the most since it was saved comes first (SCAR: Qiao et al. 2019; CPR: Maeng et al. 2021).
Half of a part is for what was saved the longest ago, so that no unit is left out for ever.
"""

from __future__ import annotations

import math

import numpy as np

NEVER = -1  # the number of the part that holds a unit which no part has held


def parts_until_all(share: float) -> int:
    """Return in how many parts after another every unit is written at least once."""
    return math.ceil(2 / share)


def choose(
    nbytes: np.ndarray, saved_in: np.ndarray, distances: np.ndarray, share: float
) -> np.ndarray:
    """Return the units that the next part is to hold, as sorted indices.

    Parameters
    ----------
    nbytes
        (units,), the size of each, more than 0.
    saved_in
        (units,), the number of the last part that holds it, or `NEVER`: these are always written,
        besides the share.
    distances
        (units,), the squared Euclidean distance of its weights from their saved copies.
    share
        Which part of all bytes is to be written, about; from 0 to 1.
    """
    taken = saved_in == NEVER
    budget = share * float(nbytes.sum())
    written = _take(taken, np.argsort(saved_in, kind="stable"), nbytes, 0.0, budget / 2)
    by_use = np.argsort(-distances / nbytes, kind="stable")
    _take(taken, by_use[distances[by_use] > 0], nbytes, written, budget)
    return np.flatnonzero(taken)


def _take(
    taken: np.ndarray, order: np.ndarray, nbytes: np.ndarray, written: float, budget: float
) -> float:
    """Mark units as taken, in order, until so many bytes are; return how many are then."""
    for unit in order[~taken[order]]:
        if written >= budget:
            break
        taken[unit] = True
        written += float(nbytes[unit])
    return written
