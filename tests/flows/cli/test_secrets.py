"""A password in the URI of a real tracking server, which dies as well: nobody gets to see it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mlflow import MlflowClient

from dps.errors import ConfigurationError, StoreUnavailable
from dps.observe.tracking import unavailable
from flows.config.experiment import load_experiment
from flows.execution.doctor import examine
from flows.tracking.tracker import Tracker
from tests.flows.execution.test_run import CONFIG, command
from tests.support.mlflow_server import MlflowServer

USER, PASSWORD = "annabel", "pa55w0rd"
SECRET = f"{USER}:{PASSWORD}"


def with_secret(uri: str) -> str:
    return uri.replace("://", f"://{SECRET}@")


def texts_below(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


def command_lines(session_of: subprocess.Popen[str]) -> list[str]:
    process = psutil.Process(session_of.pid)
    family = [process, *process.children(recursive=True)]
    return [" ".join(each.cmdline()) for each in family]


@pytest.mark.cluster
@pytest.mark.deployment
def test_the_password_of_a_server_that_dies_is_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, told = tmp_path / "here", ""
    for folder in (here, tmp_path / "server"):
        folder.mkdir()

    def dps(*words: str) -> int:
        nonlocal told
        line = [sys.executable, "-m", "flows.cli", *words]
        ended = subprocess.run(line, cwd=here, capture_output=True, text=True, check=False)
        told += ended.stdout + ended.stderr
        return ended.returncode

    with MlflowServer(tmp_path / "server") as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", with_secret(server.uri))
        run = command(here, "run", "small.yaml", seeds=[0, 1])
        with subprocess.Popen(
            run, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout
            for line in process.stdout:
                told += line
                if line.startswith("[2/2]"):
                    told += "\n".join(command_lines(process))
                    server.kill()
        assert process.returncode == 0, told
        assert f"the tracking store http://***@127.0.0.1:{server.port} cannot be used" in told
        assert "dps sync small" in told
        assert dps("sync") == 2
        dps("doctor")
        assert dps("ui") == 2
        assert dps("run", "small.yaml") == 2
        server.start()
        assert dps("sync") == 0
        assert "small: 1 trial written, 2 in the store\n" in told
        client = MlflowClient(server.uri)
        found = client.get_experiment_by_name("dps/small")
        runs = client.search_runs([found.experiment_id])
        assert sorted(each.info.run_name for each in runs) == [
            "all seeds",
            "seed-0",
            "seed-1",
            "small",
        ]
        assert {each.info.status for each in runs} == {"FINISHED"}

    for word in (USER, PASSWORD):
        assert word not in told
        for path, text in texts_below(tmp_path):
            assert word.encode() not in text, path


def test_what_a_store_says_of_a_user_is_masked() -> None:
    uri = f"postgresql://{USER}:pa55%20word@db/mlflow"
    said = RuntimeError(f"role '{USER}' with 'pa55 word' is refused at {uri}")
    message = str(unavailable(uri, said))
    assert USER not in message
    assert "pa55" not in message
    assert "postgresql://***@db/mlflow" in message


@pytest.mark.parametrize("uri", [f"http://{USER}:pa55/w0rd@h", f"http://{USER}:{PASSWORD}@[h"])
def test_an_address_that_is_none_is_refused_without_its_password(uri: str, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="not an address") as caught:
        Tracker("demo", tmp_path, uri)
    assert USER not in str(caught.value)
    assert "pa55" not in str(caught.value)


def test_doctor_shows_no_password(tmp_path: Path) -> None:
    [store] = [f for f in examine(tmp_path, f"http://{SECRET}@h:1") if f.subject == "store"]
    assert store.found == "http://***@h:1 (from MLFLOW_TRACKING_URI; not contacted)"


# -- configurations ------------------------------------------------------------------------------

PATH = f"ftp://{SECRET}@host/checkpoints"


def refused(config: dict[str, Any], folder: Path, *settings: str) -> str:
    path = folder / "some.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(str(path), settings)
    return str(caught.value)


def test_a_configuration_with_a_password_is_refused_and_not_repeated(tmp_path: Path) -> None:
    durability = {"kind": "checkpoint", "path": PATH}
    in_file = refused({**CONFIG, "recovery": {"durability": durability}}, tmp_path)
    set_it = f"recovery.durability.path={PATH}"
    in_setting = refused(CONFIG, tmp_path, "recovery=checkpoint", set_it)
    assert "some.yaml, line " in in_file
    assert in_setting.startswith("--set recovery.durability.path: the address contains a password")
    for message in (in_file, in_setting):
        assert SECRET not in message
        assert "set it in the environment" in message
