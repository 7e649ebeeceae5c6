"""The checks of checkpoints: their age, what is restored in parts, and layers below others.

- Promised in seconds: what is lost with a server was committed within that time; and as long as the
  disk is well and no process stands still, within that time before the loss.
- In parts: a restored state never existed as a whole, but the numbers and the dedupe table in it
  did, and so did each of its units. The former tell which updates it holds; no unit may be older
  than the parts allow.
- Layers: acks never wait for checkpoints below, from which a shard is restored when every copy
  above is lost, and from nothing older than the newest one that was complete when the coordinator
  had it restored. At rest, a layer has what is due.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.shard import ShardState
from dps.protocol.messages import Restore, View
from dps.protocol.server.shard_server import ShardServer
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.checkpoint_files import Unit
from dps.recovery.durability import Persistence
from dps.recovery.layered import LayeredPersistence
from dps.recovery.partial import PartialCheckpoint, parts_until_all, units_of
from dps.recovery.shared_store import StorePersistence
from tests.simulator.network import Process, Violation
from tests.simulator.patches import Patch, before, require
from tests.simulator.world import World

SLOWEST_CLOCK = 0.95  # the promise is kept by the server's own clock
MARGIN = 0.01


class Committed:
    """When each version of a shard was committed first, as far as it may still be lost.

    Times are those of the servers' own clocks, which may stand still.
    """

    def __init__(self, seconds: float, work: float) -> None:
        self._seconds = seconds
        # A write that is due may have to wait for one that is under way.
        self._saved_within = max(seconds, seconds / 2 + 2 * work)
        self._at: list[tuple[int, float]] = []
        self._server: tuple[Process, float] | None = None  # and how long it had stood still
        self._stood = 0.0

    def note(self, version: int, server: Process) -> None:
        """Take note of a version that a server has committed."""
        if self._server is not None and self._server[0] is server:
            self._stood += server.stood - self._server[1]
        self._server = server, server.stood
        if not self._at or version > self._at[-1][0]:
            self._at.append((version, now() - self._stood))

    def restored(self, what: str, version: int, whole: bool, lost_at: float | None) -> None:
        """A state was restored; `lost_at` says when the last server ended, if that is to count.

        If the newest checkpoint was not `whole`, that is not what the promise is about.
        """
        lost = [at for committed, at in self._at if committed > version]
        self._at = []
        if not lost or not whole:
            return
        span = lost[-1] - lost[0]
        text = f"{what}: updates of {span:.3f} s are lost, {self._seconds:g} s are promised"
        require(span <= self._seconds / SLOWEST_CLOCK + MARGIN, "lost", text)
        if lost_at is not None:
            age = lost_at - self._stood - lost[0]
            text = f"{what}: an update was committed {age:.3f} s before, and is not saved"
            require(age <= self._saved_within / SLOWEST_CLOCK + MARGIN, "lost", text)


def now() -> float:
    """The time in the simulation."""
    return asyncio.get_running_loop().time()


# -- shards that are restored in parts -------------------------------------------------------------


class PartsHistory:
    """Every state that one shard has had, unit by unit.

    Parameters
    ----------
    under_way
        Returns how many updates may be under way when a part is written.
    """

    def __init__(
        self, layout: ShardLayout, wanted: PartialCheckpoint, under_way: Callable[[], int]
    ) -> None:
        self._layout = layout
        self._parts = parts_until_all(wanted.share)
        self._apart = wanted.at_risk
        self._under_way = under_way
        self._versions: dict[tuple[str, int], int] = {}  # of each unit, the last that it is of
        self._cells: dict[int, frozenset[int]] = {}  # what is in a state, by its numbers

    def accepted(self, before: ShardState, state: ShardState, fresh: set[int]) -> None:
        """Take note of a state, and of the cells that its last step has changed."""
        self._cells[numbers(state)] = frozenset(self.cells(before) | fresh)
        self._note(state)

    def cells(self, state: ShardState) -> set[int]:
        """The updates that are in a state, though perhaps not in all of its units."""
        return set(self._cells.get(numbers(state), ()))

    def restored(self, what: str, state: ShardState) -> None:
        """Check a state that was put together, whose numbers are those of one that existed."""
        behind = (self._parts - 1) * (self._apart + self._under_way())
        for name, unit in units_of(self._layout, state).items():
            version = self._versions.get((name, _digest(unit)), None if state.version else 0)
            if version is None:
                require(False, "never existed", f"{what}: {name} as it is there never existed")
                return
            text = f"{what}: {name} is of version {version}, and all of version {state.version}"
            require(state.version - version <= behind, "parts too old", text)
        self._note(state)

    def _note(self, state: ShardState) -> None:
        for name, unit in units_of(self._layout, state).items():
            place = name, _digest(unit)
            self._versions[place] = max(state.version, self._versions.get(place, 0))


def numbers(state: ShardState) -> int:
    """What tells two states of a shard apart, without their weights."""
    workers = frozenset(state.workers.items())
    return hash((state.index, state.version, state.steps, workers))


def changed(before: np.ndarray, after: np.ndarray) -> set[int]:
    """The cells that a step has changed, of the counter and cells before and after it."""
    return set((after[1:] != before[1:]).nonzero()[0].tolist())


def _digest(unit: Unit) -> int:
    return hash(tuple((name, array.tobytes()) for name, array in sorted(unit.items())))


# -- layers ----------------------------------------------------------------------------------------


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
) -> list[Patch]:
    """Have `told` called when a layer is to be restored from, and reported when one delays acks."""
    commit = LayeredPersistence.commit
    kept: dict[Any, float] = {}  # when each task has last had a state kept above

    def noting(right: Any) -> Any:
        async def commit_and_note(self: Any, epoch: int, state: Any) -> None:
            await right(self, epoch, state)
            kept[asyncio.current_task()] = now()

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
            late = now() - kept.pop(task, now())
            if late > 0:
                text = f"an ack waited for {late:.3f} s after its update was kept above"
                report(Violation("layer delays acks", text))

    return [
        Patch(Persistence, "commit", noting(Persistence.commit)),
        Patch(StorePersistence, "commit", noting(StorePersistence.commit)),
        Patch(LayeredPersistence, "commit", watched),
        before(ShardServer, "_restore", lambda self, m: told(self, m) if m.from_below else None),
    ]


async def caught_up(world: World, layer: Checkpoint, patience: float) -> None:
    """Wait until the tail of each shard, which may be moved meanwhile, has written what is due."""

    def unsaved(view: View) -> int:
        tail = world.hosts[view.chain[-1].address]._replicas.get(view.shard) if view.chain else None
        return due if tail is None else tail.state.version - tail.persistence.saved

    def behind() -> list[int]:
        return [view.shard for view in world.table.views if unsaved(view) >= due]

    every = layer.at_risk or 1
    due = every if layer.seconds is None else 1

    until = now() + patience
    while behind():
        text = f"shards {behind()}: what is due is not in a checkpoint after {patience:g} s"
        require(now() < until, "layer not caught up", text)
        await asyncio.sleep(0.1)
