"""A training that goes on from checkpoints goes on with its run of MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps import Chain, Recovery
from dps.events import Evaluated, Failover
from dps.observe.history import History
from dps.observe.mlflow_run import MlflowRun
from tests.observe.test_history import reported
from tests.support.waiting import eventually

SECONDS = 120.0
COST = ("initial", 0, "all 2 copies were gone", 12, True)
FAILOVER = Failover(1.0, 3, 4, "server-0", "client", 0.25, "server-1", True, 1, 2, *COST)


@pytest.mark.slow
@pytest.mark.timeout(600)  # MLflow makes its tables, which takes long on a busy machine
def test_a_run_is_gone_on_with_and_its_steps_too(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    store = mlflow.MlflowClient(uri)

    def run_of(
        group: str, before: str | None, *incarnations: int, name: str | None = None, shards: int = 2
    ) -> MlflowRun:
        """Log three reports of each incarnation of a worker, and an evaluation after them."""
        history = History()
        params = {"shards": shards, "recovery": Recovery(Chain(2))}
        run = MlflowRun(history, "some", name, uri, params, {}, group, before, pytest.fail)
        for incarnation in incarnations:
            versions = [100 * incarnation + report for report in (10, 20, 30)]
            own = {"incarnation": incarnation, "versions": versions}
            history.add(reported("worker-0", range(1, 4), **own))
            history.add(Evaluated(float(incarnation), 100.0 * incarnation, 0.5, 0.9))
        return run

    def steps(metric: str) -> list[int]:
        return sorted(each.step for each in store.get_metric_history(killed.id, metric))

    killed = run_of("first", None, 1, 2)  # nobody closes it
    eventually(lambda: steps("evaluator/loss") == [100, 200], SECONDS)
    assert store.get_run(killed.id).info.run_name == "dps-first"
    store.set_terminated(killed.id, "KILLED")  # somebody may have ended it by hand
    later = run_of("second", "first", 3, 4, shards=4)
    assert later.id == killed.id
    assert store.get_run(killed.id).info.status == "RUNNING"
    later.tell_of(FAILOVER)
    later.close({"updates_lost": 12}, succeeded=True)
    run = store.get_run(killed.id)
    assert run.info.status == "FINISHED"
    assert run.data.params["shards"] == "2"
    assert run.data.params["recovery"] == repr(Recovery(Chain(2)))
    assert run.data.params["recovery.durability.kind"] == "Chain"
    assert run.data.params["recovery.durability.replicas"] == "2"
    assert run.data.tags["dps.group"] == "second"
    assert run.data.tags["dps.failover.1"] == str(FAILOVER)
    assert steps("worker-0/loss") == [100 * n + k for n in range(1, 5) for k in (10, 20, 30)]
    assert steps("evaluator/loss") == [100, 200, 300, 400]
    # Another name, what it does not go on from any more, a new training: runs of their own.
    others = [run_of("a", "second", name="other"), run_of("b", "first"), run_of("c", None)]
    assert len({killed.id, *(run.id for run in others)}) == 4
