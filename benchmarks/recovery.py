"""The first half of `make bench-recovery`: the downtime of a shard when its server fails.

A group trains on real processes, with a spare. The head of the shard is killed or stopped
repeatedly, and a fresh node replaces it before the next fault. The parts of each recovery come from
the recorded events. The second half is `benchmarks.overhead`.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.live import Watch, eventually
from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.events import NodeJoined
from dps.faults.acts import Striker
from dps.protocol.timings import Timings
from dps.recovery.strategy import PRESETS, Recovery, with_checkpoint_path
from flows.metrics.faults import FaultTimes, fault_times
from flows.metrics.updates import nearest_rank
from flows.records.record import Record

PARAMETERS = 812_500  # float32: 3.25 MB
COMPUTE_SECONDS = 0.01
WORKERS = 2
PATIENCE = 30.0
STRATEGIES = ("chain", "checkpoint", "stateless")
SIGNALS = {"kill": "SIGKILL", "pause": "SIGSTOP"}
PRELOAD = ("dps.cluster.driver.parameter_server", __name__)

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The target of the seconds from a fault to the first update applied after it."""

    p50: float
    p99: float | None = None


TARGETS = {
    ("chain", "kill"): Target(0.1, 0.3),
    ("checkpoint", "kill"): Target(0.5),
    ("stateless", "kill"): Target(0.5),
}
PAUSED = Target(Timings().stopped + 0.5, Timings().stopped + 0.5)


@dataclass(frozen=True, slots=True)
class Row:
    """The recoveries of one strategy from one kind of fault."""

    strategy: str
    kind: str
    times: Sequence[FaultTimes]

    @property
    def totals(self) -> list[float]:
        """Seconds from each fault to the first update applied after it."""
        return [t.rto_seconds for t in self.times if t.rto_seconds is not None]

    @property
    def target(self) -> Target:
        """The seconds allowed. Monitors kill paused processes, so pauses have one target."""
        return TARGETS.get((self.strategy, self.kind), PAUSED)

    def rank(self, share: float) -> float:
        """The nearest-rank percentile of the totals."""
        return nearest_rank(self.totals, share) or 0.0

    @property
    def met(self) -> bool:
        """Whether the shard always came back, and in time."""
        p99 = self.target.p99
        came_back = len(self.totals) == len(self.times)
        return (
            came_back and self.rank(0.5) <= self.target.p50 and (not p99 or self.rank(0.99) <= p99)
        )


def recovery_times(repeats: int, notify: Notify) -> list[Row]:
    """Measure the recoveries of every strategy from every kind of fault."""
    rows = []
    for strategy in STRATEGIES:
        for kind in SIGNALS:
            with _Ring(strategy) as ring:
                times = [ring.fault(kind, number) for number in range(repeats)]
            rows.append(Row(strategy, kind, times))
            notify(f"{strategy}, {SIGNALS[kind]}: {repeats} recoveries measured")
    return rows


def nodes_for(recovery: Recovery, workers: int, *others: str) -> list[NodeSpec]:
    """Return the nodes of one shard and so many workers, and others by their names."""
    replicas = (f"replica-0-{i}" for i in range(1, recovery.durability.above.replicas))
    names = ["server-0", *replicas, *others, *(f"store-{i}" for i in range(recovery.stores))]
    names += [f"worker-{i}" for i in range(workers)]
    return [NodeSpec(name, resource_of(name)) for name in names]


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    repeats = max(len(row.times) for row in rows)
    lines = [
        f"from a fault to the first applied update, in ms: medians of {repeats} faults each under "
        f"the load of {WORKERS} workers,",
        "3.25 MB of parameters, spare nodes warm, connections over TLS"
        + ("" if repeats > 99 else "; p99 is the longest"),
        "",
        f"{'strategy':<11} {'fault':<8} {'detect':>7} {'decide':>7} {'restore':>8} {'first':>6} "
        f"{'p50':>7} {'p99':>7}  target",
    ]
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: Row) -> str:
    parts = (
        _median([t.detect_seconds for t in row.times]),
        _median([t.decide_seconds for t in row.times]),
        _median([_rest(t) for t in row.times]),
        _median([t.first_applied_seconds for t in row.times]),
    )
    detect, decide, restore, first = parts
    target = f"p50 ≤ {1e3 * row.target.p50:g}"
    if row.target.p99 is not None:
        target += f", p99 ≤ {1e3 * row.target.p99:g}"
    lost = len(row.times) - len(row.totals)
    verdict = "met" if row.met else "missed" + (f" ({lost} did not come back)" if lost else "")
    cells = f"{detect:>7} {decide:>7} {restore:>8} {first:>6}"
    p50, p99 = 1e3 * row.rank(0.5), 1e3 * row.rank(0.99)
    return (
        f"{row.strategy:<11} {SIGNALS[row.kind]:<8} {cells} {p50:>7.1f} {p99:>7.1f}  "
        f"{target}: {verdict}"
    )


def _rest(times: FaultTimes) -> float | None:
    """Return the rest of the restoration after the decision."""
    restore, decide = times.restore_seconds, times.decide_seconds
    return None if restore is None or decide is None else restore - decide


def _median(seconds: Sequence[float | None]) -> str:
    known = [s for s in seconds if s is not None]
    return f"{1e3 * median(known):.1f}" if known else "–"


# -- a group that loses one server after the other -------------------------------------------------


class _Ring:
    """A group under load whose lost nodes are replaced, so that there always is a warm spare."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._stack = contextlib.ExitStack()
        self._names = (f"spare-{i}" for i in count(1))
        self._random = random.Random(strategy)
        self._watch = Watch()

    def __enter__(self) -> _Ring:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dps-bench-")))
            recovery = with_checkpoint_path(PRESETS[self._strategy], str(folder / "checkpoints"))
            nodes = nodes_for(recovery, WORKERS, "spare-0")
            self._cluster = stack.enter_context(LocalCluster(nodes, PRELOAD))
            self._ps = stack.enter_context(
                ParameterServer(
                    self._cluster.client,
                    {"weights": np.zeros(PARAMETERS, np.float32)},
                    optimizer=SGD(1e-3),
                    recovery=recovery,
                    on_event=self._watch,
                    on_loss="ignore",
                )
            )
            self._striker = Striker(self._cluster, self._watch)
            stack.enter_context(_load(self._ps, folder / "stop"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def fault(self, kind: str, number: int) -> FaultTimes:
        """Make the shard's head fail once; return the recovery when a spare is ready again."""
        self._settle()
        address = self._ps.table().views[0].chain[0].address
        head = next(node.name for node in self._ps.nodes if node.address == address)
        strike = self._striker.kill if kind == "kill" else self._striker.pause
        strike(number, head, 0)
        times = self._watch.until(_recovered, f"recovery from the loss of {head}", PATIENCE)
        self._replace()
        return times

    def _settle(self) -> None:
        """Wait until every replica is there, and then for a moment, so that phases differ."""
        eventually(lambda: self._ps.table().complete, "all replicas", PATIENCE)
        time.sleep(self._random.uniform(0.3, 0.6))
        self._watch.forget()

    def _replace(self) -> None:
        name = next(self._names)
        self._cluster.start(NodeSpec(name, "server"))
        self._watch.until(partial(_joined, name), f"start of {name}", PATIENCE)


@contextlib.contextmanager
def _load(ps: ParameterServer, flag: Path) -> Iterator[None]:
    futures = ps.run(partial(push_until, str(flag)), workers=WORKERS)
    try:
        yield
    finally:
        flag.touch()
        for future in futures:
            future.result(PATIENCE)


def push_until(flag: str, worker: Worker) -> None:
    """Compute and push until there is a file `flag`."""
    gradients = {name: np.ones_like(array) for name, array in worker.pull().items()}
    while not Path(flag).exists():
        time.sleep(COMPUTE_SECONDS)
        worker.push_pull(gradients)


def _joined(name: str, record: Record) -> NodeJoined | None:
    return next((event for event in record.of(NodeJoined) if event.node == name), None)


def _recovered(record: Record) -> FaultTimes | None:
    """The parts of a recovery, once all are known: processes send their events in any order."""
    times = fault_times(record)
    if not times or times[0].rto_seconds is None or times[0].decide_seconds is None:
        return None
    return times[0]
