"""A shard's durability in partial checkpoints (see `dps.recovery.partial_files`).

They are scheduled like others. What a shard goes on from after a loss is put together from several
of them, and how old the oldest of it is becomes known by an event.
"""

from __future__ import annotations

from functools import partial

from dps.errors import ConfigurationError
from dps.events import PartsRestored
from dps.recovery.checkpoint_files import CheckpointFiles, Found
from dps.recovery.checkpoint_schedule import Checkpoints, CheckpointSettings
from dps.recovery.durability import ServerContext
from dps.recovery.partial_files import PartialFiles


class PartialCheckpoints(Checkpoints):
    """A shard's durability in files of which each holds a `share` of it.

    Parameters
    ----------
    wanted
        What is promised of the parts, as of whole checkpoints; it keeps so many times all units.
    """

    def __init__(self, wanted: CheckpointSettings, share: float, context: ServerContext) -> None:
        self._share = share
        super().__init__(wanted, context)

    def _files_in(self, path: str, context: ServerContext) -> CheckpointFiles:
        if context.layout is None:
            raise ConfigurationError("partial_checkpoint: it was not told of the shard's layout")
        keep = self._wanted.keep
        return PartialFiles(path, context.shard, keep, self._share, context.layout)

    async def _tell_of(self, epoch: int, found: Found) -> None:
        behind = await self._in_thread(partial(self._files.behind, found))
        if behind is not None:
            how_old = behind.version, behind.oldest, behind.older, behind.units
            self._emit(PartsRestored(self._clock.now(), self._shard, epoch, *how_old))
