"""What a tracking store does not take, and what its libraries raise, holds up nothing else."""

from __future__ import annotations

import socketserver
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dps.events import Event
from flows.cli.tracking import upload as sync
from flows.config.experiment import ExperimentConfig
from flows.records.events import TrialStarted
from flows.tracking.store import Refused, create_database, default_uri, prepare_mlflow
from tests.flows.execution.test_experiment import NAMES, ORDER, ToyRunner, children, experiment, go
from tests.flows.execution.test_outage import held
from tests.support.http_proxy import HttpProxy
from tests.support.mlflow_server import MlflowServer

__all__ = ["experiment"]  # the fixture

REFUSED = ORDER[1]


@pytest.mark.slow
def test_an_experiment_deleted_meanwhile_is_no_refusal(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    class Deleting(ToyRunner):
        def write(self, attempt: object) -> None:
            super().write(attempt)  # type: ignore[arg-type]
            if len(self.ran) == 2:
                client = MlflowClient(default_uri(tmp_path))
                client.delete_experiment(client.get_experiment_by_name("dps/demo").experiment_id)

    done, _ = go(experiment, tmp_path, Deleting())
    assert (done.tracked, done.refused) == (True, ())
    assert children(tmp_path) == sorted(NAMES)


@pytest.mark.slow
def test_a_store_that_only_mlflow_refuses_keeps_no_trial_from_running(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    path = tmp_path / "mlruns" / "mlflow.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        database.execute("INSERT INTO alembic_version VALUES ('of the next century')")
        database.commit()
    runner = ToyRunner()
    done, told = go(experiment, tmp_path, runner)
    assert runner.ran == ORDER
    assert done.report.exists()
    assert not done.tracked
    assert told.count("cannot be used") == 1
    assert "The trials continue; their runs are written at the end." in told
    assert "dps sync demo" in told


# -- a store of artifacts that fails as it likes -------------------------------------------------


class _RefusesAll(socketserver.StreamRequestHandler):
    """An FTP server that lets nobody in."""

    def handle(self) -> None:
        self.wfile.write(b"220 ready\r\n")
        while self.rfile.readline():
            self.wfile.write(b"530 nobody gets in\r\n")


@pytest.fixture
def artifacts() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _RefusesAll) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"ftp://127.0.0.1:{server.server_address[1]}/artifacts"
        server.shutdown()


@pytest.mark.slow
def test_an_artifact_store_that_fails_does_not_end_the_grid(
    experiment: ExperimentConfig, tmp_path: Path, artifacts: str
) -> None:
    prepare_mlflow()
    create_database(tmp_path)
    MlflowClient(default_uri(tmp_path)).create_experiment("dps/demo", artifacts)
    runner = ToyRunner()
    done, told = go(experiment, tmp_path, runner)
    assert runner.ran == ORDER
    assert set(done.refused) == {*ORDER, "the report"}
    assert done.report.exists()
    assert f"refuses the trial {ORDER[0]}: error_perm: 530 nobody gets in." in told
    assert "dps sync demo" in told
    with pytest.raises(Refused, match="the tracking store refused"):
        sync([], tmp_path, None, lambda said: None)


# -- what is between here and a server -----------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.cluster
@pytest.mark.deployment
def test_a_record_larger_than_a_server_takes_is_refused_and_the_others_are_there(
    experiment: ExperimentConfig, tmp_path: Path, server: MlflowServer
) -> None:
    def long(events: list[Event]) -> list[Event]:
        started, *rest = events
        assert isinstance(started, TrialStarted)
        return [replace(started, settings={**started.settings, "note": "x" * 4_000_000}), *rest]

    with HttpProxy(server.port, limit=3_000_000) as proxy:
        done, told = go(experiment, tmp_path, ToyRunner({REFUSED: long}), store=proxy.uri)
        assert (done.tracked, done.refused) == (True, (REFUSED,))
        assert f"refuses the trial {REFUSED}: 413 " in told
        there = held(server.database, server.artifacts, "demo")
        assert set(there) & set(NAMES) == set(NAMES) - {REFUSED}
        proxy.limit = None
        said: list[str] = []
        sync([], tmp_path, proxy.uri, said.append)
    assert said == ["demo: 1 trial written, 4 in the store"]
