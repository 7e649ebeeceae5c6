"""L1-regularised logistic regression by delayed block proximal gradient descent.

The objective is P(w) = (1/N)·Σ log(1 + exp(−yᵢ·xᵢᵀw)) + λ·‖w‖₁. The intercept is the weight of a
column of ones and is penalised like the others, as in liblinear. It is the first problem of Li et
al. (OSDI 2014, section 5.1; NIPS 2014): examples are divided over workers, and features into
blocks. Each worker pushes its part of the gradient of one block after the other, at weights that
may lack the other workers' latest steps.

A worker pushes the change of its part, and the server steps along the sum of all parts
(`Aggregated`). The KKT filter withholds an element while its weight is zero and the worker's
gradient is too small to change that. The change is not lost: it becomes a part of the next pushed
one. Because a single worker may be wrong, everything is pushed from time to time. Most weights stay
zero, so exact pulls are also small.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dps import (
    L1,
    SSP,
    ConfigurationError,
    DelayedProximal,
    DpsError,
    ParameterServer,
    SignificantlyModified,
    Worker,
)
from examples.aggregated import Aggregated
from examples.logistic_loss import Array, Arrays, Spread, liblinear
from examples.outcome import PATIENT, Outcome, Task
from examples.sparse_data import Digits, Source, Synthetic, survey

if TYPE_CHECKING:
    from distributed import Client

TOLERANCE = 0.001
BOUND = 1  # how many pushes a worker may be ahead of another: SSP(1)
BLOCKS = 4
STRENGTH = 0.05  # λ, as a fraction of the one above which all weights are zero
ROUNDING = 1e-12  # gradient at zero, as a fraction of what typical features could bring about
SLACK = 0.1  # δ of the KKT filter, as a fraction of λ
UNFILTERED = 20  # in every so-manieth sweep nothing is left out
SWEEPS, ROUNDS = 40, 100  # sweeps over the blocks between two looks at the objective; looks at most
LARGE = Synthetic(1_000_000, 1_000_000)


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of a worker.

    `known` is its gradient as the server has it, `pushed` the number of elements that it has
    pushed.
    """

    known: Arrays
    pushed: int
    share_bytes: int
    peak_bytes: int


def train(spread: Spread, penalty: float, before: list[Trained], worker: Worker) -> Trained:
    """Process the blocks `SWEEPS` times, continuing from the worker's earlier result."""
    share = spread.share(worker.index)
    known, pushed = dict(before[worker.index].known), before[worker.index].pushed
    weights = worker.pull()
    for sweep in range(SWEEPS):
        for name in spread.blocks:
            share.follow(weights)
            part = share.gradient(name)
            matters = np.abs(worker.workers * part) > (1 - SLACK) * penalty
            matters |= (weights[name] != 0) | (sweep % UNFILTERED == 0)
            change = np.where(matters, part - known[name], 0.0)
            known[name] = known[name] + change
            pushed += int(np.count_nonzero(change))
            weights = worker.push_pull({name: change})
    if worker.dropped:
        raise DpsError(f"{worker.name}: {worker.dropped} updates were dropped, the sum lacks them")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Trained(known, pushed, share.nbytes, peak)


def solve(client: Client, task: Task) -> Outcome:
    """Train until the objective stops falling, and compare with scikit-learn."""
    source: Source = LARGE if task.size == "large" else Digits()
    spread = Spread.of(survey(task.data) if task.data else source, BLOCKS, task.workers)
    curvature, at_zero = spread.constants(client)
    penalty = STRENGTH * float(np.abs(at_zero).max())
    if penalty < ROUNDING * np.sqrt(curvature.max()):
        raise ConfigurationError(
            f"{task.data}: no feature goes with the labels more than by rounding: the best weights "
            "are all zero, and there is nothing to learn"
        )
    rule = step_rule(curvature, task.workers, penalty)
    ended = [Trained(spread.zeros, 0, 0, 0)] * task.workers
    objective = [np.inf]
    with ParameterServer(
        client,
        spread.zeros,
        shards=task.shards,
        optimizer=Aggregated(rule),
        consistency=SSP(BOUND),
        filters={"*": [SignificantlyModified(0.0)]},  # zeros are not sent
        pull_filters={"*": [SignificantlyModified(0.0)]},  # nor weights that have not changed
        recovery=task.recovery,
        timings=PATIENT,
    ) as ps:
        while len(objective) <= ROUNDS:
            futures = ps.run(partial(train, spread, penalty, ended), task.workers)
            ended = client.gather(futures)
            weights = ps.pull()
            objective.append(spread.judge(client, weights, penalty)[0])
            if objective[-1] > objective[-2] * (1 - TOLERANCE / 10):
                break
    # The reference's solution bounds the optimum best, and the bound holds whoever found it.
    reference, bound = spread.judge(client, liblinear(spread, penalty), penalty)
    named = "scikit-learn's liblinear"
    notes = (
        f"{spread.source.examples:,} examples × {spread.source.features:,} features, "
        f"λ = {penalty:.4g}, γ = {rule.learning_rate:.3g} for delays up to {rule.tau}",
        f"no weights reach less than {bound:.6g} (dual problem), {objective[-1] / bound - 1:.3%} "
        "below what was reached",
        *figures(spread, weights, ended, sweeps=SWEEPS * (len(objective) - 1)),
    )
    return Outcome("objective", objective[-1], reference, named, TOLERANCE, notes)


def step_rule(curvature: Array, workers: int, penalty: float) -> DelayedProximal:
    """Return the step size by the paper's rule, from the curvature between the blocks.

    The server's sum has a worker's part of a block until that worker's next push of the block.
    Until then, every worker pushes each block about once. So L_cov is the mean over the blocks that
    change, for the most affected block.
    """
    delay = workers * len(curvature) + (workers - 1) * (2 * BOUND + 1)
    l_var, l_cov = float(curvature.diagonal().max()), float(curvature.mean(axis=1).max())
    return DelayedProximal(l_var, l_cov, delay, L1(penalty))


def figures(spread: Spread, weights: Arrays, ended: list[Trained], sweeps: int) -> tuple[str, ...]:
    """Return notes on the training."""
    nonzero = sum(np.count_nonzero(array) for array in weights.values())
    pushed = sum(trained.pushed for trained in ended)
    left_out = 1 - pushed / (spread.workers * sweeps * spread.source.features)
    share = max(trained.share_bytes for trained in ended) / 1e6
    peak = max(trained.peak_bytes for trained in ended) / 1e6
    return (
        f"{nonzero:,} weights are not zero after {sweeps} sweeps over {len(weights)} blocks; "
        f"the KKT filter left out {left_out:.1%} of the elements",
        f"a worker's share takes {share:.1f} MB, its whole process {peak:.0f} MB at most",
    )
