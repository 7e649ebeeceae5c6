"""Outages of a real MLflow server during an experiment: nothing is lost, nothing is there twice.

The server, its store and its death are real, and so are grids; where only the store counts, trials
are toys, written instead of run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from dps.errors import ConfigurationError
from flows.cli.tracking import upload as sync
from flows.config.experiment import ExperimentConfig, load_experiment
from flows.execution.attempt import Attempt
from flows.tracking.tracker import tracked_experiments
from flows.tracking.ui_server import comparison_view
from tests.flows.execution.test_experiment import ORDER, ToyRunner, experiment, go
from tests.flows.execution.test_run import CONFIG
from tests.support.commands import Command, dps
from tests.support.mlflow_server import MlflowServer
from tests.support.waiting import eventually

__all__ = ["experiment"]  # the fixture

pytestmark = [pytest.mark.cluster, pytest.mark.deployment]

TRIAL_SECONDS = 60.0
WRITTEN = ("configuration.yaml", "grid.json", "report.html")  # with the command line, or moments
SHORT: dict[str, Any] = {
    "training": {"workers": 1, "updates": 60, "compute_seconds": 0.01},
    "recovery": "chain",
    "faults": [{"kind": "kill", "target": "server-0", "at_updates": 20, "back_after": 0.2}],
}


class Grid(Command):
    """A `dps run` in a process of its own, with real trials, which writes to a server."""

    def __init__(self, here: Path, name: str, server: MlflowServer, **changes: Any) -> None:
        self.name = name
        self.config = here / f"{name}.yaml"
        self.config.write_text(yaml.safe_dump({**CONFIG, **SHORT, "experiment": name, **changes}))
        environment = {**os.environ, "MLFLOW_TRACKING_URI": server.uri}
        super().__init__(here, ["run", str(self.config)], environment)

    def dps(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command where it runs."""
        return dps(self.here, *arguments, **self.environment)

    def without_outage(self) -> dict[str, Any]:
        """What a store holds of the same records that had no outage."""
        folder = self.here / "without"
        shutil.copytree(self.here / "results", folder / "results")
        done, _ = go(load_experiment(str(self.config)), folder, ToyRunner())
        assert done.tracked
        return held(folder / "mlruns" / "mlflow.db", folder / "mlruns", self.name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def up(server: MlflowServer) -> MlflowServer:
    """The server, also after a test that left it dead."""
    if not server.is_up():
        server.start()
    return server


class Eventful(ToyRunner):
    """Does something when a trial is over, just before it is entered into the store."""

    def __init__(self, then: dict[str, Callable[[], None]]) -> None:
        super().__init__()
        self.then = then

    def write(self, attempt: Attempt) -> None:
        super().write(attempt)
        self.then.get(attempt.trial.name, lambda: None)()


def named(experiment: ExperimentConfig, name: str) -> ExperimentConfig:
    return experiment.model_copy(update={"experiment": name})


def held(database: Path, artifacts: Path, experiment: str) -> dict[str, Any]:
    """All that a store holds of an experiment, by the names of runs, but for ids and hours.

    They are all of one working directory.
    """
    client = MlflowClient(f"sqlite:///{database}")
    found = client.get_experiment_by_name(f"dps/{experiment}")
    runs = client.search_runs([found.experiment_id])
    assert len({run.data.tags.pop("dps.directory") for run in runs}) == 1
    names = {run.info.run_id: run.info.run_name for run in runs}
    for run in runs:
        if run.data.tags["dps.kind"] == "trial":
            run.data.tags["mlflow.parentRunId"] = names[run.data.tags["mlflow.parentRunId"]]
    by_name = {run.info.run_name: _contents(client, run, artifacts) for run in runs}
    assert len(by_name) == len(runs), "a run is there twice"
    return by_name


def _contents(client: MlflowClient, run: Any, artifacts: Path) -> dict[str, Any]:
    of_trial = run.data.tags["dps.kind"] == "trial"
    files = [
        path
        for path in artifacts.rglob(f"{run.info.run_id}/**/*")
        if path.is_file() and path.name not in WRITTEN
    ]
    return {
        "status": run.info.status,
        "times": (run.info.start_time, run.info.end_time) if of_trial else None,
        "tags": run.data.tags,
        "params": run.data.params,
        "metrics": {
            name: sorted(
                (m.timestamp, m.step, m.value)
                for m in client.get_metric_history(run.info.run_id, name)
            )
            for name in run.data.metrics
        },
        "files": {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files},
    }


def run_ids(server: MlflowServer, name: str) -> set[str]:
    client = MlflowClient(f"sqlite:///{server.database}")
    found = client.get_experiment_by_name(f"dps/{name}")
    return {run.info.run_id for run in client.search_runs([found.experiment_id])}


def test_a_server_killed_in_the_middle_of_a_grid_ends_with_the_same_data(
    up: MlflowServer, tmp_path: Path
) -> None:
    with Grid(tmp_path, "killed", up, seeds=[0, 1, 2]) as grid:
        eventually(lambda: "[2/3]" in grid.told, TRIAL_SECONDS)
        begun = eventually(lambda: up.half_written("killed"), TRIAL_SECONDS)
        up.kill()
        assert up.half_written("killed") == begun, "it was killed too late to show anything"
        eventually(lambda: "cannot be used" in grid.told, TRIAL_SECONDS)
        # The last trial goes on, but must not be delivered before the server is back.
        grid.process.send_signal(signal.SIGSTOP)
        up.start()
        grid.process.send_signal(signal.SIGCONT)
    told = grid.told
    assert grid.process.returncode == 0, told
    assert told.count("cannot be used") == 1
    number = tracked_experiments(up.uri)["killed"]
    assert told.endswith(f"Curves in MLflow: {up.uri}/{comparison_view(number)}\n")
    assert held(up.database, up.artifacts, "killed") == grid.without_outage()


def test_what_a_server_missed_to_the_end_is_delivered_by_sync_once(
    up: MlflowServer, tmp_path: Path
) -> None:
    with Grid(tmp_path, "missed", up, seeds=[0, 1]) as grid:
        eventually(lambda: up.half_written("missed"), TRIAL_SECONDS)
        up.kill()
    told = grid.told
    assert grid.process.returncode == 0, told
    assert told.count("cannot be used") == 1
    assert told.endswith("when the tracking store is back: dps sync missed\n")
    away = grid.dps("sync")
    assert (away.returncode, away.stdout) == (2, "")
    assert f"the tracking store {up.uri} cannot be used" in away.stderr

    up.start()
    told = grid.dps("sync").stdout
    link = f"{up.uri}/{comparison_view(tracked_experiments(up.uri)['missed'])}"
    assert told.splitlines() == [
        "missed: 2 trials written, 2 in the store",
        f"missed: Curves in MLflow: {link}",
    ]
    expected = grid.without_outage()
    assert held(up.database, up.artifacts, "missed") == expected
    before = run_ids(up, "missed")
    said: list[str] = []
    sync([], tmp_path, up.uri, said.append)
    assert said == ["missed: 0 trials written, 2 in the store"]
    assert run_ids(up, "missed") == before
    assert held(up.database, up.artifacts, "missed") == expected


def test_a_server_that_hangs_does_not_hold_up_the_trials(
    up: MlflowServer,
    experiment: ExperimentConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    runner = Eventful({ORDER[1]: up.pause})
    begun = time.monotonic()
    try:
        done, told = go(named(experiment, "hung"), tmp_path, runner, store=up.uri)
    finally:
        up.resume()
    assert time.monotonic() - begun < 100, "it is asked once, and once again at the end"
    assert not done.tracked
    assert told.count("cannot be used") == 1
    eventually(up.is_up, 30)
    sync(["hung"], tmp_path, up.uri, lambda said: None)
    assert {*ORDER, "hung"} <= set(held(up.database, up.artifacts, "hung"))


# -- sync without a server ----------------------------------------------------------------------


def test_sync_delivers_no_report_of_an_experiment_that_is_not_over(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(experiment, tmp_path, ToyRunner(interrupt=ORDER[2]))
    here = tmp_path / "here"
    shutil.copytree(tmp_path / "results", here / "results")
    said: list[str] = []
    sync(["demo"], here, None, said.append)
    assert said == [
        "demo: 2 trials written, 2 in the store",
        "demo: 2 trials missing, so no report is written",
    ]
    there = held(here / "mlruns" / "mlflow.db", here / "mlruns", "demo")
    assert set(there) & set(ORDER) == set(ORDER[:2])


def test_sync_takes_the_names_of_experiments(experiment: ExperimentConfig, tmp_path: Path) -> None:
    go(experiment, tmp_path, ToyRunner())
    said: list[str] = []
    assert sync([], tmp_path, None, said.append) == ["demo"]
    assert said == ["demo: 0 trials written, 4 in the store"]
    with pytest.raises(ConfigurationError, match="did you mean 'demo'"):
        sync(["dmo"], tmp_path, None, said.append)
