"""Broken variants of layers: acks that wait for one, and fallbacks too early or too far back.

Like `dps.sim.broken.protocol`: each says what it leaves out in its docstring.
"""

from __future__ import annotations

from typing import Any

from dps.core.shard import ShardState
from dps.errors import StoreUnavailable
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.durabilities.layered import Layered, LayeredPersistence
from dps.protocol.messages import Brought, View
from dps.protocol.storage.background_checkpoints import BackgroundCheckpoints
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.protocol.transport import Endpoint
from dps.sim.broken.variant import instead_of, layered, layered_chains, layered_stores


@instead_of(LayeredPersistence, "commit", "layer delays acks", layered)
async def _commit_to_both(self: LayeredPersistence, epoch: int, state: ShardState) -> None:
    """Promise of the layer what is promised of checkpoints, and wait for it."""
    await self._above.commit(epoch, state)
    await self._below.commit(epoch, state)


@instead_of(LayeredPersistence, "commit", "layer stops acks", layered)
async def _commit_if_written(self: LayeredPersistence, epoch: int, state: ShardState) -> None:
    """Acknowledge nothing more when a checkpoint could not be written."""
    await self._above.commit(epoch, state)
    self._below.note(epoch, state)
    if self._below._failure:
        raise StoreUnavailable(self._below._failure)


@instead_of(LayeredPersistence, "begin", "layer empty until a write is due", layered)
async def _begin_above(self: LayeredPersistence, epoch: int, state: ShardState) -> None:
    """Serve a shard before there is any checkpoint of it."""
    self._below.note(epoch, state)
    await self._above.begin(epoch, state)


@instead_of(BackgroundCheckpoints, "restore", "older checkpoint of the layer restored", layered)
async def _restore_an_older(self: BackgroundCheckpoints, *args: Any) -> ShardState:
    """Go back to the checkpoint before the newest, if there are two."""
    files: Any = self._files
    files.found = lambda: CheckpointFiles.found(files)[-1:]
    try:
        return await _restore(self, *args)
    finally:
        del files.found


@instead_of(BackgroundCheckpoints, "note", "layer written once", layered)
def _note_nothing(self: BackgroundCheckpoints, epoch: int, state: ShardState) -> None:
    """Write the state with which a shard begins, and none after it."""


@instead_of(LayeredPersistence, "enter", "layer left to the old tail", layered)
def _enter_and_wait(self: LayeredPersistence, epoch: int, state: ShardState | None) -> None:
    """Begin as the tail with what comes, whatever the one before has not written."""
    if state is None:
        _enter(self, epoch, state)


@instead_of(Layered, "is_last_copy", "layer restored while a replica is silent", layered_chains)
def _no_last_copy(self: Layered, alone: bool, tried: bool, restorable: bool) -> bool:
    """Give the last replica up as soon as its lease is over, since there are checkpoints."""
    return False


@instead_of(Layered, "is_restorable", "layer restored although the store lives", layered_stores)
def _never_restorable(self: Layered, stored: Any, store: Any) -> bool:
    """Take the checkpoint, which is older, whatever the store has."""
    return False


@instead_of(ShardController, "_bring_back", "layer forgotten", layered)
async def _begin_anew(self: ShardController, view: View, host: Endpoint) -> Brought:
    """Start a shard anew when every copy above is lost."""
    above = self._is_kept or host in self._tried
    return await (_bring_back if above else _install)(self, view, host)


_restore, _enter = BackgroundCheckpoints.restore, LayeredPersistence.enter
_bring_back, _install = ShardController._bring_back, ShardController._install
