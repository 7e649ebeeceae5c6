"""Whether the machine was quiet; otherwise times and money are unreliable.

Two measures show it: how much trials without faults differ in pace from seed to seed, and how many
processes wanted a core when a trial began and ended.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from flows.analysis.outcome import Outcome

MOST_SPREAD = 0.1  # coefficient of variation of the pace; on a quiet machine it is 1 to 3%


def spread_of_pace(outcomes: Sequence[Outcome]) -> float | None:
    """Return by how much controls differ in pace from seed to seed: standard deviation over mean.

    That is the root mean square over strategies and conditions without faults; None where none has
    two seeds.
    """
    paces: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for each in outcomes:
        pace = each.row()["gradients_together"]
        if each.valid and not each.faults and pace:
            paces[each.identity.strategy, each.identity.condition].append(pace)
    squares, freedom = 0.0, 0
    for group in paces.values():
        if len(group) > 1:
            squares += (len(group) - 1) * float(np.var(group, ddof=1)) / float(np.mean(group)) ** 2
            freedom += len(group) - 1
    return math.sqrt(squares / freedom) if freedom else None


def unquiet(outcomes: Sequence[Outcome]) -> str:
    """Say why times and money of trials cannot be relied on; "" where the machine was quiet."""
    real = [each for each in outcomes if not each.virtual]
    reasons = []
    spread = spread_of_pace(real)
    if spread is not None and spread > MOST_SPREAD:
        reasons.append(f"the pace of trials without faults varied by {spread:.0%} between seeds")
    if loads := [each.load_average or 0.0 for each in real if each.overloaded]:
        reasons.append(f"the load average was up to {max(loads):.0f} in {len(loads)} trials")
    if not reasons:
        return ""
    return (
        f"The machine was not quiet: {', and '.join(reasons)}. Do not rely on times and money; run "
        "the trials again when nothing else runs"
    )
