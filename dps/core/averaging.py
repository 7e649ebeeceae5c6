"""A function on the server for arrays that no update rule changes, such as running statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dps.core.functions import Changed, Part

AVERAGE = "dps.average"


def average(
    arrays: Mapping[str, Part], mine: Mapping[str, np.ndarray], share: float, reply: bool = True
) -> Changed:
    """Move what a shard holds of arrays towards a caller's values.

    Parameters
    ----------
    mine
        Name → the caller's values, of the array's shape and dtype.
    share
        Of the caller's values in the new ones; 1: they take the place of the old.
    reply
        Whether the caller is told of the new values.

    Returns
    -------
    changed
        With the result: name → [spans, new values], as in `Part`.
    """
    new: dict[str, np.ndarray] = {}
    told: dict[str, Any] = {}
    for name in sorted(mine.keys() & arrays.keys()):
        part, flat = arrays[name], mine[name].reshape(-1)
        theirs = np.concatenate([flat[start:stop] for start, stop in part.spans])
        weight = part.values.dtype.type(share)
        new[name] = (1 - weight) * part.values + weight * theirs if share < 1 else theirs
        told[name] = [[list(span) for span in part.spans], new[name]]
    return Changed(new, told if reply else None)
