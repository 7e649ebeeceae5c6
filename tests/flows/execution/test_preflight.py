"""Experiments on a deployment that is there already: run from YAML, or refused in advance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.cluster.backends.tls import temporary
from dps.events import NodeJoined
from flows.config.experiment import ExperimentConfig, load_experiment
from flows.config.trials import expand
from flows.execution.trial import run_trial
from flows.metrics.prices import load_prices
from flows.records.events import TrialEnded, TrialStarted
from flows.records.record import EVENTS_FILE, read_record
from flows.statistics.finished import read_finished
from tests.flows.execution.test_run import CONFIG
from tests.support import commands
from tests.support.deployment import OWN_PIDS, can_have_own_pids, deployed, workers
from tests.support.stores import with_store
from tests.support.tls import files_of

NODES = 4  # a server, its replica, a worker and the evaluator
ROOM = 2  # for so many trials at once
THERE: dict[str, Any] = {
    **CONFIG,
    "experiment": "there",
    "training": {"workers": 1, "updates": 120, "compute_seconds": 0.01},
    "recovery": "chain",
    "cluster": {"kind": "existing"},
}
KILL = {"kind": "kill", "target": "server-0", "at_updates": 40, "back_after": 0.2}
PAUSE = {"kind": "pause", "target": "server-0", "at_updates": 40}


def dps(here: Path, address: str | None, *arguments: str, **changes: Any) -> Any:
    (here / "there.yaml").write_text(yaml.safe_dump({**THERE, **changes}))
    environment = {"DASK_SCHEDULER_ADDRESS": address} if address else {}
    return commands.dps(with_store(here), *arguments, **environment)


def test_where_a_trial_runs_is_part_of_it_only_if_that_is_not_this_machine() -> None:
    def digest(**changes: Any) -> tuple[str, Any]:
        config = ExperimentConfig.model_validate({**THERE, **changes})
        (trial,) = expand(config)
        return trial.digest, trial.config.model_dump(mode="json").get("cluster")

    local = {key: value for key, value in THERE.items() if key != "cluster"}
    (plain,) = expand(ExperimentConfig.model_validate(local))
    here = {"tls": "temporary", "kind": "local"}
    assert digest(cluster={"kind": "local"}) == (plain.digest, here)
    kept = {"tls": "off", "kind": "existing", "address": None, "patience": 600.0}
    assert digest() == (digest()[0], kept)
    assert digest()[0] != plain.digest


@pytest.mark.cluster
@pytest.mark.deployment
def test_without_an_address_nothing_begins(tmp_path: Path) -> None:
    done = dps(tmp_path, None, "run", "there.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "set cluster.address" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    number = ROOM * NODES + 1  # one takes the place of a node that is killed
    with deployed(tmp_path_factory.mktemp("deployment"), workers(number)) as address:
        yield address


def story(folder: Path) -> tuple[list[str], set[str], set[str]]:
    """What a record says of a trial that does not depend on how long anything took."""
    events = read_record(folder / EVENTS_FILE).events
    kinds = [type(event).__name__ for event in events]
    told = ("TrialStarted", "TrainingStarted", "Killed", "CapacityRestored", "TrialEnded")
    nodes = {event.node for event in events if isinstance(event, NodeJoined)}
    return [kind for kind in kinds if kind in told], nodes, set(kinds) - {"EvaluationMissed"}


@pytest.mark.cluster
@pytest.mark.deployment
def test_trials_at_once_run_as_one_alone_on_a_deployment(tmp_path: Path, deployment: str) -> None:
    faults = [KILL, {**PAUSE, "target": "worker-0", "at_updates": 80, "seconds": 0.2}]
    axes = {"faults": {"kill": faults, "none": []}}
    done = dps(
        *(tmp_path, deployment, "run", "there.yaml", "--parallel", str(ROOM + 1)),
        axes=axes,
        cluster={"kind": "existing", "address": deployment},
    )
    assert done.returncode == 0, done.stderr
    assert f"has room for {ROOM} at once" in done.stderr
    assert "share a host" in done.stdout
    records = [tmp_path / "results" / "there" / f"{name}.seed-0" for name in ("kill", "none")]
    done_with = [read_finished(record / EVENTS_FILE, load_prices()) for record in records]
    assert [each.outcome.status for each in done_with] == ["valid", "valid"]
    assert [each.outcome.row()["updates_lost"] for each in done_with] == [0, 0]
    began = [event.t for each in done_with for event in each.record.of(TrialStarted)]
    ended = [event.t for each in done_with for event in each.record.of(TrialEnded)]
    assert max(began) < min(ended)
    kill, _ = expand(load_experiment(str(tmp_path / "there.yaml")))
    run_trial(kill, tmp_path / "alone", lambda event: None)
    assert story(records[0]) == story(tmp_path / "alone")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The certificate of a deployment, in files."""
    return files_of(temporary(), tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def over_tls(tmp_path_factory: pytest.TempPathFactory, own: dict[str, str]) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("over-tls")
    with deployed(folder, workers(NODES), certificate=own) as address:
        yield address


@pytest.mark.cluster
@pytest.mark.deployment
def test_an_experiment_runs_on_a_deployment_over_tls(
    tmp_path: Path, over_tls: str, own: dict[str, str]
) -> None:
    assert over_tls.startswith("tls://")
    cluster = {"kind": "existing", "address": over_tls, "tls": own}
    done = dps(tmp_path, None, "run", "there.yaml", cluster=cluster, faults=[KILL])
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "results" / "there" / "seed-0" / EVENTS_FILE)
    assert record.ended is not None
    assert record.ended.status == "valid", record.ended.reason


@pytest.mark.cluster
@pytest.mark.deployment
def test_a_deployment_over_tls_lets_nobody_in_without_its_certificate(
    tmp_path: Path, over_tls: str
) -> None:
    plainly = over_tls.replace("tls://", "tcp://")
    other = files_of(temporary(), tmp_path / "other")
    for address, tls, told in (
        (over_tls, "off", "needs certificates; name them"),
        (over_tls, other, "both sides need certificates of one authority"),
        (plainly, "off", "With TLS it begins with tls://"),
    ):
        cluster = {"kind": "existing", "address": address, "tls": tls}
        done = dps(tmp_path, None, "run", "there.yaml", cluster=cluster)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("dps: ")
        assert told in line
    assert not (tmp_path / "results").exists()


@pytest.mark.cluster
@pytest.mark.deployment
def test_a_fault_that_is_not_possible_there_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    if not can_have_own_pids():
        pytest.skip("processes with pids of their own cannot be started here")
    with deployed(tmp_path, workers(NODES), before=OWN_PIDS) as address:
        done = dps(tmp_path, address, "run", "there.yaml", faults=[PAUSE])
    assert done.returncode == 2
    assert "cannot pause server-0 at 40 updates" in done.stderr
    assert not (tmp_path / "results").exists()
