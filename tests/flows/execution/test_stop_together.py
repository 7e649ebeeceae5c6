"""Workers that stop together: the budget is common, and nobody computes alone at the end."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dps.events import Reported, Sink
from dps.recovery.manifest import find_saved
from flows.config.experiment import TrialConfig
from flows.config.trials import Trial, digest
from flows.execution.trial import run_trial
from flows.metrics.prices import load_prices
from flows.metrics.trial import Trial as Recorded
from flows.records.events import Audited, TrialResumed
from flows.records.record import EVENTS_FILE, Record, read_record
from flows.statistics.finished import Finished
from tests.support.virtual_trials import BASE, virtual_trial

WORKERS, UPDATES, SECONDS = 4, 160, 0.01
SLOW = 10
MODELS: dict[str, dict[str, Any]] = {
    "asp": {"kind": "asp"},
    "ssp": {"kind": "ssp", "tau": 4},
    "bsp": {"kind": "bsp"},
}


def trained(folder: Path, stop: str, consistency: str = "asp", **changes: Any) -> Finished:
    training = {
        "workers": WORKERS,
        "updates": UPDATES,
        "compute_seconds": SECONDS,
        "straggling": {"factor": SLOW, "workers": [0]},
        "stop": stop,
    }
    server = {"shards": 2, "lease": 5.0}
    done = virtual_trial(
        folder,
        **{"training": training, "server": server, "consistency": MODELS[consistency], **changes},
    )
    assert done.outcome.status == "valid", done.outcome.reason
    ledger = Recorded(done.record, load_prices()).ledger
    assert ledger.applied_twice == ledger.audit_mismatches == 0
    return done


def steps(done: Finished) -> dict[str, list[float]]:
    """When each worker had computed each of its gradients."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event in done.record.of(Reported):
        if event.name == "loss":
            times[event.worker] += event.times
    return times


def losses(done: Finished, worker: str) -> list[float]:
    return [
        x
        for e in done.record.of(Reported)
        if (e.worker, e.name) == (worker, "loss")
        for x in e.values
    ]


def applied(done: Finished) -> set[int]:
    return {audited.version for audited in done.record.of(Audited)}


def alone_at_the_end(done: Finished, lost: str = "") -> int:
    """How many gradients a worker computed after the first of the others had ended.

    `lost` is one that was killed and may not have come back by then.
    """
    times = {worker: each for worker, each in steps(done).items() if worker != lost}
    ends = {worker: max(each) for worker, each in times.items()}
    first = min(ends.values())
    return max(sum(t > first for t in each) for each in times.values())


@pytest.mark.parametrize("consistency", MODELS)
def test_nobody_computes_alone_at_the_end(tmp_path: Path, consistency: str) -> None:
    together = trained(tmp_path / "together", "together", consistency)
    (updates,) = applied(together)
    assert UPDATES <= updates < UPDATES + WORKERS
    assert sum(map(len, steps(together).values())) == updates
    assert alone_at_the_end(together) <= 1
    if consistency == "asp":  # what equal shares leave the slow one with
        assert alone_at_the_end(trained(tmp_path / "share", "share", consistency)) > UPDATES / 8
    if consistency == "bsp":
        assert updates == UPDATES


def test_the_batches_of_a_worker_follow_from_the_seed_and_its_number_alone(tmp_path: Path) -> None:
    """Of weights that nobody changes, losses are those of the batches, in the same order."""
    frozen = {"kind": "sgd", "learning_rate": 1e-30}
    one, other = (trained(tmp_path / s, s, optimizer=frozen) for s in ("together", "share"))
    for worker in (f"worker-{number}" for number in range(WORKERS)):
        mine, theirs = losses(one, worker), losses(other, worker)
        both = min(len(mine), len(theirs))
        assert both >= 4
        assert mine[:both] == pytest.approx(theirs[:both])


@pytest.mark.parametrize(
    ("recovery", "target"),
    [
        ("none", "server-0"),
        ("checkpoint", "server-0"),
        ("chain", "worker-1"),
        ("stateless", "server-0"),
    ],
)
def test_what_a_fault_undoes_is_computed_again(tmp_path: Path, recovery: str, target: str) -> None:
    strategy: Any = recovery
    if recovery == "checkpoint":
        strategy = {"preset": "checkpoint", "durability": {"every": 20}}
    kill = {"kind": "kill", "target": target, "at_updates": 80, "back_after": 0.1}
    done = trained(tmp_path / "trial", "together", recovery=strategy, faults=[kill])
    assert min(applied(done)) >= UPDATES
    assert alone_at_the_end(done, lost=target) <= 1


def test_workers_that_are_lost_for_good_leave_the_rest_to_the_others(tmp_path: Path) -> None:
    kill = {"kind": "kill", "target": "worker-1", "at_updates": 80, "back_after": None}
    done = trained(tmp_path / "trial", "together", faults=[kill])
    assert min(applied(done)) >= UPDATES


def test_who_has_not_seen_the_end_is_asked_to_leave_whatever_is_lost_after_it(
    tmp_path: Path,
) -> None:
    """All is lost while the slow one is at its last gradient: it does not begin from the start."""
    kill = {"kind": "kill", "target": "server-0", "at_updates": UPDATES, "back_after": 0.1}
    done = trained(tmp_path / "trial", "together", recovery="none", faults=[kill])
    assert min(applied(done)) < UPDATES, "it was lost after the end"
    assert alone_at_the_end(done) <= 1


def test_workers_that_come_and_go_stop_together_anyway(tmp_path: Path) -> None:
    change = {"at_updates": 40, "workers": 2}
    done = trained(tmp_path / "trial", "together", elastic=[change])
    assert min(applied(done)) >= UPDATES


# -- on processes ------------------------------------------------------------------------------

# Each of the three workers may have a gradient under way when all shards have enough, and computes
# another if one of its shards had replied before that.
MAX_OVER = 2 * 3


def on_processes(
    folder: Path,
    sink: Sink = lambda _: None,
    path: str | None = None,
    updates: int = 200,
    **changes: Any,
) -> Record:
    training = {"workers": 3, "updates": updates, "compute_seconds": 0.03, "stop": "together"}
    cluster = {"kind": "local", "tls": "off"}
    settings = {**BASE, "training": training, "cluster": cluster, **changes}
    config = TrialConfig.model_validate(settings)
    folder.mkdir()
    run_trial(Trial("a-trial", "real", {}, 3, config, digest(config)), folder, sink, path)
    return read_record(folder / EVENTS_FILE)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_trial_that_goes_on_has_the_same_budget(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    recovery = {"durability": {"kind": "checkpoint", "every": 10, "path": path}}
    # It fails for the lack of time, and leaves what it had saved by then.
    begun = on_processes(tmp_path / "begun", recovery=recovery, time_limit=1.5)
    assert begun.ended is not None
    assert "within the time limit" in begun.ended.reason
    # Shards are saved each by itself, and stay as far apart: the last one has to have enough.
    saved = [state.version for state in find_saved(path).states]
    most = 200 + MAX_OVER + max(saved) - min(saved)
    record = on_processes(tmp_path / "on", path=path, recovery=recovery)
    assert record.ended is not None
    assert (record.ended.status, record.ended.reason) == ("valid", "")
    (resumed,) = record.of(TrialResumed)
    assert 0 < resumed.updates < 200
    for audited in record.of(Audited):
        assert 200 <= audited.version == sum(audited.applied.values()) < most
