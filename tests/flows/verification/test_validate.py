"""`dps validate`: figures of one grid on two kinds of nodes, and how far they differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dps.errors import ConfigurationError
from flows.analysis.finished import read_finished
from flows.analysis.outcome import Outcome
from flows.analysis.prices import load_prices
from flows.config.experiment import find_document
from flows.config.trials import load_trials
from flows.execution.trial import run_trial
from flows.records.record import EVENTS_FILE
from flows.verification.validate import Agreement, agreement, twin, verdict

CONFIG: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 2, "updates": 80, "compute_seconds": 0.01},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "evaluation": {"every_seconds": 0.2},
    "axes": {
        "recovery": {"none": "none", "chain": "chain"},
        "faults": {"kill": [{"kind": "kill", "target": "server-0", "at_updates": 40}]},
    },
    "seeds": [0, 1, 2],
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return str(path)


def outcomes(config: str, folder: Path, profile: str, *settings: str) -> list[Outcome]:
    """Run the twin of an experiment with a profile; return what came of it."""
    found = []
    for trial in twin(find_document(config), settings, profile)[1]:
        place = folder / profile / trial.name
        place.mkdir(parents=True)
        run_trial(trial, place, lambda event: None)
        found.append(read_finished(place / EVENTS_FILE, load_prices()).outcome)
    return found


def compare(config: str, real: list[Outcome], virtual: list[Outcome]) -> Agreement:
    experiment, _ = load_trials(find_document(config))
    return agreement(real, virtual, experiment, np.random.default_rng(0))


def test_the_twin_differs_in_its_name_and_its_nodes_alone(config: str) -> None:
    document = find_document(config)
    settings = ["training.updates=60"]
    _, trials = load_trials(document, settings)
    experiment, twins = twin(document, settings, "cluster-25gbit")
    assert experiment.experiment == "small-virtual"
    assert [each.name for each in twins] == [each.name for each in trials]
    for one, other in zip(trials, twins, strict=True):
        assert other.config.cluster.model_dump()["profile"] == "cluster-25gbit"
        own = {"experiment": one.config.experiment, "cluster": one.config.cluster}
        assert other.config.model_copy(update=own) == one.config


def test_what_is_on_virtual_time_already_is_refused(config: str) -> None:
    with pytest.raises(ConfigurationError, match="small is on virtual time already"):
        twin(find_document(config), ["cluster.kind=virtual"], "laptop")


def test_an_experiment_agrees_with_itself(config: str, tmp_path: Path) -> None:
    same = outcomes(config, tmp_path, "laptop")
    found = compare(config, same, same)
    assert {pair.metric for pair in found.pairs} >= {"training_seconds", "updates_lost"}
    assert set(found.errors_of_times) == {0.0}
    assert not found.one_sided
    assert found.verdicts
    lines = verdict(found)
    assert len(lines) == 3
    assert all(line.endswith("met)") for line in lines), lines


def test_errors_are_those_of_the_means_and_what_one_side_lacks_is_named(
    config: str, tmp_path: Path
) -> None:
    real = outcomes(config, tmp_path, "laptop")
    virtual = outcomes(config, tmp_path, "cluster-25gbit", "training.compute_seconds=0.02")
    found = compare(config, real, virtual)
    (pair,) = (p for p in found.pairs if (p.metric, p.strategy) == ("training_seconds", "chain"))
    means = [
        np.mean([each.row()["training_seconds"] for each in side if "chain" in each.identity.trial])
        for side in (real, virtual)
    ]
    assert pair.error == pytest.approx((means[1] - means[0]) / means[0])
    assert pair.error > 0.3
    assert pair.difference is not None
    assert pair.difference.n == 3
    assert pair.difference.mean == pytest.approx(means[1] - means[0])
    assert "missed" in verdict(found)[0]

    chains = [each for each in virtual if "chain" in each.identity.trial]
    lacking = compare(config, real, chains)
    assert "lost, none" in " ".join(lacking.one_sided)
    assert {pair.strategy for pair in lacking.pairs} == {"chain"}


@pytest.mark.cluster
@pytest.mark.slow
def test_both_are_run_once_and_compared(config: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "validate", config, "--set", "seeds=[0]"]
    for left in (2, 0):
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert f"small-virtual: 2 trials, {left} to run" in ended.stdout
        assert f"small: 2 trials, {left} to run" in ended.stdout
        assert "Times, rates and money: median error" in ended.stdout
    for name in ("small", "small-virtual"):
        assert (tmp_path / "results" / name / "report.html").exists()
