"""The lower bound of the lost updates after a return."""

from __future__ import annotations

import numpy as np
import pytest

from dps.cluster.supervision.session import _lost
from dps.core.shard import Progress, ShardState


def state(**workers: tuple[int, int, int]) -> ShardState:
    """A shard with updates; `workers` are incarnation, last number and count of updates."""
    known = {name: Progress(*numbers[:2], 0, numbers[2], True) for name, numbers in workers.items()}
    version = sum(progress.applied for progress in known.values())
    return ShardState(version, version, version, np.zeros(0, np.uint8), {}, known)


@pytest.mark.parametrize(
    ("states", "seen", "lost"),
    [
        ([state(a=(1, 7, 7)), state(a=(1, 7, 7))], (), (0, 0)),
        ([state(a=(1, 7, 7)), state(a=(1, 4, 4))], (), (0, 3)),
        ([state(a=(1, 7, 7)), state(a=(1, 4, 4))], (9, 9), (2, 5)),
        # Checkpoints are newer than the last report.
        ([state(a=(1, 7, 7)), state(a=(1, 7, 7))], (5, 6), (0, 0)),
        # Each lacks what the other one has.
        ([state(a=(1, 7, 7), b=(1, 2, 2)), state(a=(1, 5, 5), b=(1, 8, 8))], (), (6, 2)),
        # Gaps of earlier incarnations are no loss of this return.
        ([state(a=(2, 5, 25)), state(a=(2, 5, 18))], (), (0, 0)),
        ([state(a=(2, 5, 25)), state(a=(2, 4, 17))], (), (0, 1)),
        ([state(a=(2, 5, 25)), state(a=(1, 20, 20))], (), (0, 5)),
        ([state(a=(1, 3, 3)), state()], (), (0, 3)),
        # Stale updates that were refused are no updates.
        ([state(a=(1, 9, 7)), state(a=(1, 4, 4))], (), (0, 3)),
        ([], (), ()),
    ],
)
def test_lower_bound_of_lost_updates(
    states: list[ShardState], seen: tuple[int, ...], lost: tuple[int, ...]
) -> None:
    assert _lost(states, seen) == lost
