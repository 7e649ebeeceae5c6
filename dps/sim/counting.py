"""Owns the counter workload and the invariants: what must hold whatever fails.

Every update adds one to the counter of each shard, and one to a cell that no other update touches.
The weights then tell which updates are in a state, and how often, and every loss and every double
application shows exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from random import Random

import numpy as np

from dps.core.blocks import ArraySpec, Block, Layout, Piece, ShardLayout
from dps.core.shard import ShardState
from dps.events import Applied, Restored
from dps.protocol.lane import Outcome
from dps.protocol.messages import Table, View
from dps.sim.world import World

DTYPE = "float64"


class Violation(AssertionError):
    """The protocol broke a promise."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `Violation` if something does not hold."""
    if not holds:
        raise Violation(otherwise)


def counters(shards: int, cells: int) -> Layout:
    """The layout of one array for each shard: its counter, then the cells."""
    arrays = tuple(ArraySpec(_name(shard), (1 + cells,), DTYPE) for shard in range(shards))
    blocks = (Block(_name(shard), 0, 1 + cells, DTYPE) for shard in range(shards))
    return Layout(arrays, tuple(ShardLayout((Piece(block, 0),)) for block in blocks))


def zeros(layout: Layout) -> list[np.ndarray]:
    """Each shard's buffer of initial values."""
    return [np.zeros(shard.nbytes, np.uint8) for shard in layout.shards]


class Tally:
    """What the workers were told, shard by shard.

    Attributes
    ----------
    attempted
        Cells of updates that were pushed.
    acked
        For each shard, cells of the updates that a worker was told are safe.
    seen
        For each shard, cells that somebody knows to be in the weights: read there, or acked as
        applied.
    """

    def __init__(self, shards: int) -> None:
        self.attempted: set[int] = set()
        self.acked: list[set[int]] = [set() for _ in range(shards)]
        self.seen: list[set[int]] = [set() for _ in range(shards)]
        self.duplicates = 0
        self.buffered = 0
        self.dropped = 0


class CountingWorker:
    """A worker that pushes one update for each of its cells, and checks whatever it reads.

    Parameters
    ----------
    linear
        Whether a read must show whatever anybody knew to be in the weights before it began.
    """

    def __init__(
        self, world: World, name: str, cells: range, tally: Tally, linear: bool = False
    ) -> None:
        self.name = name
        self.process, self.client = world.client(name, self._acked)
        self._world = world
        self._cells = cells
        self._cell_of: dict[int, int] = {}
        self._tally = tally
        self._linear = linear
        self._limit = world.group.timings.unavailable

    async def train(self, random: Random, think: float) -> None:
        """Enter, push everything with pauses of up to `think` seconds, and leave."""
        await self.client.enter(self.process.address, self.name)
        for cell in self._cells:
            await asyncio.sleep(random.uniform(0, think))
            self._tally.attempted.add(cell)
            known = [set(of_shard) for of_shard in self._tally.seen]
            pull = random.random() < 0.5
            self._cell_of[self.client.next_seq] = cell
            await self._in_time(self.client.push(self._gradient(cell), pull))
            if pull or random.random() < 0.5:
                if not pull:
                    known = [set(of_shard) for of_shard in self._tally.seen]
                    await self._in_time(self.client.pull())
                self._read(known)
        await self.client.leave("finished")
        await self.client.close()

    async def _in_time(self, request: Awaitable[object]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await request
        took = loop.time() - began
        require(took <= self._limit, f"{self.name}: a request took {took:g} s")

    def _gradient(self, cell: int) -> dict[str, np.ndarray]:
        gradients = {}
        for spec in self._world.group.layout.arrays:
            gradient = np.zeros(spec.shape)
            gradient[[0, 1 + cell]] = -1.0
            gradients[spec.name] = gradient
        return gradients

    def _read(self, known: Sequence[set[int]]) -> None:
        versions = self.client.versions()
        for name, values in self.client.weights().items():
            shard = int(name.partition("-")[2])
            what = f"{self.name} read shard {shard}"
            check_counts(what, values, versions[shard])
            missing = known[shard] - cells_in(values)
            require(not (self._linear and missing), f"{what}: {sorted(missing)} was there, is gone")
            self._tally.seen[shard] |= cells_in(values)

    def _acked(self, shard: int, seq: int, version: int, outcome: Outcome) -> None:
        cell = self._cell_of[seq]
        if outcome == "dropped":
            self._tally.acked[shard].discard(cell)
        else:
            self._tally.acked[shard].add(cell)
        if outcome in ("applied", "duplicate"):
            self._tally.seen[shard].add(cell)
        self._tally.dropped += outcome == "dropped"
        self._tally.duplicates += outcome == "duplicate"
        self._tally.buffered += outcome == "buffered"


def check_counts(what: str, values: np.ndarray, version: int) -> None:
    """Weights must hold each update once, and as many as their version says."""
    counter, cells = values[0], values[1:]
    twice = np.flatnonzero(cells > 1)
    require(not twice.size, f"{what}: applied more than once: {twice.tolist()}")
    require(
        counter == version == cells.sum(),
        f"{what}: version {version}, but counter {counter:g} and {cells.sum():g} updates",
    )


def cells_in(values: np.ndarray) -> set[int]:
    """The cells whose updates are in the weights."""
    return set(np.flatnonzero(values[1:]).tolist())


async def settled(world: World, patience: float) -> Table:
    """Wait until every shard is fully served and its replicas are at rest; return the table."""
    try:
        async with asyncio.timeout(patience):
            while True:
                table = await world.complete()
                indices = [{state.index for state in world.states(v)} for v in table.views]
                if all(len(of_shard) == 1 for of_shard in indices):
                    return table
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise Violation(f"the group did not come to rest within {patience:g} s") from None


def check(world: World, table: Table, tally: Tally, interval: float, lasting: bool) -> None:
    """Check every invariant on a group that is at rest.

    Parameters
    ----------
    interval
        How many acked updates a restored shard may have lost each time.
    lasting
        Whether what somebody has read may never be lost again.
    """
    require(not world.network.bugs, f"bugs: {world.network.bugs}")
    check_heads(world)
    for view in table.views:
        states = world.states(view)
        _check_equal(view, states)
        found = _check_state(view, states[0], tally)
        lost = tally.acked[view.shard] - found
        times = sum(isinstance(e, Restored) and e.shard == view.shard for _, e in world.events) - 1
        require(
            not lost or len(lost) <= interval * times,
            f"shard {view.shard}: {len(lost)} acked updates are lost after {times} restorations: "
            f"{sorted(lost)}",
        )
        undone = tally.seen[view.shard] - found
        require(not (lasting and undone), f"shard {view.shard}: {sorted(undone)} was read, is lost")


def check_heads(world: World) -> None:
    """In each epoch of a shard one node at most is the head, and no update is applied twice."""
    for host in world.hosts.values():
        host.flush()
    heads: dict[tuple[int, int], str] = {}
    for _, event in world.events:
        if isinstance(event, Applied) and event.head and event.times:
            first = heads.setdefault((event.shard, event.epoch), event.node)
            require(
                first == event.node,
                f"shard {event.shard}, epoch {event.epoch}: both {first} and {event.node} are head",
            )


def _check_equal(view: View, states: Sequence[ShardState]) -> None:
    head = states[0]
    for member, state in zip(view.chain, states, strict=True):
        same = (
            np.array_equal(head.values, state.values)
            and all(np.array_equal(head.slots[k], state.slots[k]) for k in head.slots)
            and (head.index, head.version, head.steps) == (state.index, state.version, state.steps)
            and head.workers == state.workers
        )
        require(same, f"shard {view.shard}: {member.address} differs from its head")


def _check_state(view: View, state: ShardState, tally: Tally) -> set[int]:
    values = state.values.view(DTYPE)
    applied = sum(progress.applied for progress in state.workers.values())
    check_counts(f"shard {view.shard}", values, state.version)
    require(
        applied == state.version,
        f"shard {view.shard}: version {state.version}, but the workers' updates are {applied}",
    )
    found = cells_in(values)
    require(found <= tally.attempted, f"shard {view.shard}: {sorted(found - tally.attempted)}?")
    return found


def _name(shard: int) -> str:
    return f"count-{shard}"
