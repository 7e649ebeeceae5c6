"""A training that goes on from checkpoints goes on with its run of MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.events import Evaluated
from dps.observe.history import History
from dps.observe.mlflow_run import MlflowRun
from tests.observe.test_history import reported
from tests.support.waiting import eventually

SECONDS = 120.0


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
        run = MlflowRun(history, "some", name, uri, {"shards": shards}, {}, group, before)
        for incarnation in incarnations:
            history.add(reported("worker-0", range(1, 4), incarnation=incarnation))
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
    later.close({"updates_lost": 0}, succeeded=True)
    run = store.get_run(killed.id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"shards": "2"}
    assert run.data.tags["dps.group"] == "second"
    assert steps("worker-0/loss") == list(range(1, 13))
    assert steps("evaluator/loss") == [100, 200, 300, 400]
    # What the first incarnation had on its way comes after the second has begun.
    history = History()
    late = MlflowRun(history, "late", None, uri, {}, {}, "late", None)
    for incarnation, numbers in ((1, range(1, 4)), (2, range(1, 6)), (1, range(4, 5)), (3, [1])):
        history.add(reported("worker-0", numbers, incarnation=incarnation))
    late.close({}, succeeded=False)
    assert store.get_run(late.id).info.status == "FAILED"
    logged = store.get_metric_history(late.id, "worker-0/loss")
    by_step = sorted(logged, key=lambda each: (each.step, each.timestamp))
    assert [each.step for each in by_step] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    # Another name, what it does not go on from any more, a new training: runs of their own.
    others = [run_of("a", "second", name="other"), run_of("b", "first"), run_of("c", None)]
    assert len({killed.id, *(run.id for run in others)}) == 4
