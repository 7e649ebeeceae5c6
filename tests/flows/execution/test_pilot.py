"""The pilot of an experiment: which records it is, and what is run for it on virtual time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dps.errors import ConfigurationError
from flows.analysis.prices import load_prices
from flows.config.experiment import ExperimentConfig, find_document, load_experiment
from flows.config.trials import expand
from flows.execution.pilot import find_pilot, virtual_pilot
from tests.support.synthetic import STRATEGIES, demo_trials, write_experiment
from tests.support.virtual_trials import BASE, virtual_trial

Warn = Callable[[str], object]

DEMO = str(Path(__file__).parents[3] / "configs" / "demo.yaml")
PRICES = load_prices()
CLAIM = {"against": "none-given", "condition": "kill", "direction": "less", "smallest": 1.0}


@pytest.fixture
def toy() -> ExperimentConfig:
    """The experiment of which `write_experiment` writes trials, with other seeds."""
    base = demo_trials()[0].config.model_dump(exclude={"seed", "recovery", "faults"})
    kill = next(t for t in demo_trials() if t.labels["faults"] == "kill").config.faults
    axes = {
        "recovery": list(STRATEGIES),
        "faults": {"no fault": [], "kill": [fault.model_dump() for fault in kill]},
    }
    claim = {**CLAIM, "metric": "accuracy_final", "strategy": "chain", "against": "none"}
    return ExperimentConfig.model_validate(
        {**base, "axes": axes, "seeds": [7, 8], "claims": [claim]}
    )


def pilot_of(
    experiment: ExperimentConfig, here: Path, named: str | None = None, warn: Warn = print
) -> tuple[int, str]:
    found, name = find_pilot(named, experiment, expand(experiment), here, PRICES, warn)
    return len(found), name


def test_a_pilot_is_what_is_recorded_or_what_is_named(
    toy: ExperimentConfig, tmp_path: Path
) -> None:
    assert pilot_of(toy, tmp_path) == (0, "")
    write_experiment(tmp_path / "results" / "demo-pilot")
    assert pilot_of(toy, tmp_path) == (4, "demo-pilot")  # those that the claim is about
    write_experiment(tmp_path / "results" / "demo")
    assert pilot_of(toy, tmp_path) == (4, "demo")
    folder = str(write_experiment(tmp_path / "elsewhere"))
    assert pilot_of(toy, tmp_path, folder) == (4, folder)
    with pytest.raises(ConfigurationError, match="did you mean 'demo'"):
        pilot_of(toy, tmp_path, "dmo")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"updates": 400}}, "training.updates is 800 there and 400 here"),
        ({"optimizer": {"kind": "sgd", "learning_rate": 0.2}}, "learning_rate is 0.1 there and"),
        ({"server": {"shards": 3}}, "server.shards is 2 there and 3 here"),
    ],
)
def test_a_pilot_of_another_configuration_is_refused_or_left_out(
    toy: ExperimentConfig, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_experiment(tmp_path / "results" / "demo")
    written = toy.model_dump(exclude_unset=True)
    for section, values in changes.items():
        written[section] = {**written.get(section, {}), **values}
    planned = ExperimentConfig.model_validate(written)
    with pytest.raises(ConfigurationError, match=rf"--pilot demo: .*{re.escape(said)}.*--pilot v"):
        pilot_of(planned, tmp_path, "demo")
    told = list[str]()
    assert pilot_of(planned, tmp_path, warn=told.append) == (0, "")
    assert len(told) == 1
    assert said in told[0]


def test_a_virtual_pilot_is_known_by_its_profile(tmp_path: Path) -> None:
    """It may be that of a real experiment, but not of one with another profile."""
    virtual_trial(tmp_path / "pilot" / "a-trial", cluster={"kind": "virtual", "profile": "laptop"})
    for cluster, told in (
        ({"kind": "local"}, ""),
        ({"kind": "virtual", "profile": "laptop"}, ""),
        ({"kind": "virtual", "profile": "cluster-25gbit"}, "cluster.profile.* there and .* here"),
    ):
        claim = {"metric": "accuracy_final", "strategy": "virtual", "direction": "more"}
        written = {**BASE, "cluster": cluster, "seeds": [1], "claims": [{**claim, "smallest": 0.1}]}
        del written["seed"]
        planned = ExperimentConfig.model_validate(written)
        folder = str(tmp_path / "pilot")
        if told:
            with pytest.raises(ConfigurationError, match=told):
                pilot_of(planned, tmp_path, folder)
        else:
            called = f"{folder} on virtual time (profile laptop)"
            assert pilot_of(planned, tmp_path, folder) == (1, called)


def test_a_virtual_pilot_has_seeds_of_its_own() -> None:
    demo = load_experiment(DEMO)
    twin, trials = virtual_pilot(find_document(DEMO), ["training.updates=400"], demo)
    assert twin.experiment == "demo-pilot"
    assert not {trial.seed for trial in trials} & set(demo.seeds)
    assert {trial.config.cluster.kind for trial in trials} == {"virtual"}
    assert {trial.config.training.updates for trial in trials} == {400}
    assert twin.claims == ()


def test_a_virtual_pilot_has_no_seed_that_the_experiment_may_yet_get_to() -> None:
    seeds = ["seeds=[3, 8, 5]"]
    _, trials = virtual_pilot(find_document(DEMO), seeds, load_experiment(DEMO, seeds))
    assert min(trial.seed for trial in trials) == 9


def test_a_virtual_pilot_is_of_what_the_claims_are_about_and_its_controls() -> None:
    def kinds(*settings: str) -> set[tuple[str, ...]]:
        demo = load_experiment(DEMO, settings)
        _, trials = virtual_pilot(find_document(DEMO), settings, demo)
        return {tuple(trial.labels.values()) for trial in trials}

    assert kinds() == {
        (strategy, faults)
        for strategy in ("none", "checkpoint", "chain")
        for faults in ("kill", "no fault")
    }
    time = json.dumps(CLAIM | {"metric": "rto_seconds", "strategy": "chain", "against": "none"})
    assert kinds(f"claims=[{time}]") == {("none", "kill"), ("chain", "kill")}
    effect = json.dumps(CLAIM | {"metric": "effect_time_mean", "strategy": "stateless"})
    assert kinds(f"claims=[{effect}]") == {("stateless", "kill"), ("stateless", "no fault")}
    assert len(kinds("claims=[]")) == 8


def test_a_virtual_pilot_of_what_varies_its_nodes_is_refused() -> None:
    settings = ["axes={cluster.profile: [laptop, cluster-25gbit]}", "cluster.kind=virtual"]
    demo = load_experiment(DEMO, settings)
    with pytest.raises(ConfigurationError, match=r"cluster.profile.*name an earlier run"):
        virtual_pilot(find_document(DEMO), settings, demo)
