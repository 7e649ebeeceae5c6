"""Damage to checkpoints: it hits the one that a recovery would go on from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dps.core.shard import ShardState
from dps.errors import CheckpointCorrupt
from dps.faults.effects import damage
from dps.recovery.checkpoint_files import CheckpointFiles


def state(index: int) -> ShardState:
    values = np.arange(100, dtype=np.uint8) + index
    return ShardState(index, index, index, values, {}, {})


def broken(folder: Path, shard: int) -> list[int | None]:
    """The cuts of which the shard's checkpoint cannot be read."""
    files, found = CheckpointFiles(str(folder), shard, keep=1), []
    for each in files.published():
        try:
            files.read(each)
        except CheckpointCorrupt:
            found.append(each.cut)
    return found


def test_of_cuts_it_hits_the_newest_that_all_shards_have_written(tmp_path: Path) -> None:
    shards = [CheckpointFiles(str(tmp_path), shard, keep=3) for shard in range(2)]
    for cut in (0, 1):
        for files in shards:
            files.write(1, state(10 * cut), cut)
    shards[0].write(1, state(20), 2)  # a cut that is being taken, or came to nothing
    seen = damage(str(tmp_path), 0, together=range(2))
    assert seen.effective
    assert "c000001" in seen.evidence
    assert (broken(tmp_path, 0), broken(tmp_path, 1)) == ([1], [])


def test_of_a_shard_by_itself_it_hits_the_newest(tmp_path: Path) -> None:
    files = CheckpointFiles(str(tmp_path), 0, keep=2)
    for index in (10, 20):
        files.write(1, state(index))
    assert damage(str(tmp_path), 0).effective
    newest, before = files.published()
    with pytest.raises(CheckpointCorrupt):
        files.read(newest)
    assert files.read(before).index == 10


def test_where_no_cut_is_complete_there_is_nothing_to_damage(tmp_path: Path) -> None:
    CheckpointFiles(str(tmp_path), 0, keep=2).write(1, state(1), 0)
    with pytest.raises(LookupError, match="shard 0 has no complete checkpoint"):
        damage(str(tmp_path), 0, together=range(2))
