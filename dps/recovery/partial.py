"""Partial checkpoints: the parts of a shard that change most are written to files more often.

- Written: in turn, some units of the shard, first those that have changed most since they were
  saved (SCAR: Qiao et al. 2019; CPR: Maeng et al. 2021). A unit is a block of the shard's buffer,
  or the rows of a table whose keys hash to one page. Each part is a checkpoint like any other, on
  the same schedule; its manifest names, for every unit, the data file with the newest copy.
  All other state (counters, the dedupe table, the results of calls) goes into every part.
- Restored: from the newest whole part, and the files that it names.
- Promised: at most `every * share` acked updates are lost entirely; some blocks may lack more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np

from dps.core.arguments import Path
from dps.core.blocks import ShardLayout
from dps.core.ranges import Share, whole_from
from dps.core.shard import ShardState
from dps.core.tables.table import mix64
from dps.events import PartsRestored
from dps.protocol.wire import message
from dps.recovery.checkpoint import CHECKPOINT_EVERY, Checkpoint, CheckpointPersistence
from dps.recovery.checkpoint_files import (
    CheckpointFiles,
    Copy,
    Published,
    Unit,
    digest_of,
    manifest_of,
    name_of,
    packed,
    unit_of,
)
from dps.recovery.durability import Durability, Feature, Persistence, ServerContext

_REFUSALS: dict[Feature, str] = {
    "functions": (
        "partial_checkpoint cannot be combined with functions: after a loss, some blocks would "
        "lack the changes of a call; use checkpoint, chain or shared_store"
    )
}


@message
@dataclass(frozen=True, slots=True)
class PartialCheckpoint(Durability):
    """Parts of a shard's state are written to files in turn, those that change most more often.

    A lost shard is assembled from the newest copy of each block, or page of rows. The copies have
    different versions, so some blocks may lack an acked update that others have. That update is
    not applied again.

    Parameters
    ----------
    every
        The number of updates after which the bytes written equal the shard's size.
    share
        The fraction of the shard's bytes that a checkpoint holds. One is written every
        `every * share` updates, and no more acked updates than that are ever at risk of being lost
        entirely. Half of these bytes are blocks that differ most from their saved copies, the
        other half those saved longest ago, so 2 / share checkpoints write each block at least once.
    mode
        "sync": acks wait for every write that is due; "async" as for `Checkpoint`.
    path
        Any fsspec path that all server nodes can reach. None: in `dps run`, a folder of the trial.
    keep
        How many copies of all blocks to keep, in addition to older files that these copies need.

    Examples
    --------
    >>> PartialCheckpoint(every=100, share=0.25).at_risk
    25
    """

    every: Annotated[int, whole_from(1, "updates")] = CHECKPOINT_EVERY
    share: Share = 0.25
    mode: Literal["sync", "async"] = "async"
    path: Path | None = None
    keep: Annotated[int, whole_from(1, "checkpoints")] = 1
    writes_checkpoints = True
    restores_in_parts = True
    refusals = _REFUSALS

    @property
    def at_risk(self) -> int:
        """The largest number of acked updates ever at risk of being lost entirely."""
        return max(1, round(self.every * self.share))

    def persistence(self, context: ServerContext) -> Persistence:
        """Return the writer of one shard's partial checkpoints."""
        return PartialPersistence(self, context)


class PartialPersistence(CheckpointPersistence):
    """Writes one shard's partial checkpoints, with the promise of `at_risk`."""

    def __init__(self, wanted: PartialCheckpoint, context: ServerContext) -> None:
        promise = Checkpoint(wanted.at_risk, wanted.mode, wanted.path, wanted.keep)
        files = partial(PartialFiles, share=wanted.share, layout=context.layout)
        super().__init__(promise, context, files)

    async def _read(self, epoch: int, checkpoint: Published) -> ShardState | None:
        state = await super()._read(epoch, checkpoint)
        if state is not None:
            manifest = await self._in_thread(self._files.manifest, checkpoint)
            versions = manifest["versions"].values()
            older = sum(version < state.version for version in versions)
            known = state.version, min(versions, default=state.version), older, len(versions)
            self._emit(PartsRestored(self._clock.now(), self._shard, epoch, *known))
        return state


@dataclass(frozen=True, slots=True)
class _Saved(Copy):
    """The newest saved copy of a unit, with the number of the part and the unit's weights."""

    number: int
    weights: Unit


class PartialFiles(CheckpointFiles):
    """The partial checkpoints of one shard below a path; one write at a time in each epoch.

    The first part of an epoch holds all units, so that it needs no file of an earlier server. All
    units are kept `keep` times; a checkpoint holds a `share` of the shard's bytes.
    """

    def __init__(self, path: str, shard: int, keep: int, share: float, layout: ShardLayout) -> None:
        # A part, also the oldest kept, needs the earlier parts that hold its units.
        super().__init__(path, shard, (keep + 1) * parts_until_all(share) + 1)
        self._share = share
        self._layout = layout
        # The epoch and number of the last part, and the newest copy of each unit. Set at once: a
        # write of an earlier epoch that hangs may end at any time, in another thread.
        self._last: tuple[int, int, dict[str, _Saved]] = (0, 0, {})

    def write(self, epoch: int, state: ShardState, cut: int | None = None) -> int:
        """Publish a part; see `CheckpointFiles.write`. States of an epoch are written in order."""
        of_epoch, number, saved = self._last
        saved = saved if epoch == of_epoch else {}
        number += 1
        units = units_of(self._layout, state)
        chosen = self._chosen(units, saved)
        data = packed(chosen, state)
        name = name_of(epoch, state.index)
        # Named by content: another part of the same state may hold other units.
        digest = digest_of(data)
        own = Copy(f"{name}-{digest[:8]}.safetensors", digest, state.version)
        copy = partial(_Saved, own.file, own.sha256, own.version, number)
        saved = saved | {at: copy(_weights(unit)) for at, unit in chosen.items()}
        tables = numbered_tables(self._layout, state)
        nbytes = self._put(epoch, name, data, manifest_of(epoch, state, own, saved, tables))
        self._last = epoch, number, saved
        return nbytes

    def _chosen(self, units: dict[str, Unit], saved: dict[str, _Saved]) -> dict[str, Unit]:
        known = [saved.get(at) for at in units]
        pairs = list(zip(units.values(), known, strict=True))
        chosen = choose(
            np.array([sum(array.nbytes for array in unit.values()) for unit in units.values()]),
            np.array([NEVER if copy is None else copy.number for copy in known]),
            np.array([0.0 if copy is None else distance(u, copy.weights) for u, copy in pairs]),
            self._share,
        )
        names = list(units)
        return {names[unit]: units[names[unit]] for unit in chosen}


def _weights(unit: Unit) -> Unit:
    """A copy of a unit's weights: a view would keep the whole state in memory."""
    return {name: unit[name].copy() for name in ("keys", "values") if name in unit}


# -- units -----------------------------------------------------------------------------------------

PAGES = 64  # of the rows of each table on a shard


def units_of(layout: ShardLayout, state: ShardState) -> dict[str, Unit]:
    """Return every unit of a state by its name, which holds its place; blocks are not copied."""
    units = {}
    for piece in layout.pieces:
        slots = {name: piece.view(slot) for name, slot in state.slots.items()}
        units[f"block.{piece.offset}"] = unit_of(piece.view(state.values), slots)
    for number, name in numbered_tables(layout, state):
        if (rows := state.tables[name].compacted()) is None:
            continue
        page_of = mix64(rows.keys.view(np.uint64)) % np.uint64(PAGES)
        for page in np.unique(page_of):
            arrays = unit_of(rows.values, rows.slots, rows.keys).items()
            units[f"page.{number}.{page}"] = {at: array[page_of == page] for at, array in arrays}
    return units


def numbered_tables(layout: ShardLayout, state: ShardState) -> list[tuple[int, str]]:
    """Return the tables of a state, each with its number in the layout."""
    return [(i, spec.name) for i, spec in enumerate(layout.tables) if spec.name in state.tables]


def distance(unit: Unit, saved: Unit) -> float:
    """Return the squared distance of a unit's weights from a saved copy of it."""
    # Rows that are not in the copy count as if they had been zeros.
    values = unit["values"].astype(np.float64)
    if "keys" in unit:
        at = unit["keys"].searchsorted(saved["keys"])  # rows are never removed
        values[at] -= saved["values"]
    else:
        values -= saved["values"]
    return float(np.vdot(values, values))


# -- the choice of units ---------------------------------------------------------------------------

NEVER = -1  # instead of the number of the last part with a unit, if no part holds it


def parts_until_all(share: float) -> int:
    """Return the number of successive parts in which every unit is written at least once."""
    return math.ceil(2 / share)


def choose(
    nbytes: np.ndarray, saved_in: np.ndarray, distances: np.ndarray, share: float
) -> np.ndarray:
    """Return the units that the next part is to hold, as sorted indices.

    About a `share` of all bytes is written: half of it are units that changed most per byte, the
    other half those that were saved the longest ago, so that no unit is left out for ever. Of each
    unit, `nbytes` is the size, `saved_in` the number of the last part that holds it (`NEVER`: it is
    written in addition to the share), and `distances` the result of `distance`.
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
    """Mark units as taken, in order, up to `budget` bytes; return the number of bytes taken."""
    rest = order[~taken[order]]
    after = written + nbytes[rest].cumsum(dtype=float)
    chosen = rest[after - nbytes[rest] < budget]
    taken[chosen] = True
    return written + float(nbytes[chosen].sum())
