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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from dps.errors import ConfigurationError
from flows.cli.sync import sync
from flows.config.experiment import ExperimentConfig, load_experiment
from flows.execution.attempt import Attempt
from flows.tracking.server import trials_view
from flows.tracking.tracker import tracked_experiments
from tests.flows.execution.test_experiment import ORDER, ToyRunner, experiment, go
from tests.flows.execution.test_run import CONFIG
from tests.support.commands import DPS, Command
from tests.support.mlflow_server import MlflowServer
from tests.support.synthetic import toy_events, write_events
from tests.support.waiting import eventually

__all__ = ["experiment"]  # the fixture

pytestmark = [pytest.mark.cluster, pytest.mark.deployment, pytest.mark.timeout(300)]

TRIAL_SECONDS = 60.0
WRITTEN = "as_written.yaml"  # of what `dps run` reads; `run_experiment` is given no file here
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
        return subprocess.run(
            [*DPS, *arguments],
            cwd=self.here,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def without_outage(self) -> dict[str, Any]:
        """What a store holds of the same records that had no outage."""
        folder = self.here / "without"
        shutil.copytree(self.here / "results", folder / "results")
        runner = ToyRunner()
        done, _ = go(load_experiment(str(self.config)), folder, runner)
        assert done.tracked
        assert runner.ran == []
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


def without_outage(experiment: ExperimentConfig, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    done, _ = go(experiment, folder, ToyRunner())
    assert done.tracked
    return held(folder / "mlruns" / "mlflow.db", folder / "mlruns", experiment.experiment)


def held(database: Path, artifacts: Path, experiment: str) -> dict[str, Any]:
    """All that a store holds of an experiment, by the names of runs, but for ids and hours.

    They are all of one working directory.
    """
    client = MlflowClient(f"sqlite:///{database}")
    found = client.get_experiment_by_name(f"dps/{experiment}")
    runs = client.search_runs([found.experiment_id])
    [parent] = [run.info.run_id for run in runs if run.data.tags["dps.kind"] == "experiment"]
    assert len({run.data.tags.pop("dps.directory") for run in runs}) == 1
    for run in runs:
        if run.info.run_id != parent:
            assert run.data.tags.pop("mlflow.parentRunId") == parent
    by_name = {run.info.run_name: _contents(client, run, artifacts) for run in runs}
    assert len(by_name) == len(runs), "a run is there twice"
    return by_name


def _contents(client: MlflowClient, run: Any, artifacts: Path) -> dict[str, Any]:
    of_trial = run.data.tags["dps.kind"] == "trial"
    files = [
        path
        for path in artifacts.rglob(f"{run.info.run_id}/**/*")
        if path.is_file() and path.name != WRITTEN
    ]
    return {
        "status": run.info.status,
        "times": (run.info.start_time, run.info.end_time) if of_trial else None,
        "tags": run.data.tags,
        "params": run.data.params,
        "inputs": [each.to_dictionary() for each in run.inputs.dataset_inputs],
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
    assert told.count("cannot be used") == told.count("is back, and has what was kept") == 1
    number = tracked_experiments(up.uri)["killed"]
    assert told.endswith(f"Every run, with its curves: {up.uri}/{trials_view(number)}\n")
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
    link = f"{up.uri}/{trials_view(tracked_experiments(up.uri)['missed'])}"
    assert told.splitlines() == [
        "missed: 2 trials delivered, 2 in the store",
        f"missed: Every run, with its curves: {link}",
    ]
    expected = grid.without_outage()
    assert held(up.database, up.artifacts, "missed") == expected
    before = run_ids(up, "missed")
    said: list[str] = []
    sync([], tmp_path, up.uri, said.append)
    assert said == ["missed: 0 trials delivered, 2 in the store"]
    assert run_ids(up, "missed") == before
    assert held(up.database, up.artifacts, "missed") == expected


def test_a_server_that_hangs_does_not_hold_up_the_trials(
    up: MlflowServer,
    experiment: ExperimentConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    moments: dict[str, float] = {}

    def note(trial: str, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
        def noted() -> None:
            then()
            moments[trial] = time.monotonic()

        return noted

    _, second, third, fourth = ORDER
    runner = Eventful({second: note(second, up.pause), third: note(third), fourth: note(fourth)})
    try:
        done, told = go(named(experiment, "hung"), tmp_path, runner, store=up.uri)
    finally:
        up.resume()
    assert not done.tracked
    assert told.count("cannot be used") == 1
    asked, left_alone = moments[third] - moments[second], moments[fourth] - moments[third]
    assert left_alone < asked < 20, "twice for a second each, and not again so soon"
    eventually(up.is_up, 30)
    sync(["hung"], tmp_path, up.uri, lambda said: None)
    assert set(held(up.database, up.artifacts, "hung")) == {"hung", *ORDER}


# -- sync without a server ----------------------------------------------------------------------


def test_sync_makes_a_store_of_the_records_alone(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    expected = without_outage(experiment, tmp_path / "without")
    here = tmp_path / "here"
    shutil.copytree(tmp_path / "without" / "results", here / "results")
    sync([], here, None, lambda said: None)
    assert held(here / "mlruns" / "mlflow.db", here / "mlruns", "demo") == expected


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
        "demo: 2 trials delivered, 2 in the store",
        "demo: 2 trials not recorded yet: no report is delivered",
    ]
    assert set(held(here / "mlruns" / "mlflow.db", here / "mlruns", "demo")) == {
        "demo",
        *ORDER[:2],
    }


def test_sync_leaves_out_what_it_cannot_deliver_unless_it_is_named(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    go(experiment, tmp_path, ToyRunner())
    strange = [replace(toy_events()[0], settings={"experiment": "strange"}), *toy_events()[1:]]  # type: ignore[call-arg]
    write_events(tmp_path / "results" / "strange" / "one", strange)
    said: list[str] = []
    warned: list[str] = []
    sync([], tmp_path, None, said.append, warned.append)
    assert said == ["demo: 0 trials delivered, 4 in the store"]
    [line] = warned
    assert line.startswith("strange is left out: ")
    with pytest.raises(ConfigurationError, match="is not of a trial of this version of dps"):
        sync(["strange"], tmp_path, None, said.append)
    with pytest.raises(ConfigurationError, match="did you mean 'demo'"):
        sync(["dmo"], tmp_path, None, said.append)
