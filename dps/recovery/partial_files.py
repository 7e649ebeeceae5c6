"""Checkpoints of which each holds a part of a shard's state, and says where the rest of it is.

A part is a checkpoint like another (`dps.recovery.checkpoint_files`): its manifest has the
numbers of the state that it was made of, and names for every unit the data file with the newest
copy. The first part of an epoch holds all units, so that none is from an earlier server's.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from safetensors.numpy import save

from dps.core.blocks import ShardLayout
from dps.core.shard import ShardState
from dps.recovery.checkpoint_files import PARTIAL, CheckpointFiles
from dps.recovery.part_choice import NEVER, choose, parts_until_all
from dps.recovery.parts import (
    Unit,
    distance,
    nbytes_of,
    numbered_tables,
    units_of,
)


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

    Parameters
    ----------
    keep
        How many times all units are kept.
    share
        Which part of the shard a checkpoint holds, about.
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
            return self._write(epoch, state)

    def _write(self, epoch: int, state: ShardState) -> int:
        units = units_of(self._layout, state)
        copies = self._copies if epoch == self._epoch else {}
        chosen = self._chosen(units, copies)
        arrays = {f"{at}/{name}": a for at in chosen for name, a in units[at].items()}
        arrays |= {f"result/{caller}": packed for caller, packed in state.results.items()}
        data = save(arrays)
        digest = hashlib.sha256(data).hexdigest()
        name = f"e{epoch:06d}-i{state.index:012d}"
        # By what is in it: a part of the same state may hold other units, and be named already.
        file = f"{name}-{digest[:8]}.safetensors"
        number = self._number + 1
        written = {
            at: _Copy(file, digest, number, state.version, _weights(units[at])) for at in chosen
        }
        copies = {**copies, **written}
        manifest = _manifest(self._layout, epoch, state, file, copies)
        written_bytes = self._put(epoch, name, data, manifest)
        self._copies, self._epoch, self._number = copies, epoch, number
        return written_bytes

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
    """A copy of a unit's weights: the state that they are of is not kept for them."""
    return {name: unit[name].copy() for name in ("keys", "values") if name in unit}


def _manifest(
    layout: ShardLayout, epoch: int, state: ShardState, file: str, copies: dict[str, _Copy]
) -> dict[str, Any]:
    return {
        "format": PARTIAL,
        "file": file,
        "epoch": epoch,
        "index": state.index,
        "version": state.version,
        "steps": state.steps,
        "workers": {name: dataclasses.asdict(p) for name, p in state.workers.items()},
        "size": state.values.nbytes,
        "slots": list(state.slots),
        "tables": numbered_tables(layout, state),
        "units": {at: copy.file for at, copy in copies.items()},
        "versions": {at: copy.version for at, copy in copies.items()},
        "sources": {copy.file: copy.sha256 for copy in copies.values()},
    }
