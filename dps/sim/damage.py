"""Which checkpoints may be damaged: something whole has to be left for shards to go back to."""

from __future__ import annotations

import posixpath
from collections.abc import Collection

from dps.errors import CheckpointCorrupt
from dps.protocol.storage.checkpoint_files import CheckpointFiles, Found
from dps.sim.disk import SCHEME

Place = tuple[int, ...]


def may_be_damaged(path: str, shards: int, cuts: Collection[int] | None) -> bool:
    """Whether a group can go on without the checkpoint that a file belongs to.

    The one before it has to be whole: no more than two may be kept. Those of all shards make one,
    if shards go back together; and what there is of later ones has to be whole then, as one of
    these may become complete, and what is before this one be removed.

    Parameters
    ----------
    shards
        How many there are.
    cuts
        Those that shards may go back to together; None: each goes back by itself.
    """
    folder, name = posixpath.split(path)
    group, shard = posixpath.split(folder)
    numbers = tuple(int(part[1:]) for part in name.split(".")[0].split("-"))
    this = numbers[:2] if cuts is None else numbers[2:]
    concerned = [int(shard.removeprefix("shard-"))] if cuts is None else range(shards)
    whole = [_whole(CheckpointFiles(f"{SCHEME}:/{group}", s, 1)) for s in concerned]
    places = {place for of_shard in whole for place in of_shard}
    earlier = [p for p in places if p < this and (cuts is None or p[0] in cuts)]
    later = [of_shard[p] for of_shard in whole for p in of_shard if p > this]
    return bool(earlier) and all(later) and all(s.get(max(earlier), False) for s in whole)


def _whole(files: CheckpointFiles) -> dict[Place, bool]:
    """Whether each checkpoint of a shard is whole, by its cut, or its epoch and index."""
    return {
        (f.epoch, f.index) if f.cut is None else (f.cut,): _is_whole(files, f)
        for f in files.found()
    }


def _is_whole(files: CheckpointFiles, found: Found) -> bool:
    try:
        files.read(found)
    except CheckpointCorrupt:
        return False
    return True
