"""Partial checkpoints: the parts of a shard that change most are written to files more often.

- Written: in turn, some units of the shard (`dps.recovery.parts`), first those that have changed
  most since they were saved (SCAR: Qiao et al. 2019; CPR: Maeng et al. 2021). Each part is a
  checkpoint like another, on the same schedule; its manifest names, for every unit, the data file
  with the newest copy.
- Restored: from the newest whole part, and the files that it names.
- Promised: at most `every * share` acked updates are lost as a whole; some blocks may lack more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import ClassVar, Literal

import numpy as np
from safetensors.numpy import save

from dps.core import ranges
from dps.core.arguments import path_field
from dps.core.blocks import ShardLayout
from dps.core.shard import ShardState
from dps.errors import StoreUnavailable
from dps.events import PartsRestored
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message
from dps.recovery.checkpoint import CHECKPOINT_EVERY, Checkpoint, CheckpointPersistence
from dps.recovery.checkpoint_files import PARTIAL, CheckpointFiles, Published, name_of, numbers_of
from dps.recovery.durability import Durability, Feature, Persistence, ServerContext
from dps.recovery.files import contents
from dps.recovery.parts import Unit, distance, nbytes_of, numbered_tables, units_of

_REFUSALS: dict[Feature, str] = {
    "functions": (
        "functions do not go with partial_checkpoint: after a loss some blocks would have what a "
        "call has changed, and others not; use checkpoint, chain or shared_store"
    )
}


@message
@dataclass(frozen=True, slots=True)
class PartialCheckpoint(Durability):
    """Parts of a shard's state are written to files in turn, what has changed most the most often.

    A lost shard is put together from the newest copy of each block, or page of rows. The copies are
    of different versions, so some blocks may lack an acked update that others have; it is never
    applied again, to any.

    Parameters
    ----------
    every
        The number of updates in which as many bytes are written as the shard has.
    share
        The fraction of the shard's bytes that a checkpoint holds: one is written every
        `every * share` updates, and no more acked updates than that are ever at risk of being lost
        as a whole. Half of it is what differs most from its saved copy, the other half what was
        saved the longest ago, so each block is written once in 2 / share checkpoints.
    mode
        "sync": acks wait for every write that is due; "async" as for `Checkpoint`.
    path
        Any fsspec path that all server nodes can reach. None: a folder of the run's own.
    keep
        How often all blocks are kept, besides what those need.
    """

    every: int = CHECKPOINT_EVERY
    share: float = 0.25
    mode: Literal["sync", "async"] = "async"
    path: str | None = None
    keep: int = 1
    writes_checkpoints: ClassVar[bool] = True
    restores_in_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.count(self, "every", 1, "updates")
        ranges.share(self, "share")
        ranges.count(self, "keep", 1, "checkpoints")
        ranges.choice(self, "mode", "sync", "async")
        path_field(self, "path")

    @property
    def at_risk(self) -> int:
        """How many acked updates are ever at risk of being lost as a whole."""
        return max(1, round(self.every * self.share))

    def refusal(self, feature: Feature) -> str | None:
        """Why it does not go with functions, whose calls take effect on all blocks or none."""
        return _REFUSALS.get(feature)

    def at(self, path: str) -> PartialCheckpoint:
        """Return the same choice with its files below another path."""
        return replace(self, path=path)

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Return True: all blocks are written before a shard is served."""
        return True

    def persistence(self, context: ServerContext) -> Persistence:
        """Return what writes one shard's partial checkpoints."""
        return PartialPersistence(self, context)


class PartialPersistence(CheckpointPersistence):
    """Writes one shard's partial checkpoints, as whole ones with the promise of `at_risk`."""

    def __init__(self, wanted: PartialCheckpoint, context: ServerContext) -> None:
        self._share = wanted.share
        promise = Checkpoint(wanted.at_risk, wanted.mode, wanted.path, wanted.keep)
        super().__init__(promise, context)

    def _files_in(self, path: str, context: ServerContext) -> CheckpointFiles:
        keep = self._wanted.keep
        return PartialFiles(path, context.shard, keep, self._share, context.layout)

    async def _note_restored(self, epoch: int, checkpoint: Published) -> None:
        assert isinstance(self._files, PartialFiles)
        version, versions = await self._in_thread(partial(self._files.versions, checkpoint))
        if not versions:
            return  # a whole checkpoint
        older = sum(of_unit < version for of_unit in versions)
        known = version, min(versions), older, len(versions)
        self._emit(PartsRestored(self._clock.now(), self._shard, epoch, *known))


@dataclass(frozen=True, slots=True)
class _Copy:
    """The newest saved copy of a unit: its file, the part's number and version, and its weights."""

    file: str
    sha256: str
    number: int
    version: int
    weights: Unit


class PartialFiles(CheckpointFiles):
    """The partial checkpoints of one shard below a path. One write at a time; others wait for it.

    The first part of an epoch holds all units, so that none is from an earlier server's.

    Parameters
    ----------
    keep
        How many times all units are kept.
    share
        The fraction of the shard's bytes that a checkpoint holds.
    """

    def __init__(self, path: str, shard: int, keep: int, share: float, layout: ShardLayout) -> None:
        # A part needs those that were written since each unit was, and the oldest kept does too.
        super().__init__(path, shard, (keep + 1) * parts_until_all(share) + 1)
        self._share = share
        self._layout = layout
        self._copies: dict[str, _Copy] = {}
        self._epoch = 0
        self._number = 0
        self._lock = Lock()

    def write(self, epoch: int, state: ShardState, cut: int | None = None) -> int:
        """Publish a part; see `CheckpointFiles.write`."""
        with self._lock:
            units = units_of(self._layout, state)
            copies = self._copies if epoch == self._epoch else {}
            chosen = self._chosen(units, copies)
            arrays = {f"{at}/{name}": a for at in chosen for name, a in units[at].items()}
            arrays |= {f"result/{caller}": packed for caller, packed in state.results.items()}
            data = save(arrays)
            digest = hashlib.sha256(data).hexdigest()
            name, number = name_of(epoch, state.index), self._number + 1
            # By what is in it: a part of the same state may hold other units, and be named already.
            file = f"{name}-{digest[:8]}.safetensors"
            copies = copies | {
                at: _Copy(file, digest, number, state.version, _weights(units[at])) for at in chosen
            }
            manifest = {
                "format": PARTIAL,
                "file": file,
                **numbers_of(epoch, state),
                "size": state.values.nbytes,
                "slots": list(state.slots),
                "tables": numbered_tables(self._layout, state),
                "units": {at: copy.file for at, copy in copies.items()},
                "versions": {at: copy.version for at, copy in copies.items()},
                "sources": {copy.file: copy.sha256 for copy in copies.values()},
            }
            nbytes = self._put(epoch, name, data, manifest)
            self._copies, self._epoch, self._number = copies, epoch, number
            return nbytes

    def versions(self, checkpoint: Published) -> tuple[int, list[int]]:
        """Return the version of a part, and those of the units that its state is made of.

        Raises
        ------
        StoreUnavailable
            It is not there any more.
        """
        try:
            manifest = json.loads(contents(self._fs, checkpoint.manifest))
        except Exception as error:
            raise StoreUnavailable(f"{checkpoint.manifest}: {error}") from error
        units = manifest["versions"].values() if manifest["format"] == PARTIAL else ()
        return manifest["version"], list(units)

    def _chosen(self, units: dict[str, Unit], copies: dict[str, _Copy]) -> list[str]:
        known = [copies.get(at) for at in units]
        pairs = list(zip(units.values(), known, strict=True))
        chosen = choose(
            np.array([nbytes_of(unit) for unit in units.values()]),
            np.array([NEVER if copy is None else copy.number for copy in known]),
            np.array([0.0 if copy is None else distance(u, copy.weights) for u, copy in pairs]),
            self._share,
        )
        names = list(units)
        return [names[unit] for unit in chosen]


def _weights(unit: Unit) -> Unit:
    """A copy of a unit's weights, without which the whole state would stay in memory."""
    return {name: unit[name].copy() for name in ("keys", "values") if name in unit}


NEVER = -1  # the number of the last part with a unit, if no part holds it


def parts_until_all(share: float) -> int:
    """Return the number of successive parts in which every unit is written at least once."""
    return math.ceil(2 / share)


def choose(
    nbytes: np.ndarray, saved_in: np.ndarray, distances: np.ndarray, share: float
) -> np.ndarray:
    """Return the units that the next part is to hold, as sorted indices.

    Half of them are those that changed most per byte, the other half those that were saved the
    longest ago, so that no unit is left out for ever.

    Parameters
    ----------
    nbytes
        (units,), the size of each, more than 0.
    saved_in
        (units,), the number of the last part that holds it, or `NEVER`: these are always written,
        besides the share.
    distances
        (units,), the squared Euclidean distance of its weights from their saved copies.
    share
        About the fraction of all bytes that is to be written, from 0 to 1.
    """
    taken = saved_in == NEVER
    budget = share * float(nbytes.sum())
    written = _take(taken, np.argsort(saved_in, kind="stable"), nbytes, 0.0, budget / 2)
    by_use = np.argsort(-distances / nbytes, kind="stable")
    _take(taken, by_use[distances[by_use] > 0], nbytes, written, budget)
    return np.flatnonzero(taken)


def _take(
    taken: np.ndarray, order: np.ndarray, nbytes: np.ndarray, written: float, budget: float
) -> float:
    """Mark units as taken, in order, until `budget` bytes are; return how many are then."""
    for unit in order[~taken[order]]:
        if written >= budget:
            break
        taken[unit] = True
        written += float(nbytes[unit])
    return written
