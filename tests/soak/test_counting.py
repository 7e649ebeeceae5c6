"""The counter workload: it notices whatever a shard must not be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.shard import Progress, ShardState
from tests.soak.counting import (
    DTYPE,
    Notes,
    Violation,
    cells_of,
    check_counts,
    check_shard,
    parameters,
    read_notes,
)


def state(*cells: int, of: int = 10) -> ShardState:
    """A shard that holds the updates of these cells, all of one worker."""
    values = np.zeros(1 + of, DTYPE)
    for cell in cells:
        values[[0, 1 + cell]] += 1
    n = len(cells)
    workers = {"w": Progress(1, n, n, n, active=True)}
    return ShardState(n, n, n, values.view(np.uint8), {}, workers)


def test_every_shard_has_a_counter_and_the_cells() -> None:
    for shards in (1, 2, 3):
        layout = Layout.of(parameters(shards, 1000), shards)
        assert len(layout.shards) == shards
        assert cells_of(layout) >= 1000


def test_a_sound_shard_has_lost_what_is_safe_and_not_there() -> None:
    notes = Notes(pushed={0, 1, 2, 3}, safe={0, 1, 2})
    assert check_shard(0, [state(0, 2, 3), state(0, 2, 3)], notes) == {1}


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([state(0), state(1)], "replica 1 differs"),
        ([state(0), replace(state(0), index=2)], "replica 1 differs"),
        ([state(0), replace(state(0), slots={"m": np.zeros(1)})], "replica 1 differs"),
        ([state(0, 0)], "applied more than once: cells \\[0\\]"),
        ([replace(state(0), version=2)], "version 2, 1 updates by worker, counter 1"),
        ([replace(state(0), workers={})], "version 1, 0 updates by worker"),
        ([state(0, 7)], "nobody pushed \\[7\\]"),
    ],
)
def test_what_must_not_be_is_noticed(states: list[ShardState], told: str) -> None:
    with pytest.raises(Violation, match=told):
        check_shard(0, states, Notes(pushed={0, 1}))


def test_a_torn_read_is_noticed() -> None:
    values = state(0, 1).values.copy()
    values.view(DTYPE)[0] = 1
    with pytest.raises(Violation, match="worker-0 read shard 1: the counter is 1, the updates 2"):
        check_counts("worker-0 read shard 1", values)


def test_notes_survive_their_worker(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("push 1\nsafe 1\npush 2\nsaf")
    (tmp_path / "two").write_text("push 7\nsafe 7\n")
    notes = read_notes(tmp_path.iterdir())
    assert (notes.pushed, notes.safe) == ({1, 2, 7}, {1, 7})
