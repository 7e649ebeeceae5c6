"""The counter workload on real processes: workers whose updates show one by one.

Every update adds one to the counter of each shard, and one to a cell that no other update touches,
so the weights tell which updates are in a state, and how often. Each worker notes in a file, which
outlives it, what it is about to push and what it was told is safe.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from dps.cluster.node.worker import Worker
from dps.core.blocks import Layout
from dps.core.shard import ShardState
from dps.errors import DpsError

DTYPE = "float64"
SLACK = 1.2  # shards differ in size by a few percent


class Violation(DpsError):
    """A promise was broken."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `Violation` if something does not hold."""
    if not holds:
        raise Violation(otherwise)


def parameters(shards: int, cells: int) -> dict[str, np.ndarray]:
    """Initial values that give each of the shards a counter and at least so many cells."""
    return {"counts": np.zeros(int(SLACK * shards * (1 + cells)), DTYPE)}


def cells_of(layout: Layout) -> int:
    """How many cells every shard has."""
    return min(shard.nbytes for shard in layout.shards) // np.dtype(DTYPE).itemsize - 1


@dataclass(frozen=True, slots=True)
class Task:
    """What one start of a worker is to do: push its cells one by one until there is a file `flag`.

    Attributes
    ----------
    notes
        The file that it notes its updates in.
    think
        Seconds from one update to the next, at most.
    """

    layout: Layout
    cells: range
    notes: str
    flag: str
    think: float
    seed: str


def count(task: Task, worker: Worker) -> None:
    """Be a worker that counts; whatever it reads must make sense."""
    random, flag = Random(task.seed), Path(task.flag)
    with open(task.notes, "a", buffering=1) as notes:
        for cell in task.cells:
            if flag.exists():
                return
            time.sleep(random.uniform(0, task.think))
            notes.write(f"push {cell}\n")
            gradients, dropped = _gradient(task.layout, cell), worker.dropped
            if random.random() < 0.7:
                read = worker.push_pull(gradients)
            else:
                worker.push(gradients)
                read = worker.pull()
            if worker.dropped == dropped:
                notes.write(f"safe {cell}\n")
            for shard in range(len(task.layout.shards)):
                buffer, _ = task.layout.gather(shard, read)
                check_counts(f"{worker.name} read shard {shard}", buffer)


def _gradient(layout: Layout, cell: int) -> dict[str, np.ndarray]:
    buffers = {}
    for index, shard in enumerate(layout.shards):
        buffer = np.zeros(shard.nbytes, np.uint8)
        buffer.view(DTYPE)[[0, 1 + cell]] = -1.0
        buffers[index] = buffer
    return layout.scatter(buffers)


def check_counts(what: str, buffer: np.ndarray) -> None:
    """A shard's values must hold each update once, and as many as its counter says."""
    values = buffer.view(DTYPE)
    twice = np.flatnonzero(values[1:] > 1)
    require(not twice.size, f"{what}: applied more than once: cells {twice.tolist()}")
    counter, updates = values[0], values[1:].sum()
    require(counter == updates, f"{what}: the counter is {counter:g}, the updates {updates:g}")


@dataclass(frozen=True, slots=True)
class Notes:
    """What the workers pushed, and what they were told is safe, by cell."""

    pushed: set[int] = field(default_factory=set)
    safe: set[int] = field(default_factory=set)


def read_notes(files: Iterable[Path]) -> Notes:
    """Read the files of all workers; the last line of one that was killed may be torn."""
    notes = Notes()
    for path in files:
        for line in path.read_text().split("\n")[:-1]:
            what, cell = line.split()
            (notes.pushed if what == "push" else notes.safe).add(int(cell))
    return notes


def check_shard(shard: int, states: Sequence[ShardState], notes: Notes) -> set[int]:
    """Check a shard that is at rest, given its replicas from head to tail; return lost cells."""
    head, name = states[0], f"shard {shard}"
    for place, state in enumerate(states):
        require(_equal(head, state), f"{name}: replica {place} differs from the head")
    check_counts(name, head.values)
    applied = sum(progress.applied for progress in head.workers.values())
    counter = head.values.view(DTYPE)[0]
    require(
        head.version == applied == counter,
        f"{name}: version {head.version}, {applied} updates by worker, counter {counter:g}",
    )
    found = set(np.flatnonzero(head.values.view(DTYPE)[1:]).tolist())
    require(found <= notes.pushed, f"{name}: nobody pushed {sorted(found - notes.pushed)}")
    return notes.safe - found


def _equal(one: ShardState, other: ShardState) -> bool:
    return (
        np.array_equal(one.values, other.values)
        and one.slots.keys() == other.slots.keys()
        and all(np.array_equal(one.slots[name], other.slots[name]) for name in one.slots)
        and (one.index, one.version, one.steps) == (other.index, other.version, other.steps)
        and one.workers == other.workers
    )
