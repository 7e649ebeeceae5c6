"""Experiments on a deployment that is there already: run from YAML, or refused in advance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.errors import ConfigurationError
from flows.config import ExperimentConfig, load_experiment
from flows.grid import expand
from tests.cluster.deployment import OWN_PIDS, can_have_own_pids, deployed, workers

NODES = 4  # a server, its replica, a worker and the evaluator
CONFIG: dict[str, Any] = {
    "experiment": "there",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 120, "compute_seconds": 0.01},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "server": {"shards": 1},
    "recovery": "chain",
    "cluster": {"kind": "existing"},
}
KILL = {"kind": "kill", "target": "server-0", "at_updates": 40, "back_after": 0.2}
PAUSE = {"kind": "pause", "target": "server-0", "at_updates": 40}


def dps(here: Path, address: str | None, *arguments: str, **changes: Any) -> Any:
    (here / "there.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=here,
        env={**os.environ, **({"DASK_SCHEDULER_ADDRESS": address} if address else {})},
        capture_output=True,
        text=True,
    )


def test_where_a_trial_runs_is_kept_only_if_it_is_not_this_machine() -> None:
    def digest(**changes: Any) -> tuple[str, Any]:
        config = ExperimentConfig.model_validate({**CONFIG, **changes})
        (trial,) = expand(config)
        return trial.digest, trial.config.model_dump(mode="json").get("cluster")

    local = {key: value for key, value in CONFIG.items() if key != "cluster"}
    (plain,) = expand(ExperimentConfig.model_validate(local))
    assert digest(cluster={"kind": "local"}) == (plain.digest, None)
    assert digest() == (digest()[0], {"tls": "off", "kind": "existing", "address": None})
    assert digest()[0] != plain.digest


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"kind": "existing", "address": "10.0.0.1"}, "cluster.*address.*tcp://10.0.0.1:8786"),
        ({"kind": "cloud"}, "cluster.*local"),
        ({"kind": "local", "address": "tcp://a:1"}, "unknown key"),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path: Path, cluster: Any, told: str) -> None:
    path = tmp_path / "there.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "cluster": cluster}))
    with pytest.raises(ConfigurationError, match=told):
        load_experiment(str(path))


@pytest.mark.cluster
def test_without_an_address_nothing_begins(tmp_path: Path) -> None:
    done = dps(tmp_path, None, "run", "there.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "give cluster.address" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with deployed(tmp_path_factory.mktemp("deployment"), workers(NODES)) as address:
        yield address


@pytest.mark.cluster
def test_an_experiment_runs_on_a_deployment_from_yaml(tmp_path: Path, deployment: str) -> None:
    faults = [KILL, {**PAUSE, "target": "worker-0", "at_updates": 80, "seconds": 0.2}]
    done = dps(tmp_path, deployment, "run", "there.yaml", faults=faults)
    assert done.returncode == 0, done.stderr
    assert "share a host" in done.stdout
    shown = dps(tmp_path, deployment, "results", "there", "--format", "json", faults=faults)
    (row,) = json.loads(shown.stdout)
    assert (row["status"], row["updates_lost"]) == ("valid", 0)


@pytest.mark.cluster
def test_trials_at_once_are_refused(tmp_path: Path, deployment: str) -> None:
    done = dps(tmp_path, deployment, "run", "there.yaml", "--parallel", "2")
    assert done.returncode == 2
    assert "one after the other" in done.stderr


@pytest.mark.cluster
def test_a_fault_that_is_not_possible_there_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    if not can_have_own_pids():
        pytest.skip("processes with pids of their own cannot be started here")
    with deployed(tmp_path, workers(NODES), before=OWN_PIDS) as address:
        done = dps(tmp_path, address, "run", "there.yaml", faults=[PAUSE])
    assert done.returncode == 2
    assert "'pause server-0 at 40 updates' is not possible there" in done.stderr
    assert not (tmp_path / "results").exists()
