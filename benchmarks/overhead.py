"""The second half of `make bench-recovery`: the cost of each strategy without failures.

Every strategy trains in the same way, one worker with an emulated computation of fixed length, and
is compared with `none`. They take turns in short rounds, each on a fresh cluster, so that other
work on the machine slows all of them. The ratios within a round are reported.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from benchmarks.live import Watch
from benchmarks.recovery import COMPUTE_SECONDS, PARAMETERS, PATIENCE, Notify, nodes_for
from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.node.worker import Worker
from dps.core.replay import Continue
from dps.core.rules.rule import SGD
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery, with_checkpoint_path
from flows.metrics.metric import LINKS
from flows.metrics.processes import last_samples, peak_bytes

ROUNDS = 5
WARM_UP = 30
GRADIENTS = 150
MEGABYTE = 1e6
PRELOAD = ("dps.cluster.driver.parameter_server", __name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A strategy, and its target as a share of the updates per second of `none`."""

    name: str
    recovery: Recovery
    target: float


STRATEGIES = (
    Prepared("none", Recovery(), 1.0),
    Prepared("checkpoint", Recovery(Checkpoint()), 0.95),
    Prepared("chain(2)", Recovery(Chain(2)), 0.75),
    Prepared("chain(3)", Recovery(Chain(3)), 0.6),
    Prepared("stateless", Recovery(SharedStore(), Continue()), 0.7),
)

# What a sum saves takes several workers: one alone waits for the reply to its last update.
CROWD = 4
SUMMED = (
    Prepared("chain(2)", Recovery(Chain(2)), 1.0),
    Prepared(f"sums of {CROWD}", Recovery(Chain(2, aggregate=CROWD)), 0.0),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn of one strategy; bytes are those of a single update."""

    rate: float
    sent: Mapping[str, float]
    memory: int


def costs(notify: Notify, rounds: int = ROUNDS) -> dict[str, list[Turn]]:
    """Run the strategies in turn with one worker; return the turns of each."""
    return _in_turn(STRATEGIES, 1, notify, rounds)


def sums(notify: Notify, rounds: int = ROUNDS) -> dict[str, list[Turn]]:
    """Run a chain with and without aggregation in turn, with several workers."""
    return _in_turn(SUMMED, CROWD, notify, rounds)


def _in_turn(
    strategies: Sequence[Prepared], workers: int, notify: Notify, rounds: int
) -> dict[str, list[Turn]]:
    turns: dict[str, list[Turn]] = {prepared.name: [] for prepared in strategies}
    for number in range(1, rounds + 1):
        for prepared in strategies:
            turns[prepared.name].append(_turn(prepared.recovery, workers))
        notify(f"without faults, workers: {workers}: round {number} of {rounds} measured")
    return turns


def table(turns: Mapping[str, Sequence[Turn]]) -> str:
    """The turns as text, one line for each strategy."""
    rounds = len(turns["none"])
    links = "".join(f"{link:>10}" for link in LINKS)
    lines = [
        f"without faults: one worker, {1e3 * COMPUTE_SECONDS:g} ms of emulated compute a gradient, "
        f"3.25 MB of parameters, connections over TLS, medians of {rounds} rounds in turn",
        "",
        f"{'':<11} {'updates':>8} {'of':>6} {'':<15} {'MB sent per update':>40}  {'peak MB':>8}",
        f"{'strategy':<11} {'per s':>8} {'none':>6}  {'target':<14}{links}  {'all nodes':>9}",
    ]
    return "\n".join([*lines, *(_line(p, turns[p.name], turns["none"]) for p in STRATEGIES)])


def sums_table(turns: Mapping[str, Sequence[Turn]]) -> str:
    """Return the savings by aggregation, as text."""
    lines = [
        f"the same with {CROWD} workers: replication after aggregation, {CROWD} updates in a sum",
        "",
        f"{'strategy':<11} {'updates/s':>9} {'of chain':>9} {'MB replicated per update':>25}",
    ]
    base = turns[SUMMED[0].name]
    for name, mine in turns.items():
        rate, replicated = median(t.rate for t in mine), median(t.sent["replicate"] for t in mine)
        lines.append(
            f"{name:<11} {rate:>9.1f} {ratio(mine, base):>9.2f} {replicated / MEGABYTE:>25.2f}"
        )
    return "\n".join(lines)


def ratio(mine: Sequence[Turn], base: Sequence[Turn]) -> float:
    """Updates per second against another strategy's, round by round."""
    return median(turn.rate / other.rate for turn, other in zip(mine, base, strict=True))


def _line(prepared: Prepared, mine: Sequence[Turn], base: Sequence[Turn]) -> str:
    share = ratio(mine, base)
    verdict = "met" if share >= prepared.target else "missed"
    target = "" if mine is base else f"≥ {prepared.target:<4g} {verdict}"
    sent = "".join(f"{median(t.sent[link] for t in mine) / MEGABYTE:>10.2f}" for link in LINKS)
    memory = median(t.memory for t in mine) / MEGABYTE
    rate = median(t.rate for t in mine)
    return f"{prepared.name:<11} {rate:>8.1f} {share:>6.2f}  {target:<14}{sent}  {memory:>9.0f}"


def _turn(recovery: Recovery, workers: int) -> Turn:
    watch = Watch()
    with (
        tempfile.TemporaryDirectory(prefix="dps-bench-") as folder,
        LocalCluster(nodes_for(recovery, workers), PRELOAD) as cluster,
    ):
        with ParameterServer(
            cluster.client,
            {"weights": np.zeros(PARAMETERS, np.float32)},
            optimizer=SGD(1e-3),
            recovery=with_checkpoint_path(recovery, folder),
            on_event=watch,
        ) as ps:
            futures = ps.run(partial(push, GRADIENTS), workers=workers)
            rates = [GRADIENTS / future.result(PATIENCE) for future in futures]
        record = watch.record
    samples = last_samples(record)
    updates = workers * (WARM_UP + GRADIENTS)
    sent = {link: sum(s.sent.get(link, 0) for s in samples) / updates for link in LINKS}
    return Turn(sum(rates), sent, peak_bytes(samples))


def push(gradients: int, worker: Worker) -> float:
    """Compute and push gradients; return the duration without the first few."""
    gradient = {name: np.ones_like(array) for name, array in worker.pull().items()}
    for number in range(WARM_UP + gradients):
        if number == WARM_UP:
            began = time.perf_counter()
        time.sleep(COMPUTE_SECONDS)
        worker.push_pull(gradient)
    return time.perf_counter() - began
