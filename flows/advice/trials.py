"""The trials behind an estimate: which are run, on all cores at once, and what they measure.

First each strategy runs without a failure, which tells its pace and what a write of a checkpoint
costs, from which the interval follows. Then one node is killed in each trial: the seeds are dealt
out evenly to the roles, and those of a role to moments that lie evenly over the interval of
checkpoints, each drawn within its part. The setback is the difference to the same seed's trial
without the kill.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from dps.cluster.backends.fork_server import ENVIRONMENT, environment
from dps.cluster.backends.lifetime import end_with_parent, without_interrupts
from dps.core.checkpoint_interval import AutoInterval, Estimate, FailureHistory
from dps.errors import DpsError
from dps.protocol.durabilities.checkpoint import LEAST, MOST
from flows.advice import emulation
from flows.advice.emulation import Job, Measured
from flows.advice.goodput import twice_within
from flows.advice.situation import Layout, Situation, Strategy

Run = Callable[[Sequence[Job]], Sequence[Measured]]


@dataclass(frozen=True)
class Strikes:
    """What the loss of a node of one role did, seed by seed, against the control.

    Attributes
    ----------
    setbacks
        Seconds by which the training took longer, in trials whose outage may have been cut short.
    lost, stale, down
        Updates of the shard lost, gradients applied late, and seconds without the shard.
    failure
        Why a training ended by it; "": none did.
    """

    setbacks: tuple[float, ...]
    lost: tuple[float, ...]
    stale: tuple[float, ...]
    down: tuple[float, ...]
    failure: str = ""


@dataclass(frozen=True)
class Trialled:
    """One strategy as its trials measured it.

    Attributes
    ----------
    every
        Updates between two checkpoints at most, in the trials with a kill.
    rate, idle
        Gradients a second without a failure, and the share of time that workers wait.
    write
        What writes of checkpoints take and cost; None: there are none.
    strikes
        By the role of the node that was lost.
    """

    strategy: Strategy
    layout: Layout
    every: int
    rate: float
    idle: float
    write: Estimate | None
    strikes: Mapping[str, Strikes]


def interval(write: Estimate, mtbf: float) -> int:
    """Return the interval that `every: auto` comes to, in updates, by what a write costs."""
    auto = AutoInterval(LEAST, MOST, mtbf, begins_early=True)
    return auto.choose(write, FailureHistory()).every


def between_restores(situation: Situation, strategy: Strategy, mtbf: float | None = None) -> float:
    """Return how long a shard goes without being restored from a checkpoint, in seconds.

    Parameters
    ----------
    mtbf
        Mean time between failures of a server-side node, in seconds, if not the situation's.
    """
    mtbf = situation.mtbf if mtbf is None else mtbf
    return 1 / twice_within(1, mtbf, situation.again) if strategy.layered else mtbf


def number_of_trials(strategies: Sequence[Strategy], seeds: int) -> int:
    """Return how many trials `run_trials` runs."""
    return len(strategies) * (1 + 2 * seeds)


def run_trials(
    situation: Situation, strategies: Sequence[Strategy], seeds: int, run: Run
) -> list[Trialled]:
    """Measure strategies, the first of which is that without recovery.

    Parameters
    ----------
    run
        Runs trials and returns what they came to, in their order.
    """
    layouts = [emulation.layout(situation, strategy) for strategy in strategies]
    steady = run([_control(situation, s, emulation.STEADY_EVERY, 0) for s in strategies])
    for strategy, measured in zip(strategies, steady, strict=True):
        if measured.failure:
            raise DpsError(
                f"{strategy.label}: the training ends without any failure of a node: "
                f"{measured.failure}"
            )
    plain = steady[0].rate
    rates = {s.label: m.rate for s, m in zip(strategies, steady, strict=True)}
    writes = [
        _write(situation, rates.get(s.above, plain), m) if s.checkpoints else None
        for s, m in zip(strategies, steady, strict=True)
    ]
    everies = [
        min(interval(write, between_restores(situation, s)), emulation.MOST_BETWEEN)
        if write
        else situation.workers
        for s, write in zip(strategies, writes, strict=True)
    ]
    strikes = _strikes(situation, strategies, layouts, everies, seeds, run)
    return [
        Trialled(*each)
        for each in zip(
            strategies,
            layouts,
            everies,
            (m.rate for m in steady),
            (m.idle for m in steady),
            writes,
            strikes,
            strict=True,
        )
    ]


@contextmanager
def parallel(situation: Situation, tell: Callable[[int], None]) -> Iterator[Run]:
    """Run trials in processes of their own, one for each core, which leave nothing behind.

    Parameters
    ----------
    tell
        Is called with how many trials are over.

    Raises
    ------
    DpsError
        A process was lost, as where there is not enough memory.
    """
    spawn = multiprocessing.get_context("spawn")
    over = 0
    with (
        tempfile.TemporaryDirectory(prefix="dps-advise-") as folder,
        ProcessPoolExecutor(_cores(), spawn, initializer=_begin_process) as pool,
    ):

        def run(jobs: Sequence[Job]) -> list[Measured]:
            nonlocal over
            with environment(ENVIRONMENT), without_interrupts():
                futures = [pool.submit(emulation.simulate, situation, j, folder) for j in jobs]
            measured = []
            for future in futures:
                measured.append(future.result())
                over += 1
                tell(over)
            return measured

        try:
            yield run
        except BrokenProcessPool:
            raise DpsError("a process that ran trials was lost; run it again") from None
        finally:
            pool.shutdown(cancel_futures=True)


# -- parts -------------------------------------------------------------------------------------


def _control(situation: Situation, strategy: Strategy, every: int, seed: int) -> Job:
    return Job(strategy, every, seed, emulation.updates(situation, strategy, every))


def _write(situation: Situation, plain: float, measured: Measured) -> Estimate:
    """What a write holds up, by the pace with checkpoints and `plain`, that without."""
    due = emulation.STEADY_EVERY / 2
    took = situation.profile.disk.seconds(round(situation.nbytes / situation.servers))
    during = took * plain
    held_up = max(0.0, 1 / measured.rate - 1 / plain) * max(due, during)
    return Estimate(plain, min(held_up, took), during)


def _strikes(
    situation: Situation,
    strategies: Sequence[Strategy],
    layouts: Sequence[Layout],
    everies: Sequence[int],
    seeds: int,
    run: Run,
) -> list[dict[str, Strikes]]:
    jobs: list[Job] = []
    roles: list[tuple[int, str]] = []
    for index, (strategy, layout, every) in enumerate(
        zip(strategies, layouts, everies, strict=True)
    ):
        for role, job in _struck(situation, strategy, layout, every, seeds):
            jobs += [_control(situation, strategy, every, job.seed), job]
            roles.append((index, role))
    results = run(jobs)
    pairs: defaultdict[tuple[int, str], list[tuple[Measured, Measured]]] = defaultdict(list)
    for place, control, struck in zip(roles, results[::2], results[1::2], strict=True):
        pairs[place].append((control, struck))
    found: list[dict[str, Strikes]] = [{} for _ in strategies]
    for (index, role), measured in pairs.items():
        found[index][role] = _together(measured)
    return found


def _struck(
    situation: Situation, strategy: Strategy, layout: Layout, every: int, seeds: int
) -> Iterator[tuple[str, Job]]:
    roles = sorted(layout.nodes, key=lambda role: -layout.nodes[role])
    for number, role in enumerate(roles):
        own = range(number, seeds, len(roles))
        for part, seed in enumerate(own):
            random = Random(f"{seed}/{role}")
            phase = int(every * (part + random.random()) / len(own))
            node = layout.of(role)[part % layout.nodes[role]]
            kill = node, emulation.begin(situation) + phase
            yield (
                role,
                Job(strategy, every, seed, emulation.updates(situation, strategy, every), kill),
            )


def _together(pairs: Iterable[tuple[Measured, Measured]]) -> Strikes:
    pairs = list(pairs)
    failures = [struck.failure for _, struck in pairs if struck.failure]
    if failures:
        return Strikes((), (), (), (), failures[0])
    return Strikes(
        tuple(struck.seconds - control.seconds for control, struck in pairs),
        tuple(struck.lost for _, struck in pairs),
        tuple(struck.stale for _, struck in pairs),
        tuple(struck.down for _, struck in pairs),
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it is interrupted too
    end_with_parent(lambda: None)
