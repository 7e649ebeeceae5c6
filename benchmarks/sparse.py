"""`make bench-sparse`: keys per second of sparse tables, and of other ways to hold the rows.

All systems do the same with random keys out of a table that is full: read their rows, and apply a
gradient of them (SGD). They take turns in short rounds, so that other work on the machine slows all
of them. The ratios are reported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.core.tables.table import SparseSpec
from flows.metrics.updates import nearest_rank

KEYS = 100_000
WIDTH = 16
SHARDS = 4
ROWS = 500_000
CALLS = 5
ROUNDS = 7
LEARNING_RATE = 0.1
TABLE = "rows"

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """The seconds of each pull and of each push."""

    pulls: list[float]
    pushes: list[float]


# Makes a number of pulls and pushes, of keys that the seed draws.
Timed = Callable[[int, int], Turn]


@dataclass(frozen=True, slots=True)
class Row:
    """One system: medians in keys per second, and the seconds of a push that is among the slowest.

    `push_p99` is there because a table may do the work of many pushes at once, in one of them.
    """

    name: str
    pull: float
    push: float
    push_p99: float


def sparse(notify: Notify, rounds: int = ROUNDS, rows: int = ROWS) -> list[Row]:
    """Time the systems in turn, the first round not counted: it maps memory and connects."""
    with contextlib.ExitStack() as stack:
        systems = {name: stack.enter_context(make(rows)) for name, make in _systems().items()}
        turns: dict[str, list[Turn]] = {name: [] for name in systems}
        for number in range(rounds + 1):
            for name, timed in systems.items():
                turns[name].append(timed(number, CALLS))
            notify(f"round {number} of {rounds}")
    return [summed_up(name, of_system[1:]) for name, of_system in turns.items()]


def table(rows: Sequence[Row], rounds: int = ROUNDS) -> str:
    """The rows as text, each with dps's keys per second as a multiple of its own."""
    ours = rows[0]
    lines = [
        f"{KEYS:,} random keys of {ROWS:,}, width {WIDTH}, float32, {SHARDS} shards, medians of "
        f"{rounds} rounds in turn, in million keys per second,",
        f"and the 99th percentile of {rounds * CALLS} pushes, in ms",
        "",
        f"{'':<28} {'pull':>8} {'push':>8} {'push p99':>9} {'dps pulls':>11} {'dps pushes':>11}",
    ]
    for row in rows:
        ratios = f"{ours.pull / row.pull:>10.2f}× {ours.push / row.push:>10.2f}×"
        speeds = f"{row.pull / 1e6:>8.2f} {row.push / 1e6:>8.2f} {1e3 * row.push_p99:>9.1f}"
        lines.append(f"{row.name:<28} {speeds} {ratios}")
    if len(rows) < len(_SYSTEMS):
        missing = "in a clone of dps, pip install -e '.[bench]' has it measured as well"
        lines += ["", f"Ray is not installed; {missing}"]
    return "\n".join(lines)


def summed_up(name: str, turns: Sequence[Turn]) -> Row:
    """A system's row. A turn counts with all its seconds: also those of the few slow pushes."""
    pull = statistics.median(KEYS / statistics.mean(turn.pulls) for turn in turns)
    push = statistics.median(KEYS / statistics.mean(turn.pushes) for turn in turns)
    slow = nearest_rank([seconds for turn in turns for seconds in turn.pushes], 0.99)
    return Row(name, pull, push, slow or 0.0)


def universe(rows: int) -> np.ndarray:
    """The keys of the full table."""
    return np.random.default_rng(0).integers(0, 1 << 62, rows)


def drawn(rows: int, seed: int, calls: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys to read and push to, and a gradient, for each call."""
    random = np.random.default_rng([1, seed])
    every = universe(rows)
    for _ in range(calls):
        keys = every[random.choice(rows, KEYS, replace=False)]
        yield keys, random.normal(size=(KEYS, WIDTH)).astype(np.float32)


def timed_turn(
    pull: Callable[[np.ndarray], Any],
    push: Callable[[np.ndarray, np.ndarray], Any],
    rows: int,
    seed: int,
    calls: int,
) -> Turn:
    """Pull and push so often, and time each."""
    turn = Turn([], [])
    for keys, gradient in drawn(rows, seed, calls):
        began = time.perf_counter()
        pull(keys)
        between = time.perf_counter()
        push(keys, gradient)
        turn.pulls.append(between - began)
        turn.pushes.append(time.perf_counter() - between)
    return turn


# -- dps -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _dps(rows: int) -> Iterator[Timed]:
    nodes = [NodeSpec(f"server-{shard}", "server") for shard in range(SHARDS)]
    nodes.append(NodeSpec("worker-0", "worker"))
    spec = SparseSpec(TABLE, WIDTH)
    with (
        LocalCluster(nodes, ("dps.cluster.driver.parameter_server", __name__)) as cluster,
        ParameterServer(
            cluster.client, {}, tables=[spec], shards=SHARDS, optimizer=SGD(LEARNING_RATE)
        ) as ps,
    ):
        (filled,) = ps.run(partial(_fill, rows), workers=1)
        filled.result()

        def timed(seed: int, calls: int) -> Turn:
            (future,) = ps.run(partial(_turn, rows, seed, calls), workers=1)
            turn: Turn = future.result()
            return turn

        yield timed


def _fill(rows: int, worker: Worker) -> None:
    for keys in np.array_split(universe(rows), -(-rows // KEYS)):
        worker.push(rows={TABLE: (keys, np.ones((len(keys), WIDTH), np.float32))})


def _turn(rows: int, seed: int, calls: int, worker: Worker) -> Turn:
    def push(keys: np.ndarray, gradient: np.ndarray) -> None:
        worker.push(rows={TABLE: (keys, gradient)})

    return timed_turn(partial(worker.pull_rows, TABLE), push, rows, seed, calls)


# -- a dictionary of arrays ------------------------------------------------------------------------


class Dictionary:
    """The simplest way to hold rows: one small array for each key."""

    def __init__(self, keys: Sequence[int]) -> None:
        self._rows = {key: np.ones(WIDTH, np.float32) for key in keys}

    def pull(self, keys: np.ndarray) -> np.ndarray:
        """Return the rows of these keys."""
        return np.stack([self._rows[key] for key in keys.tolist()])

    def push(self, keys: np.ndarray, gradient: np.ndarray) -> None:
        """Apply a gradient."""
        rows = self._rows
        for key, step in zip(keys.tolist(), gradient * LEARNING_RATE, strict=True):
            rows[key] -= step


@contextlib.contextmanager
def _dictionary(rows: int) -> Iterator[Timed]:
    held = Dictionary(universe(rows).tolist())
    yield partial(timed_turn, held.pull, held.push, rows)


# -- Ray actors that hold dictionaries -------------------------------------------------------------


@contextlib.contextmanager
def _ray(rows: int) -> Iterator[Timed]:
    import ray

    ray.init(num_cpus=SHARDS, include_dashboard=False, log_to_driver=False)
    try:
        keys = universe(rows)
        actor = ray.remote(Dictionary)
        actors = [actor.remote(keys[keys % SHARDS == s].tolist()) for s in range(SHARDS)]

        def pull(wanted: np.ndarray) -> np.ndarray:
            homes = wanted % SHARDS
            replies = [a.pull.remote(wanted[homes == s]) for s, a in enumerate(actors)]
            out = np.empty((len(wanted), WIDTH), np.float32)
            for shard, part in enumerate(ray.get(replies)):
                out[homes == shard] = part
            return out

        def push(wanted: np.ndarray, gradient: np.ndarray) -> None:
            parts = [wanted % SHARDS == s for s in range(SHARDS)]
            pushed = zip(actors, parts, strict=True)
            ray.get([a.push.remote(wanted[part], gradient[part]) for a, part in pushed])

        yield partial(timed_turn, pull, push, rows)
    finally:
        ray.shutdown()


_SYSTEMS: dict[str, Callable[[int], Any]] = {
    f"dps, {SHARDS} shards": _dps,
    "dictionary, same process": _dictionary,
    f"dictionaries, {SHARDS} Ray actors": _ray,
}


def _systems() -> dict[str, Callable[[int], Any]]:
    """Those that can be measured here."""
    has_ray = importlib.util.find_spec("ray") is not None
    return {name: make for name, make in _SYSTEMS.items() if has_ray or make is not _ray}
