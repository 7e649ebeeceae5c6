"""The pilot of an experiment: which records it is, and what is run for it on virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.analysis.prices import load_prices
from flows.config.experiment import find_document, load_experiment
from flows.execution.pilot import find_pilot, virtual_pilot
from tests.support.synthetic import write_experiment

DEMO = str(Path(__file__).parents[3] / "configs" / "demo.yaml")
PRICES = load_prices()
CLAIM = {"against": "none-given", "condition": "kill", "direction": "less", "smallest": 1.0}


def test_a_pilot_is_what_is_recorded_or_what_is_named(tmp_path: Path) -> None:
    demo = load_experiment(DEMO)
    assert find_pilot(None, demo, tmp_path, PRICES, print) == ([], "")
    write_experiment(tmp_path / "results" / "demo-pilot")
    assert find_pilot(None, demo, tmp_path, PRICES, print)[1] == "demo-pilot"
    write_experiment(tmp_path / "results" / "demo")
    found, name = find_pilot(None, demo, tmp_path, PRICES, print)
    assert (len(found), name) == (16, "demo")
    folder = str(write_experiment(tmp_path / "elsewhere"))
    assert find_pilot(folder, demo, tmp_path, PRICES, print)[1] == folder
    with pytest.raises(ConfigurationError, match="did you mean 'demo'"):
        find_pilot("dmo", demo, tmp_path, PRICES, print)


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
