"""The replication of Pampari and Patel: ring balance, servers × workers, the loss of a server.

"Implementing and Benchmarking a Fault-Tolerant Parameter Server for Distributed Machine Learning
Applications". The trials are those of `configs/replicate/ftps-….yaml`; what is recorded already is
not run again, and the claims are judged from the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flows.analysis.finished import RESULTS
from flows.analysis.outcome import Outcome
from flows.config.experiment import load_experiment
from flows.execution.drivers import Drivers
from flows.execution.experiment import run_experiment
from flows.monitor.progress import PlainView
from flows.replication.claims import judged
from flows.replication.findings import Findings
from flows.replication.ftps.claims import failure_findings, ring_findings, scaling_findings
from flows.replication.ftps.measures import Measured

ViewOf = Callable[[], PlainView]

FOLDER = "replicate-ftps"
SCALING, FAILURE = "replicate/ftps-scaling", "replicate/ftps-failure"
TITLE = "Replication of “Fault-Tolerant Parameter Server”"
INTRODUCTION = (
    "Pampari and Patel train a logistic regression on even and odd digits of MNIST over servers "
    "that share the keys by consistent hashing: SGD at 0.1, 128 examples per worker, gradients "
    "summed, synchronous, 1,152 test images; all go back to the last checkpoint when a server is "
    "lost. Here the same runs on dps with real processes and SIGKILL.",
    "Otherwise than there: Fashion-MNIST's classes stand in for MNIST's; each worker computes "
    "the gradients of all keys, not of one server's; the keys of a lost server move as a whole "
    "to a spare one; and most of a gradient's time is slept, for all processes share two cores. "
    "Their relative times are those of an iteration with one server and one worker over that of "
    "the row, for only so do they agree with their samples per second.",
)


def replicate(
    full: bool, here: Path, view: ViewOf, store: str | None = None
) -> tuple[Findings, Sequence[Outcome]]:
    """Run the trials that are not recorded yet, and judge the paper's claims from all of them.

    What came of those that failed is returned as well.

    Parameters
    ----------
    full
        The whole replication (about 1¼ hours on 2 idle cores), or a short one (15 minutes).
    here
        The working directory: `results/` and `mlruns/` are in it.
    view
        Makes what is told how an experiment goes.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.
    """
    scaling, failure = (_trials(c, full, here, view, store) for c in (SCALING, FAILURE))
    used = [[trial for trial in trials if trial.comparable] for trials in (scaling, failure)]
    parts = [ring_findings(), scaling_findings(used[0]), failure_findings(used[1])]
    claims = judged([claim for part in parts for claim in part.claims])
    how_many = _how_many([*scaling, *failure], sum(map(len, used)), full)
    findings = Findings(
        TITLE,
        [*INTRODUCTION, f"{how_many} {reading(len(claims))}"],
        claims,
        [table for part in parts for table in part.tables],
        [chart for part in parts for chart in part.charts],
    )
    outcomes = (trial.outcome for trial in (*scaling, *failure))
    return findings, [outcome for outcome in outcomes if outcome.status == "failed"]


def folder(full: bool, here: Path) -> Path:
    """Where page, text and figures are written."""
    return here / RESULTS / (FOLDER if full else f"{FOLDER}-short")


def reading(claims: int) -> str:
    """Say how so many claims are judged."""
    return (
        "A claim holds if its effect is shown to be on the claimed side of its bound, and does not "
        "hold if it is shown to be on the other: one-sided tests at 2.5% for both, corrected by "
        f"Holm's method for all {claims} claims, so that the probability that any verdict is wrong "
        "by chance is at most 5%. Intervals are those of the mean over seeds: of a claim at the "
        "level at which it was judged, elsewhere of 95%."
    )


def _trials(config: str, full: bool, here: Path, view: ViewOf, store: str | None) -> list[Measured]:
    experiment = load_experiment(config, () if full else _shorter(config))
    with Drivers() as drivers:
        ran = run_experiment(experiment, here, view(), drivers, store, resume=False)
    in_order = sorted(ran.trials, key=lambda done: done.events_file)
    return [Measured(done.record, done.outcome) for done in in_order]


def _how_many(trials: Sequence[Measured], used: int, full: bool) -> str:
    command = "dps replicate ftps --full" if full else "dps replicate ftps"
    left_out = len(trials) - used
    reason = (
        "their failure did not happen, they ended in an error, were interrupted and gone on with, "
        "or a worker was given up"
    )
    others = f"; {left_out} more are left out, for {reason}" if left_out else ""
    return f"{used} trials, by “{command}”{others}."


def _shorter(config: str) -> list[str]:
    """What the short version sets: fewer seeds and iterations, in folders of its own."""
    name = f"experiment={config.replace('/', '-')}-short"
    if config == FAILURE:
        return [name, "seeds=[0, 1, 2, 3]", "training.updates=750"]
    workers = {_workers(n): _training(n, iterations=60) for n in (1, 2, 4, 8)}
    return [name, "seeds=[0, 1, 2]", f"axes.training={json.dumps(workers)}"]


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _training(workers: int, iterations: int) -> Mapping[str, float]:
    return {
        "workers": workers,
        "updates": workers * iterations,
        "batch_size": 128,
        "compute_seconds": 0.1,
    }
