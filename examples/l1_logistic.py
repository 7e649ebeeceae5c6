"""L1-regularised logistic regression by delayed block proximal gradient descent.

P(w) = (1/N)·Σ log(1 + exp(−yᵢ·xᵢᵀw)) + λ·‖w‖₁ is to be least; the intercept is the weight of a
column of ones and is penalised like the others, as in liblinear. It is the first problem of Li et
al. (OSDI 2014, section 5.1; NIPS 2014): examples are spread over workers, features are cut into
blocks, and each worker goes through the blocks and pushes its part of a block's gradient, at
weights that may lack the other workers' latest steps.

A worker pushes by how much its part has changed, and the server steps along the sum of all parts
(`Aggregated`). The KKT filter leaves out an element while its weight is zero and its gradient, as
far as one worker can tell, too small to change that. The change is not lost but becomes a part of
the next one that is pushed; and as a single worker may be wrong, all is pushed now and then. Most
weights stay at zero, so that what workers pull is sent in little as well, exactly.
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
    """What a worker has to say in the end.

    `known` is what the server has of its gradient, `pushed` how many elements it has pushed in all.
    """

    known: Arrays
    pushed: int
    share_bytes: int
    peak_bytes: int


def train(spread: Spread, penalty: float, before: list[Trained], worker: Worker) -> Trained:
    """Go through the blocks `SWEEPS` times, from where this worker has got to before."""
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
    """Train until the objective hardly falls any more, and compare with scikit-learn."""
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
    """Choose the step size by the paper's rule, from the curvature between the blocks.

    The server's sum has a worker's part of a block until that worker's next push of the block.
    Meanwhile it pushes each block once, and so does every other worker, give or take what one may
    be ahead. The blocks take turns, so L_cov is a mean over the blocks that change, for the block
    that is affected most.
    """
    delay = workers * len(curvature) + (workers - 1) * (2 * BOUND + 1)
    l_var, l_cov = float(curvature.diagonal().max()), float(curvature.mean(axis=1).max())
    return DelayedProximal(l_var, l_cov, delay, L1(penalty))


def figures(spread: Spread, weights: Arrays, ended: list[Trained], sweeps: int) -> tuple[str, ...]:
    """What else there is to say of the training."""
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
