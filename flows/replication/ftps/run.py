"""The replication of Pampari and Patel: ring balance, servers × workers, the loss of a server.

"Implementing and Benchmarking a Fault-Tolerant Parameter Server for Distributed Machine Learning
Applications". The trials are those of `configs/replicate/ftps-….yaml`; what is recorded already is
not run again, and the claims are judged from the records. All of them can be on virtual time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from flows.analysis.outcome import Outcome
from flows.analysis.virtual_time import told
from flows.config.experiment import ExperimentConfig, load_experiment
from flows.config.trials import expand
from flows.execution.drivers import Drivers
from flows.execution.experiment import run_experiment
from flows.execution.plan import at_once_by_default
from flows.monitor.progress import PlainView
from flows.replication.agreement import compared
from flows.replication.claims import Claim, judged
from flows.replication.findings import Findings
from flows.replication.ftps.claims import failure_findings, ring_findings, scaling_findings
from flows.replication.ftps.measures import Measured
from flows.replication.verdicts import ClaimVerdict, Verdicts
from flows.replication.version import Version

ViewOf = Callable[[], PlainView]

PAPER: Final = "ftps"
SCALING, FAILURE = "replicate/ftps-scaling", "replicate/ftps-failure"
TITLE = "Replication of “Fault-Tolerant Parameter Server”"
INTRODUCTION = (
    "Pampari and Patel train a logistic regression on even and odd digits of MNIST over servers "
    "that share the keys by consistent hashing: SGD at 0.1, 128 examples per worker, gradients "
    "summed, synchronous, 1,152 test images; all go back to the last checkpoint when a server is "
    "lost.",
    "Otherwise than there: Fashion-MNIST's classes stand in for MNIST's; each worker computes "
    "the gradients of all keys, not of one server's; and the keys of a lost server move as a whole "
    "to a spare one. "
    "Their relative times are those of an iteration with one server and one worker over that of "
    "the row, for only so do they agree with their samples per second.",
)

REAL = (
    "Here the same runs on dps with real processes and SIGKILL; most of a gradient's time is "
    "slept, for all processes share two cores."
)


def replicate(
    version: Version,
    here: Path,
    view: ViewOf,
    store: str | None = None,
    beside: Verdicts | None = None,
) -> tuple[Findings, Sequence[Outcome]]:
    """Run the trials that are not recorded yet, and judge the paper's claims from all of them.

    What came of those that failed is returned as well.

    Parameters
    ----------
    version
        The whole replication (on real processes about 1¼ hours on 2 idle cores), or a short one (15
        minutes); on virtual time some minutes.
    here
        The working directory: `results/` and `mlruns/` are in it.
    view
        Makes what is told how an experiment goes.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.
    beside
        Verdicts of real processes, which those of virtual time are compared with.
    """
    scaling, failure = (_trials(c, version, here, view, store) for c in (SCALING, FAILURE))
    used = [[trial for trial in trials if trial.comparable] for trials in (scaling, failure)]
    parts = [ring_findings(), scaling_findings(used[0]), failure_findings(used[1])]
    claims = judged([claim for part in parts for claim in part.claims])
    verdicts = _verdicts(claims, version)
    said, tables = [_how_many([*scaling, *failure], sum(map(len, used)), version)], []
    if version.virtual:
        comparison, table = compared(beside, verdicts)
        said, tables = [*said, *comparison], [table]
    findings = Findings(
        f"{TITLE}, on virtual time" if version.virtual else TITLE,
        [*INTRODUCTION, _time([*scaling, *failure]), *said, reading(len(claims))],
        claims,
        [*tables, *(table for part in parts for table in part.tables)],
        [chart for part in parts for chart in part.charts],
        verdicts,
    )
    outcomes = (trial.outcome for trial in (*scaling, *failure))
    return findings, [outcome for outcome in outcomes if outcome.status == "failed"]


def reading(claims: int) -> str:
    """Say how so many claims are judged."""
    return (
        "A claim holds if its effect is shown to be on the claimed side of its bound, and does not "
        "hold if it is shown to be on the other: one-sided tests at 2.5% for both, corrected by "
        f"Holm's method for all {claims} claims, so that the probability that any verdict is wrong "
        "by chance is at most 5%. Intervals are those of the mean over seeds: of a claim at the "
        "level at which it was judged, elsewhere of 95%. The claims are fixed in the code, and no "
        "digest of them is in the records: only the history of the code tells that they were there "
        "before the trials."
    )


def _trials(
    config: str, version: Version, here: Path, view: ViewOf, store: str | None
) -> list[Measured]:
    part = experiment(config, version)
    with Drivers(at_once_by_default(expand(part))) as drivers:
        ran = run_experiment(part, here, view(), drivers, store, resume=False)
    in_order = sorted(ran.trials, key=lambda done: done.events_file)
    return [Measured(done.record, done.outcome) for done in in_order]


def experiment(config: str, version: Version) -> ExperimentConfig:
    """Return the trials of one part, in folders that those of other versions never share."""
    changes = [f"experiment={version.named(config.replace('/', '-'))}"]
    if version.virtual:
        changes.append("cluster.kind=virtual")
    return load_experiment(config, [*changes, *([] if version.full else _shorter(config))])


def _verdicts(claims: Sequence[Claim], version: Version) -> Verdicts:
    return Verdicts(
        paper=PAPER,
        command=version.command(PAPER),
        virtual=version.virtual,
        claims=tuple(
            ClaimVerdict.of(each.claim, each.found, each.verdict, each.effect, turn=each.turn)
            for each in claims
        ),
    )


def _time(trials: Sequence[Measured]) -> str:
    """Say what time the trials were on, and what follows from it."""
    time = told([trial.outcome.virtual for trial in trials])
    if not time:
        return REAL
    return (
        f"Time: {time}. Here the same runs on dps, all nodes in one process. The "
        "ring's two claims take no trials and are the same on either time."
    )


def _how_many(trials: Sequence[Measured], used: int, version: Version) -> str:
    left_out = len(trials) - used
    reason = (
        "their failure did not happen, they ended in an error, were interrupted and gone on with, "
        "or a worker was given up"
    )
    others = f"; {left_out} more are left out, for {reason}" if left_out else ""
    return f"{used} trials, by “{version.command(PAPER)}”{others}."


def _shorter(config: str) -> list[str]:
    """What the short version sets: fewer seeds and iterations."""
    if config == FAILURE:
        return ["seeds=[0, 1, 2, 3]", "training.updates=750"]
    workers = {_workers(n): _training(n, iterations=60) for n in (1, 2, 4, 8)}
    return ["seeds=[0, 1, 2]", f"axes.training={json.dumps(workers)}"]


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _training(workers: int, iterations: int) -> Mapping[str, float]:
    return {
        "workers": workers,
        "updates": workers * iterations,
        "batch_size": 128,
        "compute_seconds": 0.1,
    }
