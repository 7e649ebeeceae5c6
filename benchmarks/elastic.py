"""`make bench-elastic`: how long a training is held up by a shard that moves.

Two shards go back and forth between real processes under the load of workers. What counts is what
the shard itself shows: the longest time between two updates that it applied about each move, beside
what lies between two updates while nothing moves.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.live import Watch, eventually
from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.events import Applied, Moved
from dps.recovery.strategy import PRESETS, with_checkpoint_path
from flows.metrics.updates import nearest_rank
from flows.records.record import Record

SHARDS = 2
PARAMETERS = 786_432  # float32 in each shard: 3.1 MB
COMPUTE_SECONDS = 0.01
WORKERS = 2
AFTERWARDS = 0.25  # seconds after a move that still belong to it
PATIENCE = 30.0
TARGET = 0.2  # seconds that a training may be held up, 99 times of 100
STRATEGIES = ("none", "checkpoint", "chain", "stateless")
PRELOAD = ("dps.cluster.driver.parameter_server", __name__)

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """The moves of one strategy, in seconds.

    Attributes
    ----------
    moves
        What the coordinator recorded.
    gaps
        For each move, the longest time between two updates of its shard about it.
    usual
        What lay between two updates of a shard at other times.
    """

    strategy: str
    moves: Sequence[Moved]
    gaps: Sequence[float]
    usual: Sequence[float]

    @property
    def met(self) -> bool:
        """Whether the training was never held up for longer than is wanted, but 1 in 100 times."""
        worst = nearest_rank(self.gaps, 0.99)
        return worst is not None and worst <= TARGET


def moves(count: int, notify: Notify) -> list[Row]:
    """Measure so many moves with every strategy."""
    rows = []
    for strategy in STRATEGIES:
        rows.append(_row(strategy, _trained(strategy, count)))
        notify(f"{strategy}: {len(rows[-1].moves)} moves measured")
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    least = min(len(row.moves) for row in rows)
    lines = [
        f"at least {least} moves of a shard of {4 * PARAMETERS / 1e6:.1f} MB with each strategy, "
        f"under the load of {WORKERS} workers; in ms:",
        "usual: between two updates of a shard while none moves; gap: the longest about a move;",
        "switch: nobody served; whole: from the beginning of the copy until the switch was over",
        "",
        f"{'':<11} {'usual':>13} {'gap':>20} {'switch':>13} {'whole':>13}",
        f"{'strategy':<11} {'p50':>6} {'p99':>6} {'p50':>6} {'p99':>6} {'max':>6} "
        f"{'p50':>6} {'p99':>6} {'p50':>6} {'p99':>6}  target: gap p99 ≤ {1e3 * TARGET:g}",
    ]
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: Row) -> str:
    columns = (
        row.usual,
        row.gaps,
        [move.pause_seconds for move in row.moves],
        [move.seconds for move in row.moves],
    )
    cells = []
    for number, column in enumerate(columns):
        cells += [median(column), nearest_rank(column, 0.99) or 0.0]
        cells += [max(column)] if number == 1 else []
    shown = " ".join(f"{1e3 * cell:>6.1f}" for cell in cells)
    return f"{row.strategy:<11} {shown}  {'met' if row.met else 'missed'}"


def _row(strategy: str, record: Record) -> Row:
    moved = record.of(Moved)
    gaps: list[float] = []
    usual: list[float] = []
    for shard in range(SHARDS):
        batches = (b for b in record.of(Applied) if b.head and b.shard == shard)
        times = sorted(itertools.chain.from_iterable(batch.times for batch in batches))
        spans = [(m.t - m.seconds, m.t + AFTERWARDS) for m in moved if m.shard == shard]
        gaps += [_longest(times, *span) for span in spans]
        pairs = itertools.pairwise(times)
        usual += [
            after - before
            for before, after in pairs
            if not any(before < end and after > start for start, end in spans)
        ]
    return Row(strategy, moved, gaps, usual)


def _longest(times: Sequence[float], start: float, end: float) -> float:
    """The longest time between two updates, of those that lie about a span."""
    first = max(0, bisect_right(times, start) - 1)
    about = times[first : bisect_left(times, end) + 1]
    return max((b - a for a, b in itertools.pairwise(about)), default=end - start)


def _trained(strategy: str, count: int) -> Record:
    """Have shards move so often while workers push; return what happened."""
    watch, recovery = Watch(), PRESETS[strategy]
    replicas = recovery.durability.above.replicas
    names = [f"server-{i}" for i in range(replicas + 1)]
    names += [f"store-{i}" for i in range(recovery.stores)]
    names += [f"worker-{i}" for i in range(WORKERS)]
    params = {f"w{i}": np.zeros(PARAMETERS, np.float32) for i in range(SHARDS)}
    with (
        tempfile.TemporaryDirectory(prefix="dps-bench-") as folder,
        LocalCluster([NodeSpec(name, resource_of(name)) for name in names], PRELOAD) as cluster,
        ParameterServer(
            cluster.client,
            params,
            shards=SHARDS,
            servers=replicas,
            optimizer=SGD(1e-3),
            recovery=with_checkpoint_path(recovery, folder),
            on_event=watch,
        ) as ps,
    ):
        futures = ps.run(push, workers=WORKERS)
        eventually(lambda: _pushed(ps, 20), "workers that push", PATIENCE)
        for number in range(count):
            before = min(reply.version for reply in ps.audit() if reply)
            ps.scale(replicas + 1 - number % 2)
            eventually(lambda: _pushed(ps, before + 10), "workers that push", PATIENCE)  # noqa: B023
        for name in (f"worker-{i}" for i in range(WORKERS)):
            ps.remove_worker(name)
        for future in futures:
            future.result(PATIENCE)
    return watch.record


def _pushed(ps: ParameterServer, updates: int) -> bool:
    """Whether every shard has applied so many updates."""
    return all(reply is not None and reply.version >= updates for reply in ps.audit())


def push(worker: Worker) -> None:
    """Compute and push until asked to leave."""
    gradient = {name: np.ones_like(array) for name, array in worker.pull().items()}
    while not worker.leaving:
        time.sleep(COMPUTE_SECONDS)
        worker.push_pull(gradient)
