"""The check of shards that are restored in parts: what blocks may lack, and what counts as there.

A restored state never existed as a whole, but the numbers and the dedupe table in it did, and so
did each of its units. Which updates it holds is told by the former: that none of them is applied
again, and that the others are, is what must hold. No unit may be older than the parts allow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.shard import ShardState
from dps.protocol.durabilities.partial_checkpoint import PartialCheckpoint
from dps.protocol.storage.part_choice import parts_until_all
from dps.protocol.storage.parts import Unit, units_of
from dps.sim.violation import require


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
