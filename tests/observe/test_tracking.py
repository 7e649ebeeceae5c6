"""A training that goes on from checkpoints goes on with its run of MLflow."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from dps import Chain, Recovery
from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Evaluated, Failover
from dps.observe.history import History
from dps.observe.tracking import MlflowRun, flat
from tests.observe.test_history import reported
from tests.support.waiting import eventually

SECONDS = 120.0
COST = ("initial", 0, "all 2 copies were gone", 12, True)
FAILOVER = Failover(1.0, 3, 4, "server-0", "client", 0.25, "server-1", True, 1, 2, *COST)


@pytest.mark.slow
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
    later.failover(FAILOVER)
    later.close({"updates_lost": 12}, succeeded=True)
    run = store.get_run(killed.id)
    assert run.info.status == "FINISHED"
    assert run.data.params["shards"] == "2"
    assert run.data.params["recovery.durability.kind"] == "Chain"
    assert run.data.params["recovery.durability.replicas"] == "2"
    assert run.data.tags["dps.group"] == "second"
    assert run.data.tags["dps.failover.1"] == str(FAILOVER)
    assert steps("worker-0/loss") == [100 * n + k for n in range(1, 5) for k in (10, 20, 30)]
    assert steps("evaluator/loss") == [100, 200, 300, 400]
    # Another name, what it does not go on from any more, a new training: runs of their own.
    others = [run_of("a", "second", name="other"), run_of("b", "first"), run_of("c", None)]
    assert len({killed.id, *(run.id for run in others)}) == 4


NAMES = ["loss", "recall@10", "recall%10", "a,b[0]", "at//end/", "../up", "x" * 400, "x" * 300]


def logged_at(uri: str, warn: Callable[[str], None]) -> MlflowRun:
    """Log three numbers under each name, and three that are none."""
    history = History()
    run = MlflowRun(history, "some", None, uri, {}, {}, "group", None, warn)
    for name in NAMES:
        history.add(reported("worker-0", range(1, 4), name))
    history.add(replace(reported("worker-0", range(1, 4), "odd"), values=(nan, inf, -inf)))
    run.close({}, succeeded=True)
    return run


@pytest.mark.slow
def test_names_and_numbers_that_mlflow_does_not_take_cost_no_others(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    told: list[str] = []
    run = logged_at(uri, told.append)
    assert told == [
        "MLflow does not accept the metric name 'worker-0/recall@10': recorded as "
        "'worker-0/recall_10'. Use letters, digits, spaces and / . - _ :"
    ]
    store = mlflow.MlflowClient(uri)
    logged = store.get_run(run.id).data.metrics
    expected = {"loss", "recall_10", "recall_10_2", "a_b_0_", "at/_/end/_", "_/up", "odd"}
    assert {f"worker-0/{name}" for name in expected} <= logged.keys()
    assert sorted(len(name) for name in logged)[-2:] == [244, 250]
    for name in logged:
        assert len(store.get_metric_history(run.id, name)) == 3


def run_at(uri: Any, experiment: Any = "some", name: Any = None) -> MlflowRun:
    return MlflowRun(History(), experiment, name, uri, {}, {}, "group", None, pytest.fail)


def test_a_store_that_cannot_be_had_is_told_with_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tmp_path / "runs"
    for uri in (f"http://127.0.0.1:{port}", folder, folder.as_uri(), "nonsense://x", "http://x:y"):
        with pytest.raises(StoreUnavailable) as caught:
            run_at(uri)
        assert str(caught.value).startswith(f"the tracking store {uri} cannot be used: ")
        assert str(caught.value).endswith("such as sqlite:///mlflow.db.")
    for wrong, name in (
        (partial(run_at, 5), "tracking_uri"),
        (partial(run_at, None, None), "experiment"),
        (partial(run_at, None, " "), "experiment"),
        (partial(run_at, None, "some", 3), "run_name"),
    ):
        with pytest.raises(ConfigurationError, match=f"^{name}="):
            wrong()


def test_a_store_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setattr("dps.observe.tracking.ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match=r"no answer within 0\.5 s"):
            run_at(uri)
    with pytest.raises(StoreUnavailable, match="unable to open"):  # MLflow tries for 100 s
        run_at(f"sqlite:///{tmp_path}")


def test_settings_are_flat_whatever_they_consist_of() -> None:
    settings = {"recovery": Recovery(Chain(2)), "a": {"b": 1, "c": {}}, "f": [1, 2], "g": None}
    found = flat({**settings, "filters": {"*": [{"kind": "lossless"}]}, "long": "x" * 20_000})
    assert found["recovery.kind"] == "Recovery"
    assert found["recovery.durability.replicas"] == "2"
    assert (found["a.b"], found["f"]) == ("1", "[1, 2]")
    assert found["filters._.0.kind"] == "lossless"
    assert found["long"].endswith("x…")
    assert not {"a.c", "g"} & found.keys()
