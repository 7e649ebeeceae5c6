"""The counter workload: workers whose updates show in the weights one by one.

Every update adds one to the counter of each shard, and one to a cell that no other update touches.
The weights then tell which updates are in a state, and how often, and every loss and every double
application shows exactly. Three additions make a state visible of which a part is of another one:

- Shards of several arrays, dtypes and blocks hold counter and cells twice, and the slots of an
  update rule that records its steps say which have changed each element, and by how much in all.
- A sparse table has a row for the counter and one for each cell, under keys that hash to the shard;
  an update adds to them as it adds to the dense ones.
- A filter, written as a user would write one, withholds whole updates and repeats its indices.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from dps.core.blocks import ArraySpec, Block, Layout, Piece, ShardLayout
from dps.core.filters.filter import Sending
from dps.core.functions import Changed, Part
from dps.core.leases import Lease
from dps.core.shard import ShardState
from dps.core.tables.key_routing import asked
from dps.core.tables.table import PARTITIONS, SparseSpec, table_of
from dps.core.updates import Batch, UpdateId
from dps.errors import Evicted, InternalError
from dps.protocol.client.shard_client import Outcome
from dps.protocol.messages import Table
from dps.protocol.wire import message
from tests.simulator.network import Violation
from tests.simulator.patches import require
from tests.simulator.world import World

if TYPE_CHECKING:
    from tests.simulator.schedules.strategies import Case

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


def counters(shards: int, cells: int, tables: bool = False, shaped: bool = False) -> Layout:
    """The layout of one array for each shard: its counter, then the cells; or of two, in blocks.

    With `tables`, there are rows like them.
    """
    size, specs = 1 + cells, (TABLE,) if tables else ()
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
        laid_out.append(ShardLayout(tuple(pieces), specs))
    return Layout(tuple(arrays), tuple(laid_out), homes(shards) if tables else ())


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


WITHHELD = 2  # updates of a worker that travel as one


@message
@dataclass(frozen=True, slots=True)
class Bins:
    """Send the counter and every bin of `width` cells with something in it, each `every` pushes.

    The cells of a worker are one bin, so all of its lists of indices are the same, and no two
    workers have the same ones.
    """

    width: int
    every: int
    feedback: ClassVar[bool] = True

    def selected(self, gradient: np.ndarray, sending: Sending) -> np.ndarray:
        """Return nothing, or the counter and the bins."""
        mask: np.ndarray = np.zeros(gradient.size, bool)
        if sending.push % self.every == 0:
            filled = gradient[1:].reshape(-1, self.width).any(axis=1)
            mask[0] = gradient[0] != 0
            mask[1:] = np.repeat(filled, self.width)
        return mask


TABLE = SparseSpec("rows", 1, "float64")


def homes(shards: int) -> tuple[int, ...]:
    """The shard of each partition of keys."""
    return tuple(partition % shards for partition in range(PARTITIONS))


class RowKeys:
    """Under which keys the rows of each shard lie: its counter, then the cells."""

    def __init__(self, layout: Layout, cells: int) -> None:
        shards = len(layout.shards)
        enough = 4 * shards * (1 + cells) + 64
        found = asked(layout, TABLE.name, np.arange(enough)).keys
        self.of_shard = [found[shard][: 1 + cells] for shard in range(shards)]
        assert all(len(keys) == 1 + cells for keys in self.of_shard)
        self.all = np.concatenate(self.of_shard)

    def gradient(self, cell: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """What adds one to the counter and to a cell of every shard."""
        keys = np.concatenate([keys[[0, 1 + cell]] for keys in self.of_shard])
        return {TABLE.name: (keys, np.full((len(keys), 1), -1.0))}

    def by_shard(self, rows: np.ndarray) -> list[np.ndarray]:
        """The counter and cells of each shard, out of the rows of all keys."""
        cuts = np.cumsum([len(keys) for keys in self.of_shard])[:-1]
        return np.split(rows[:, 0], cuts)

    def cells(self, shard: int, state: ShardState) -> set[int]:
        """The cells whose updates are in the rows of a state."""
        rows = table_of(state.tables, TABLE.name).rows(TABLE, self.of_shard[shard]).values[:, 0]
        return set(rows[1:].nonzero()[0].tolist())

    def check(
        self,
        what: str,
        shard: int,
        state: ShardState,
        dense: np.ndarray,
        in_parts: bool = False,
    ) -> None:
        """The rows in a state must be those of the updates that are in its weights.

        Where shards are restored `in_parts`, each may lack others.
        """
        table = table_of(state.tables, TABLE.name)
        rows = table.rows(TABLE, self.of_shard[shard]).values[:, 0]
        if in_parts:
            twice = np.flatnonzero(rows[1:] > 1).tolist()
            require(not twice, "twice", f"{what}: applied to rows more than once: {twice}")
            return
        differ = np.flatnonzero(rows != dense).tolist()
        require(not differ, "rows", f"{what}: rows {differ} are not those of its updates")


def digest(state: ShardState) -> tuple[object, ...]:
    """What tells the rows of two states apart."""
    levels = ((name, table.compacted()) for name, table in sorted(state.tables.items()))
    return tuple((n, lv.keys.tobytes(), lv.values.tobytes()) for n, lv in levels if lv is not None)


T = TypeVar("T")

CELLS = 20  # updates of one worker at most
ENOUGH = 6  # updates of one worker at least
LAST = 2  # updates that a worker keeps for the time after the faults
CALLED = 0.4  # the share of updates that functions make, where there are any
AHEAD = 0.1  # how often a worker takes a lease before it has computed the batches of the last one
MARK = "mark"


def zeros(layout: Layout) -> list[np.ndarray]:
    """Each shard's buffer of initial values."""
    return [np.zeros(shard.nbytes, np.uint8) for shard in layout.shards]


def mark(arrays: Mapping[str, Part], cell: int) -> Changed:
    """The function that does what the update of a cell does; returns what is in the cell then."""
    changed = {name: part.values.copy() for name, part in arrays.items()}
    for values in changed.values():
        values[[0, 1 + cell]] += 1
    return Changed(changed, values[1 + cell])


class Tally:
    """What the workers did and were told, shard by shard, as sets of cells.

    Parameters
    ----------
    mail_lost
        Whether a failure was allowed to take back what was in a mailbox.
    leases
        Whether workers lease the cells that they push.

    Attributes
    ----------
    claimed
        Updates that a process is about to push, so that no other one of its name does.
    attempted
        Updates that were pushed.
    acked
        For each shard, updates that a worker was told are applied.
    buffered
        For each shard, updates that a worker was told will be applied later.
    unfinished
        Updates whose worker ended before all shards had acknowledged them, where these go back
        together: those that had are sent them again, so none is durable before all are.
    seen
        For each shard, updates that somebody knows to be in the weights: read there, or acked.
    forgiven
        For each shard, updates that a failure was allowed to take back.
    in_part
        For each shard, updates that it holds, but its cells do not: they were lost to these blocks.
    lives
        How often each shard has been brought back: what was read before may be lost.
    numbers
        The number of the update of each cell: its worker's clock after it.
    made_as
        The incarnation of its worker that began to make the update of each cell.
    active
        Workers that take part, and how many of their cells they had come past when they entered.
    latest
        The incarnation as which each worker knows that it takes part.
    joined
        The last incarnation of each name that the coordinator has let in.
    processes
        How many processes there have been of each worker's name.
    computing
        The worker that computes a leased cell, or did when it ended, and its incarnation.
    """

    def __init__(self, shards: int, mail_lost: Callable[[], bool], leases: bool) -> None:
        self.mail_lost = mail_lost
        self._leases = leases
        self._pushed_by: dict[str, set[int]] = {}
        self.computing: dict[int, tuple[str, int]] = {}
        self.claimed: set[int] = set()
        self.attempted: set[int] = set()
        self.acked: list[set[int]] = [set() for _ in range(shards)]
        self.buffered: list[set[int]] = [set() for _ in range(shards)]
        self.unfinished: set[int] = set()
        self.seen: list[set[int]] = [set() for _ in range(shards)]
        self.forgiven: list[set[int]] = [set() for _ in range(shards)]
        self.in_part: list[set[int]] = [set() for _ in range(shards)]
        self.lives = [0] * shards
        self.numbers: dict[int, int] = {}
        self.made_as: dict[int, int] = {}
        self.active: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.joined: dict[str, int] = {}
        self.processes: Counter[str] = Counter()
        self._gone: dict[str, int] = {}  # the last incarnation of each name that has left
        self.operations = 0

    def entered(self, worker: str, incarnation: int) -> None:
        """A worker begins to take part, or does so again; it may have been given up meanwhile.

        So is an earlier process of its name, though nobody came to know of the later one.
        """
        gone, latest = self._gone.get(worker, -1), self.latest.get(worker, 0)
        if incarnation <= gone or incarnation < latest:
            return
        self.latest[worker] = incarnation
        done = [i for i, cell in enumerate(cells_of(worker), 1) if cell in self.attempted]
        self.active[worker] = max(done, default=0)

    def own(self, worker: str) -> Iterable[int]:
        """The cells of a worker, or those that it has pushed."""
        return self._pushed_by.get(worker, set()) if self._leases else cells_of(worker)

    def pushes(self, worker: str, incarnation: int, cell: int, number: int) -> None:
        """A worker is about to push a cell, as the update of this number."""
        self.attempted.add(cell)
        self.numbers[cell] = number
        self.made_as[cell] = incarnation
        self._pushed_by.setdefault(worker, set()).add(cell)

    def begins(self, worker: str, incarnation: int, cell: int) -> None:
        """A worker begins to compute a cell, which no other one does that takes part."""
        other = self.computing.get(cell)
        # One that was given up may not know it yet.
        held = other is not None and other[0] != worker and self.has_part(*other)
        held = held and self.has_part(worker, incarnation)
        require(not held, "held twice", f"{worker} computes {cell}, and so does {other}")
        self.computing[cell] = worker, incarnation

    def forgive_buffer(self, cells: Iterable[int]) -> None:
        """What a worker held back of these is lost with its process."""
        own = set(cells)
        for buffered, forgiven in zip(self.buffered, self.forgiven, strict=True):
            forgiven |= buffered & own

    def left(self, worker: str, incarnation: int) -> None:
        """A worker does not take part any more."""
        self._gone[worker] = max(incarnation, self._gone.get(worker, -1))
        self.active.pop(worker, None)

    def ended(self) -> None:
        """Nobody takes part any more; incarnations that nobody knows of may be there again."""
        self._gone.clear()
        self.active.clear()
        self.latest.clear()
        self.joined.clear()
        self.computing.clear()

    def has_part(self, worker: str, incarnation: int) -> bool:
        """Whether a worker has taken part since this incarnation of it entered, without a break."""
        return worker in self.active and self.joined.get(worker) == incarnation

    def clock(self, worker: str, shard: int, cells: set[int]) -> int | None:
        """The clock of a worker in weights with these cells; None: it has none to go by.

        After a failure took some of it back, these are behind the worker's own, until its next
        update.
        """
        clock = None
        lost = self.forgiven[shard] | (self.buffered[shard] if self.mail_lost() else set())
        own = cells_of(worker)[self.active.get(worker, 0) :]
        for cell in own:
            if self.made_as.get(cell) != self.latest.get(worker):
                continue  # another process of this name counts for itself
            if cell in cells:
                clock = self.numbers[cell]
            elif cell in lost:
                clock = None
        return clock


@dataclass(frozen=True, slots=True)
class _Reading:
    """Which incarnation of each worker took part, and the clock that was read of it."""

    clocks: dict[str, tuple[int, int | None]]


class CountingWorker:
    """A worker that pushes one update for each of its cells, and checks whatever it reads.

    Parameters
    ----------
    case
        Says what it may read, and whether it has functions make some of its updates.
    rows
        Where the rows lie that it pushes to as well; None: it pushes to none.
    """

    def __init__(
        self,
        world: World,
        name: str,
        tally: Tally,
        case: Case,
        rows: RowKeys | None,
    ) -> None:
        self.name = name
        self.process, self.client = world.client(name, self._acked)
        self._world = world
        self._pushed: set[int] = set()
        self._on_the_way: dict[int, int] = {}  # the number of an update, and its cell
        self._incarnation = 0
        self._tally = tally
        tally.processes[name] += 1
        self._linear = case.linear
        self._in_parts = world.group.recovery.durability.restores_in_parts
        self._lead = case.lead
        self._row_keys = rows
        self._calls = case.calls
        self._case = case
        # Cells that are pushed only when the faults are over.
        self._last = set(sorted(case.leased)[-case.workers :])
        self._refused: list[set[int]] = [set() for _ in world.group.layout.shards]
        self._limit = world.group.timings.unavailable
        self._versions: dict[int, int] = {}
        self._readings: list[_Reading] = []
        self._row_readings: list[_Reading] = []
        self._newest: dict[int, tuple[int, int]] = {}  # by shard, its life and the version read
        self._weights: dict[int, int] = {}  # by shard, the version of the weights that it has
        self._lives = list(tally.lives)
        self._table = -1
        self.client.router.listen(self._heard)
        shards = range(len(world.group.layout.shards))
        self._kept: list[set[int]] = [set() for _ in shards]
        self._told: list[set[int]] = [set() for _ in shards]
        self._brought: dict[tuple[int, UpdateId], set[int]] = {}
        self._remainders: set[tuple[int, UpdateId]] = set()

    async def train(self, random: Random, think: float, over: asyncio.Event) -> None:
        """Enter, push with pauses of up to `think` seconds until the faults are over, and leave."""
        try:
            await self._train(random, think, over)
        except Evicted as error:
            # Of two processes of one name the earlier incarnation is told to end.
            alone = self._tally.processes[self.name] == 1
            require(not alone, "evicted", f"{self.name} has its name to itself: {error}")
            await self.client.leave("failed")
            await self.client.close()
        except InternalError as error:
            # It ends, as its training function would; another worker may come.
            require(self.process.doomed, "failed", f"{self.name} failed: {error}")
            self._tally.forgive_buffer(self._pushed)
            if self._world.group.restores_together:
                self._tally.unfinished |= self._under_way()
            await self.client.leave("failed")
            await self.client.close()
        except asyncio.CancelledError:
            self._tally.forgive_buffer(self._pushed)
            if self._world.group.restores_together:
                self._tally.unfinished |= self._under_way()
            raise

    async def _train(self, random: Random, think: float, over: asyncio.Event) -> None:
        await self.client.enter(self.process.address, self.name)
        self._note_entered()
        if self._case.leases:
            await self._train_on_leases(random, think, over)
        else:
            await self._train_on_cells(random, think, over)
        self._tally.left(self.name, self.client.incarnation)
        await self.client.leave("finished")
        self._check_all_sent()
        await self.client.close()

    async def _train_on_leases(self, random: Random, think: float, over: asyncio.Event) -> None:
        client, division, last = self.client, self._case.division, 0
        left: deque[tuple[Lease, Batch, int]] = deque()  # with the incarnation that leased it
        while not client.leaving:
            left = deque(each for each in left if each[2] == client.incarnation)
            if not left or (self._case.ahead and random.random() < AHEAD):
                held = {lease.number for lease, _, _ in left}
                request = client.take_lease("run", division, last, [*held], waits=not left)
                reply = await self._in_time(request)
                self._note_entered()
                if reply.ended:
                    return
                if reply.lease is not None:
                    last, by = reply.lease.number, client.incarnation
                    left.extend((reply.lease, batch, by) for batch in reply.batches())
                elif not left:
                    await self._in_time(client.idle())
                    self._note_entered()
                continue
            await asyncio.sleep(random.uniform(0, think))
            lease, batch, taken_as = left.popleft()
            at = int(division.order(lease.epoch).indices(batch.number)[1][0])
            cell = lease.epoch * division.examples + at
            if cell in self._last:
                await over.wait()
            if not client.leaving and client.incarnation == taken_as:
                self._tally.begins(self.name, taken_as, cell)
                await self._update(cell, random, batch)
                self._tally.computing.pop(cell, None)

    async def _train_on_cells(self, random: Random, think: float, over: asyncio.Event) -> None:
        cells = cells_of(self.name)
        for i, cell in enumerate(cells):
            if cell in self._tally.claimed:  # it is that of another process of this name
                continue
            await asyncio.sleep(random.uniform(0, think))
            if i == len(cells) - LAST:
                await over.wait()
            elif over.is_set() and ENOUGH <= i < len(cells) - LAST:
                continue
            if self.client.leaving:
                break
            if cell in self._tally.claimed:
                continue
            self._tally.claimed.add(cell)
            if self._calls and random.random() < CALLED:
                await self._call(cell)
            else:
                await self._update(cell, random)

    async def _update(self, cell: int, random: Random, batch: Batch | None = None) -> None:
        pull, read = random.random() < 0.5, random.random() < 0.5
        if self._lead is not None and not self._readings:
            await self._read()
        known = [set(of_shard) for of_shard in self._tally.seen]
        number = self.client._seq + 1
        self._tally.pushes(self.name, self.client.incarnation, cell, number)
        self._pushed.add(cell)
        self._on_the_way = {number: cell}
        computed_from = [*enumerate(self._readings), *enumerate(self._row_readings)]
        self._readings, self._row_readings = [], []
        rows = self._row_keys.gradient(cell) if self._row_keys else {}
        await self._in_time(self.client.push(self._gradient(cell), pull, rows, batch=batch))
        self._on_the_way = {}
        self._note_entered()
        self._check_lead(number, cell, computed_from)
        if pull:
            self._check_read(known)
        elif read:
            await self._read()
        if self._row_keys and random.random() < 0.5:
            await self._read_rows(self._row_keys)

    async def _call(self, cell: int) -> None:
        """Have a function make an update; it leaves the worker's clock where it is."""
        tally = self._tally
        tally.pushes(self.name, self.client.incarnation, cell, self.client._seq)
        results = await self._in_time(self.client.apply(MARK, [cell]))
        text = f"{self.name}: a call came to {results}, expected 1 from every shard"
        require(results == [1.0] * len(tally.acked), "wrong result", text)
        for shard in range(len(tally.acked)):
            tally.acked[shard].add(cell)
            tally.seen[shard].add(cell)

    async def _read(self) -> None:
        known = [set(of_shard) for of_shard in self._tally.seen]
        await self._in_time(self.client.pull())
        self._note_entered()
        self._check_read(known)

    async def _read_rows(self, keys: RowKeys) -> None:
        known = [set(of_shard) for of_shard in self._tally.seen]
        rows: list[np.ndarray] = []

        async def read() -> None:
            rows.append(await self.client.pull_rows(TABLE.name, keys.all))

        await self._in_time(read())
        self._note_entered()
        self._row_readings = []
        for shard, values in enumerate(keys.by_shard(rows[0])):
            found = self._check_found(shard, "rows", values, int(values[0]), known[shard])
            self._row_readings.append(self._reading(shard, found))

    def _note_entered(self) -> None:
        """Take note if the worker has entered anew."""
        if self.client.incarnation != self._incarnation:
            self._incarnation = self.client.incarnation
            self._tally.entered(self.name, self._incarnation)

    async def _in_time(self, request: Awaitable[T]) -> T:
        loop = asyncio.get_running_loop()
        self._tally.operations += 1
        self._lives = list(self._tally.lives)
        began = loop.time() - self.process.stood
        result = await request
        took = loop.time() - self.process.stood - began
        require(took <= self._limit, "deadline", f"{self.name}: a request took {took:g} s")
        return result

    def _gradient(self, cell: int) -> dict[str, np.ndarray]:
        gradients = {}
        for spec in self._world.group.layout.arrays:
            gradient = np.zeros(spec.shape, spec.dtype)
            gradient[[0, 1 + cell]] = -1.0
            gradients[spec.name] = gradient
        return gradients

    def _check_read(self, known: list[set[int]]) -> None:
        versions, readings = self.client.versions(), []
        weights = self.client.weights()
        for shard in range(len(versions)):
            values = weights[name_of(shard)]
            self._check_twin(shard, values, weights.get(twin_of(shard)))
            found = self._check_found(shard, "weights", values, versions[shard], known[shard])
            self._check_told(shard, found)
            readings.append(self._reading(shard, found))
        self._readings = readings

    def _reading(self, shard: int, found: set[int]) -> _Reading:
        """How far everybody is in what was read of a shard."""
        tally = self._tally
        together = self._world.group.restores_together
        set_back = together and tally.clock(self.name, shard, found) is None
        active = {} if set_back else tally.active
        return _Reading({w: (tally.latest[w], tally.clock(w, shard, found)) for w in active})

    def _check_found(
        self, shard: int, kind: str, values: np.ndarray, version: int, known: set[int]
    ) -> set[int]:
        """What was read holds whole updates, once, and no fewer than were known before."""
        what = f"{self.name} read {kind} of shard {shard}"
        check_counts(what, values, version, bool(self._world.group.filters), self._in_parts)
        self._check_newer(what, shard, version, kind)
        found = cells_in(values) | self._tally.in_part[shard]
        missing = known - found - self._tally.forgiven[shard]
        text = f"{what}: {sorted(missing)} was there, is gone"
        require(not (self._linear and missing), "stale read", text)
        self._tally.seen[shard] |= found
        return found

    def _check_twin(self, shard: int, values: np.ndarray, again: np.ndarray | None) -> None:
        same = again is None or self._in_parts or np.array_equal(values, again)
        text = f"{self.name} read arrays of shard {shard} that are not of the same updates"
        require(same, "arrays differ", text)

    def _check_newer(self, what: str, shard: int, version: int, kind: str) -> None:
        """Nobody reads what is older than what it has read, unless that may have been lost.

        Weights that are kept for want of newer ones are not read again.
        """
        life, kept = self._tally.lives[shard], self._weights.get(shard)
        if kind == "weights":
            self._weights[shard] = version
            if version == kept:
                return
        if kind == "rows" and self._in_parts:
            return  # their counter may lack others than the weights do
        of_life, newest = self._newest.get(shard, (life, version))
        text = f"{what}: version {version}, after {newest}"
        require(of_life != life or version >= newest, "older than read before", text)
        if self._lives[shard] == life:
            self._newest[shard] = (life, version)
        else:
            self._newest.pop(shard, None)

    def _heard(self, table: Table) -> None:
        if table.version <= self._table:
            text = f"{self.name} took table {table.version} after {self._table}"
            self._world.network.report(Violation("older table", text))
        self._table = table.version

    def _check_told(self, shard: int, found: set[int]) -> None:
        """Who lost acked updates has been told by the time of its next read.

        It is not told of those that another process of its name was told are durable.
        """
        gone = (self._tally.acked[shard] & self._told[shard]) - found
        losses = [loss for loss in self.client.receipts.losses if loss.shard == shard]
        told = sum(loss.updates for loss in losses)
        counts = not self._world.group.filters and all(loss.exact for loss in losses)
        enough = told >= len(gone) if counts else bool(losses) or not gone
        text = f"{self.name} lost {len(gone)} acked updates on shard {shard}, but knows of {told}"
        require(enough or not self._linear, "lost without a word", text)

    def _check_lead(
        self, number: int, cell: int, computed_from: list[tuple[int, _Reading]]
    ) -> None:
        """No gradient is applied that misses what slow workers should have pushed by then."""
        if self._lead is None:
            return
        for shard, reading in computed_from:
            if cell not in self._tally.acked[shard] | self._tally.buffered[shard]:
                continue  # it was dropped as too stale
            for worker, (incarnation, clock) in reading.clocks.items():
                if self._tally.has_part(worker, incarnation) and clock is not None:
                    require(
                        number - 1 - clock <= self._lead,
                        "too far ahead",
                        f"{self.name} computed update {number} of shard {shard} from weights with "
                        f"no more than update {clock} of {worker}",
                    )

    def _acked(self, shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        cells, tally = self._cells_in(shard, update), self._tally
        if outcome == "repeated":
            self._refused[shard] |= cells
            tally.seen[shard] |= cells
            return
        if outcome == "dropped" and self._case.leases:  # another worker computes it
            self._refused[shard] |= cells
            return
        if outcome == "duplicate" and self._case.leases:
            # The first reply, which was lost, may have been that the shard had it from another one.
            self._refused[shard] |= cells
        else:
            self._told[shard] |= cells
        if outcome == "dropped" and (shard, update) in self._remainders:  # it has to come again
            self._told[shard] -= cells
            self._kept[shard] |= cells
        if outcome == "buffered":
            tally.buffered[shard] |= cells
            if update.incarnation < tally.joined.get(self.name, 0):
                tally.forgiven[shard] |= cells  # shards take nothing more of this process
        elif outcome == "dropped":
            tally.buffered[shard] -= cells
        else:
            tally.acked[shard] |= cells
            tally.seen[shard] |= cells

    def _cells_in(self, shard: int, update: UpdateId) -> set[int]:
        """The cells that an update brings: its own, and those withheld before, if not now."""
        if (shard, update) not in self._brought:
            if update.seq not in self._on_the_way:
                self._remainders.add((shard, update))
            own = {cell for seq, cell in self._on_the_way.items() if seq == update.seq}
            outbox = self.client.encoder._outboxes[shard : shard + 1]
            withheld = (values for each in outbox for values in each.withheld().values())
            kept = {cell for values in withheld for cell in cells_in(values)}
            self._brought[shard, update] = (self._kept[shard] | own) - kept
            self._kept[shard] = kept
        return self._brought[shard, update]

    def _under_way(self) -> set[int]:
        """The cells of the update that is not finished: its own, and those withheld before."""
        brought = (c for (_, update), c in self._brought.items() if update.seq in self._on_the_way)
        return set(self._on_the_way.values()).union(*brought)

    def _check_all_sent(self) -> None:
        """Who leaves in order has sent all that was withheld."""
        for shard, told in enumerate(self._told):
            left = self._pushed - told - self._refused[shard]
            text = f"{self.name} left, but never sent {sorted(left)} to shard {shard}"
            require(not left, "withheld", text)


def check_counts(
    what: str, values: np.ndarray, version: int, filtered: bool = False, in_parts: bool = False
) -> None:
    """Weights must hold each update once, and as many as their version says.

    Where updates are `filtered`, some bring nothing, and others more than one. Shards that are
    restored `in_parts` may have lost some to some blocks.
    """
    counter, cells = values[0], values[1:]
    if cells.max() > 1:
        twice = np.flatnonzero(cells > 1).tolist()
        require(False, "twice", f"{what}: applied more than once: {twice}")
    if in_parts:
        return
    total = cells.sum()
    fits = total <= WITHHELD * version if filtered else total == version
    if not (counter == total and fits):
        text = f"{what}: version {version}, but counter {counter:g} and {total:g} updates"
        require(False, "counts", text)


def cells_in(values: np.ndarray) -> set[int]:
    """The cells whose updates are in the weights."""
    return set(values[1:].nonzero()[0].tolist())


def cells_of(worker: str) -> range:
    """The cells that the updates of a worker with this name add to."""
    first = int(worker.partition("-")[2]) * CELLS
    return range(first, first + CELLS)
