"""Which checkpoints the simulator may damage: shards are always left one that is whole."""

from __future__ import annotations

import numpy as np
import pytest

from dps.core.shard import ShardState
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.sim.damage import may_be_damaged
from dps.sim.disk import SimDisk, disk

SHARDS = 2


def write(index: int, cut: int | None, *shards: int) -> None:
    """Have shards write a checkpoint."""
    state = ShardState(index, index, index, np.zeros(64, np.uint8), {}, {})
    for shard in shards:
        CheckpointFiles("simdisk://d/g", shard, 2).write(1, state, cut)


@pytest.fixture
def there() -> SimDisk:
    """A disk with two cuts of all shards."""
    found = disk("d")
    for cut in (1, 2):
        write(cut, cut, 0, 1)
    return found


def going_back_to(there: SimDisk, *cuts: int) -> None:
    there.may_be_damaged = lambda path: may_be_damaged(path, SHARDS, cuts)


@pytest.mark.parametrize("which", [0.2, 0.7])  # its manifest, its data
@pytest.mark.parametrize(("first", "then"), [(0, 0), (0, 1)])
def test_of_two_cuts_only_one_is_damaged(
    there: SimDisk, first: int, then: int, which: float
) -> None:
    going_back_to(there, 1, 2)
    assert there.flip(f"shard-{first}/", which)
    write(3, 3, 0, 1)
    going_back_to(there, 2, 3)
    assert not there.flip(f"shard-{then}/", which)
    write(4, 4, 0, 1)
    going_back_to(there, 3, 4)
    assert there.flip(f"shard-{then}/", which)


def test_a_cut_that_was_never_complete_does_not_count(there: SimDisk) -> None:
    going_back_to(there, 2)
    assert not there.flip("shard-0/", 0.7)


def test_a_damaged_part_of_a_cut_that_is_being_taken_counts(there: SimDisk) -> None:
    """When that is complete, the cut before it may be the only other one that is kept."""
    write(3, 3, 0)
    going_back_to(there, 1, 2)
    assert there.flip("shard-0/", 0.7)
    assert not there.flip("shard-1/", 0.7)


def test_a_write_is_torn_only_after_a_whole_one(there: SimDisk) -> None:
    going_back_to(there, 1, 2)
    assert there.flip("shard-0/", 0.7)
    there.tear("shard-0/")
    write(3, 3, 0, 1)
    going_back_to(there, 2, 3)
    write(4, 4, 0, 1)
    sizes = [len(data) for path, data in sorted(there.files.items()) if _is_data(path)]
    assert [size < max(sizes) for size in sizes] == [False, False, False, True]


def _is_data(path: str) -> bool:
    return "shard-0/" in path and path.endswith(".safetensors")


def test_shards_that_go_back_alone_count_their_own_only() -> None:
    there = disk("d")
    there.may_be_damaged = lambda path: may_be_damaged(path, SHARDS, None)
    write(1, None, 0, 1)
    assert not there.flip("shard-0/", 0.7)
    write(2, None, 0, 1)
    assert there.flip("shard-0/", 0.7)
    assert there.flip("shard-1/", 0.7)
    write(3, None, 0, 1)
    assert not there.flip("shard-0/", 0.7)
    write(4, None, 0, 1)
    assert there.flip("shard-0/", 0.7)
