"""What a tracking store does not take, and what its libraries raise, holds up nothing else."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from dps.errors import StoreUnavailable
from dps.events import Event, TrialStarted
from flows.cli.sync import sync
from flows.config.experiment import ExperimentConfig
from flows.tracking.store import Refused, create_database, default_uri
from flows.tracking.tracker import Tracker
from tests.flows.execution.test_experiment import NAMES, ORDER, ToyRunner, children, experiment, go
from tests.flows.execution.test_outage import held
from tests.support.http_proxy import HttpProxy
from tests.support.mlflow_server import MlflowServer
from tests.support.synthetic import reported

__all__ = ["experiment"]  # the fixture

REFUSED = ORDER[1]


def with_a_name_that_is_none(events: list[Event]) -> list[Event]:
    """A number is reported under a name that MLflow takes for no metric's."""
    odd = replace(reported(events[-2].t, 1, 0.5), name="loss*")
    return [*events[:-1], odd, events[-1]]


@pytest.mark.slow
def test_a_trial_that_is_refused_keeps_no_other_from_the_store(
    experiment: ExperimentConfig, tmp_path: Path
) -> None:
    done, told = go(experiment, tmp_path, ToyRunner({REFUSED: with_a_name_that_is_none}))
    assert done.refused == (REFUSED,)
    assert done.tracked
    assert children(tmp_path) == sorted(set(NAMES) - {REFUSED})
    assert told.count(f"refuses the trial {REFUSED}: ") == 1
    assert "cannot be used" not in told
    assert f"the tracking store has refused {REFUSED}; " in told
    assert "dps sync demo" in told
    assert set(held(tmp_path / "mlruns" / "mlflow.db", tmp_path / "mlruns", "demo")) == {
        "demo",
        *NAMES,
    } - {REFUSED}
    said: list[str] = []
    with pytest.raises(Refused, match=f"refuses the trial {REFUSED}: .*\nThe rest is in the store"):
        sync([], tmp_path, None, said.append)
    assert said == ["demo: 0 trials delivered, 3 in the store"]
    assert children(tmp_path) == sorted(set(NAMES) - {REFUSED})


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
    create_database(tmp_path / "mlruns" / "mlflow.db")
    MlflowClient(default_uri(tmp_path)).create_experiment("dps/demo", artifacts)
    runner = ToyRunner()
    done, told = go(experiment, tmp_path, runner)
    assert runner.ran == ORDER
    assert not done.tracked
    assert done.report.exists()
    assert "cannot be used: error_perm: 530 nobody gets in." in told
    assert "dps sync demo" in told


# -- what is between here and a server -----------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with MlflowServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.cluster
@pytest.mark.deployment
@pytest.mark.timeout(300)
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
        assert set(there) == {"demo", *NAMES} - {REFUSED}
        proxy.limit = None
        said: list[str] = []
        sync([], tmp_path, proxy.uri, said.append)
    assert said == ["demo: 1 trial delivered, 4 in the store"]


@pytest.mark.cluster
@pytest.mark.deployment
@pytest.mark.timeout(300)
def test_a_server_that_only_a_proxy_knows_is_reached_by_it(
    tmp_path: Path, server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = "http://mlflow.invalid:5000"
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HttpProxy(server.port) as proxy:
        monkeypatch.setenv("http_proxy", proxy.uri)
        Tracker("beyond", tmp_path, beyond)
        asked = len(proxy.asked)
        assert all(address.startswith(f"{beyond}/api/") for address in proxy.asked)
        monkeypatch.setenv("no_proxy", "mlflow.invalid")
        with pytest.raises(StoreUnavailable, match=r"mlflow\.invalid:5000 cannot be used"):
            Tracker("beyond", tmp_path, beyond)
    assert len(proxy.asked) == asked > 0
