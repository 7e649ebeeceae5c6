"""The phases that a fault may wait for, as they are seen from outside while they last.

A checkpoint is being written while a part of it is on disk that is newer than the newest whole one.
A shard is being restored while the routing table says that nobody serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dps.core.faults.plan import Phase
from dps.protocol.messages import Table
from dps.protocol.storage.checkpoint_files import CheckpointFiles

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer


@dataclass(frozen=True, slots=True)
class Sight:
    """A phase of a shard that was seen; `mark` tells it from others of this shard."""

    phase: Phase
    shard: int
    mark: str
    evidence: str


class Phases:
    """Sees phases. Used by one thread."""

    def __init__(self, ps: ParameterServer) -> None:
        self._ps = ps
        self._files: list[CheckpointFiles] = []
        durability = ps.group.recovery.durability
        if durability.path is not None:
            path = f"{durability.path.rstrip('/')}/{ps.group.name}"
            shards = range(len(ps.group.layout.shards))
            self._files = [CheckpointFiles(path, shard, durability.keep) for shard in shards]
        self._spent: set[Sight] = set()

    def writing(self) -> list[Sight]:
        """The checkpoints that are being written now, but for what is spent."""
        sights = (
            Sight("checkpoint", shard, name, f"shard {shard}: a part of {name} was on disk")
            for shard, files in enumerate(self._files)
            for name in files.in_writing()
        )
        return [sight for sight in sights if sight not in self._spent]

    def lasts(self, sight: Sight) -> bool:
        """Whether what was seen can still be seen."""
        if sight.phase == "checkpoint":
            return sight in self.writing()
        return sight in recovering(self._ps.table())

    def spend(self, sight: Sight) -> None:
        """Take note that what was seen goes on no more, though it may still be seen."""
        self._spent.add(sight)


def recovering(table: Table) -> list[Sight]:
    """The shards that nobody serves, by a routing table."""
    return [
        Sight(
            "recovery",
            view.shard,
            f"epoch {view.epoch}",
            f"shard {view.shard}: nobody served it in epoch {view.epoch}",
        )
        for view in table.views
        if not view.serving
    ]
