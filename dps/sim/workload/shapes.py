"""Shards of several arrays, dtypes and blocks, and an update rule that keeps a record of its steps.

Each shard then holds its counter and cells twice, and the rule's slots say which steps have changed
each element and by how much in all: a state of which a part is of another one does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from dps.core.blocks import ArraySpec, Block, Layout, Piece, ShardLayout
from dps.core.shard import ShardState
from dps.core.tables.spec import SparseSpec
from dps.protocol.wire import message
from dps.sim.violation import require

DTYPE = "float64"
TWIN_DTYPE = "float32"
CUT = 7  # elements in the first block of an array


@message
@dataclass(frozen=True, slots=True)
class Recorded:
    """Plain descent, which records the sum of its steps, and the number of the last one."""

    learning_rate: float
    slots: ClassVar[tuple[str, ...]] = ("sum", "last")

    def step(
        self,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Mapping[str, np.ndarray],
        t: int,
        scale: float,
        out: np.ndarray | None = None,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the new values, and what has been done to each."""
        step = gradient * (self.learning_rate * scale)
        new = np.subtract(values, step, out=out)
        last = np.where(gradient != 0, slots["last"].dtype.type(t), slots["last"])
        return new, {"sum": slots["sum"] - step, "last": last}


def name_of(shard: int) -> str:
    """What a shard's array of counter and cells is called."""
    return f"count-{shard}"


def twin_of(shard: int) -> str:
    """What a shard's second array is called, which says the same."""
    return f"again-{shard}"


def counters(
    shards: int, cells: int, tables: tuple[SparseSpec, ...], homes: tuple[int, ...], shaped: bool
) -> Layout:
    """The layout of one array for each shard: its counter, then the cells; or of two, in blocks."""
    size = 1 + cells
    arrays, laid_out = [], []
    for shard in range(shards):
        names = {name_of(shard): DTYPE, **({twin_of(shard): TWIN_DTYPE} if shaped else {})}
        arrays += [ArraySpec(name, (size,), dtype) for name, dtype in names.items()]
        pieces: list[Piece] = []
        for name, dtype in names.items():
            ends = (0, CUT, size) if shaped else (0, size)
            for start, stop in pairwise(ends):
                at = pieces[-1].end if pieces else 0
                pieces.append(Piece(Block(name, start, stop, dtype), at))
        laid_out.append(ShardLayout(tuple(pieces), tables))
    return Layout(tuple(arrays), tuple(laid_out), homes)


def counted(
    what: str, layout: Layout, shard: int, buffer: np.ndarray, in_parts: bool = False
) -> np.ndarray:
    """The counter and cells in a shard's buffer; where they are there twice, both must agree.

    Unless shards are restored `in_parts`: then neither may have an update more than once.
    """
    size = layout.names[name_of(shard)].size
    nbytes = size * np.dtype(DTYPE).itemsize
    values = buffer[:nbytes].view(DTYPE)
    if buffer.nbytes > nbytes and in_parts:
        twice = np.flatnonzero(buffer[nbytes:].view(TWIN_DTYPE)[1:] > 1).tolist()
        require(not twice, "twice", f"{what}: applied to its second array again: {twice}")
    elif buffer.nbytes > nbytes:
        agree = np.array_equal(values, buffer[nbytes:].view(TWIN_DTYPE))
        require(agree, "arrays differ", f"{what}: its two arrays are not of the same updates")
    return values


def check_slots(
    what: str, values: np.ndarray, state: ShardState, forgets: bool, filtered: bool
) -> None:
    """The rule's slots must be those of a state's values; some recoveries `forget` them.

    A rule that starts anew counts its steps from there. Some `filtered` gradients bring nothing.
    """
    if not state.slots:
        return
    summed, last = (state.slots[name][: values.nbytes].view(DTYPE) for name in Recorded.slots)
    fit = forgets or np.array_equal(summed, values)
    require(fit, "slots", f"{what}: its slots are of other steps than its weights")
    text = f"{what}: {state.steps} steps, but step {last.max():g} is the last in its slots"
    newest = last.max(initial=0)
    require(newest == state.steps or (filtered and newest < state.steps), "slots", text)
