"""Owns the percentile that every table uses: nearest rank, always a value that occurred."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_rank(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
