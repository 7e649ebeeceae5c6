"""The checks of layers: acks never wait for the checkpoints below, which are restored from last.

That is when every copy above is lost, and from nothing older than the newest checkpoint that was
complete when the coordinator had the shard restored. At rest, a layer has what is due.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.layered import LayeredPersistence
from dps.protocol.durabilities.shared_store import StorePersistence
from dps.protocol.durability import NoPersistence
from dps.protocol.messages import Restore, View
from dps.protocol.server.shard_server import ShardServer
from dps.sim.patches import Patch, patched
from dps.sim.violation import Violation, require
from dps.sim.world import World

At = tuple[int, int]  # an epoch, and a version


class LayerHistory:
    """The checkpoints of one shard, and the updates in each."""

    def __init__(self) -> None:
        self._cells: dict[At, set[int]] = {}
        self._complete: set[At] = set()
        self._refused: set[str] = set()
        self._there: dict[int, list[At]] = {}  # what was complete when an epoch was to begin

    def accepted(self, epoch: int, version: int, cells: set[int]) -> None:
        """Take note of a state that a replica has; in one epoch each version is one state."""
        self._cells[epoch, version] = cells

    def written(self, epoch: int, version: int) -> None:
        """Take note of a checkpoint that is complete."""
        self._complete.add((epoch, version))

    def asked(self, epoch: int) -> bool:
        """The shard is to be restored from a checkpoint, to be served in this epoch.

        False: that was asked before. The request has arrived again, perhaps after it was served.
        """
        first = epoch not in self._there
        if first:
            self._there[epoch] = sorted(self._complete)
        return first

    def refused(self, path: str) -> None:
        """Take note of a checkpoint that is damaged; it may be refused more than once."""
        self._refused.add(posixpath.basename(path))

    def kept(self, epoch: int) -> set[int]:
        """The updates that a state has at least that was restored for an epoch."""
        # Of each epoch the newest checkpoints are those that were damaged.
        damaged = Counter(int(name[1 : name.index("-")]) for name in self._refused)
        there = list(self._there.get(epoch, []))
        while there and damaged[there[-1][0]]:
            damaged[there.pop()[0]] -= 1
        if not there:
            return set()
        of_epoch, version = there[-1]
        # It may hold a state of an epoch before, in which nothing was applied since.
        of = max((e for e, v in self._cells if v == version and e <= of_epoch), default=None)
        return set() if of is None else self._cells[of, version]


def layering(
    told: Callable[[ShardServer, Restore], None], report: Callable[[Violation], None]
) -> AbstractContextManager[None]:
    """Have `told` called when a layer is to be restored from, and reported when one delays acks."""
    commit, restore = LayeredPersistence.commit, ShardServer._restore
    kept: dict[Any, float] = {}  # when each task has last had a state kept above

    def noting(right: Any) -> Any:
        async def commit_and_note(self: Any, epoch: int, state: Any) -> None:
            await right(self, epoch, state)
            kept[asyncio.current_task()] = _now()

        return commit_and_note

    async def watched(self: LayeredPersistence, epoch: int, state: Any) -> None:
        task = asyncio.current_task()
        kept.pop(task, None)
        try:
            await commit(self, epoch, state)
        except Exception as error:
            if task in kept:
                text = f"an update that is kept above is not acked: {error}"
                report(Violation("layer stops acks", text))
            raise
        finally:
            late = _now() - kept.pop(task, _now())
            if late > 0:
                text = f"an ack waited for {late:.3f} s after its update was kept above"
                report(Violation("layer delays acks", text))

    async def tell_and_restore(self: ShardServer, m: Restore) -> Any:
        if m.from_below:
            told(self, m)
        return await restore(self, m)

    return patched(
        Patch(NoPersistence, "commit", noting(NoPersistence.commit)),
        Patch(StorePersistence, "commit", noting(StorePersistence.commit)),
        Patch(LayeredPersistence, "commit", watched),
        Patch(ShardServer, "_restore", tell_and_restore),
    )


async def caught_up(world: World, layer: Checkpoint, patience: float) -> None:
    """Wait until the tail of each shard, which may be moved meanwhile, has written what is due."""

    def unsaved(view: View) -> int:
        tail = world.hosts[view.chain[-1].address]._replicas.get(view.shard) if view.chain else None
        return due if tail is None else tail.state.version - tail._persistence.saved

    def behind() -> list[int]:
        return [view.shard for view in world.table.views if unsaved(view) >= due]

    every = layer.at_risk or 1
    due = every if layer.seconds is None else 1

    until = _now() + patience
    while behind():
        text = f"shards {behind()}: what is due is not in a checkpoint after {patience:g} s"
        require(_now() < until, "layer not caught up", text)
        await asyncio.sleep(0.1)


def _now() -> float:
    return asyncio.get_running_loop().time()
