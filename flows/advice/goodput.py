"""What failures leave of a training's speed: the renewal-reward estimate, and its closed forms.

Failures come to each node at a constant rate, and one after the other. Between two of them the
training makes progress at its steady rate r. Each sets it back by D seconds: what was not computed
while it was held up, and what must be computed again. By the renewal-reward theorem the progress
in the long run is that of one cycle over the length of one cycle: r·(1/λ) / (1/λ + D), which is
r / (1 + λD). Where a failure leaves nothing, as without any durability, the training begins again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MOST_RESTARTS = 700.0  # e to this is nearly the largest float


@dataclass(frozen=True, slots=True)
class Setbacks:
    """What failures cost a training under one strategy.

    Attributes
    ----------
    pace
        Steady gradients a second, over those of a training without recovery.
    nodes
        How many nodes of each role there are; each fails once in `mtbf` seconds.
    seconds
        How far the loss of a node of this role sets the training back, in seconds, beyond what
        `fatal` says.
    fatal, fatal_seconds
        How often nothing is left, for each second, so that the training begins again; and for how
        long nothing can be computed then.
    pair_losses, pair_seconds
        How often both nodes of a pair are lost, for each second, where checkpoints are left of the
        shard; and how far that sets the training back, in seconds.
    """

    pace: float
    nodes: Mapping[str, int]
    seconds: Mapping[str, float]
    fatal: float = 0.0
    fatal_seconds: float = 0.0
    pair_losses: float = 0.0
    pair_seconds: float = 0.0


def lost_share(setbacks: Setbacks, mtbf: float) -> float:
    """Return λD: seconds by which failures set the training back, for each second of progress."""
    single = sum(n * setbacks.seconds[role] for role, n in setbacks.nodes.items()) / mtbf
    return single + setbacks.pair_losses * setbacks.pair_seconds


def goodput(setbacks: Setbacks, mtbf: float, work: float) -> float:
    """Return the share of a training's gradients that is kept.

    Parameters
    ----------
    mtbf
        Mean time between two failures of one node, in seconds.
    work
        How long the training takes without failures and without recovery, in seconds. It matters
        only where the training may have to begin again.

    Returns
    -------
    share
        `work` over the time that the training is expected to take.
    """
    steady = setbacks.pace / (1 + lost_share(setbacks, mtbf))
    if not setbacks.fatal:
        return steady
    return work / until_whole(work / steady, setbacks.fatal, setbacks.fatal_seconds)


def until_whole(work: float, rate: float, down: float) -> float:
    """Return how long it takes to get through `work` seconds without a failure on the way.

    Each failure takes all progress and `down` seconds: (1/rate + down)·(e^(rate·work) - 1), as for
    a piece of work without checkpoints (Daly 2006). Infinity where it is beyond all numbers.
    """
    expected = rate * work
    if expected > MOST_RESTARTS:
        return math.inf
    return (1 / rate + down) * math.expm1(expected)


def twice_within(pairs: int, mtbf: float, seconds: float) -> float:
    """Return how often both nodes of a pair are lost within `seconds`, for each second.

    Parameters
    ----------
    pairs
        How many pairs there are. Either node may be the first.
    mtbf
        Mean time between two failures of one node, in seconds.
    """
    return pairs * 2 / mtbf * -math.expm1(-seconds / mtbf)
