"""`dps validate`: figures of one grid on two kinds of nodes, and how far they differ."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import flows.config.profiles
from dps.errors import ConfigurationError
from flows.analysis.comparison import Compared, Reading, Uneven
from flows.analysis.finished import read_finished
from flows.analysis.outcome import Outcome
from flows.analysis.prices import load_prices
from flows.analysis.statistics import Difference, paired
from flows.config.experiment import find_document
from flows.config.trials import load_trials
from flows.execution.trial import run_trial
from flows.records.record import EVENTS_FILE
from flows.verification.validate import (
    Agreement,
    Pair,
    ReadTwice,
    Relation,
    agreement,
    of_readings,
    twin,
    verdict,
)

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


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return str(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One strategy, and no axis that says which."""
    path = tmp_path_factory.mktemp("config") / "plain.yaml"
    settings = {**CONFIG, "experiment": "plain", "comparison": {"baseline": "plain"}}
    del settings["axes"]
    path.write_text(yaml.safe_dump(settings))
    return str(path)


Outcomes = Callable[..., list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Runs the twin of an experiment with a profile, once; returns what came of it."""

    @cache
    def run(config: str, profile: str, *settings: str) -> tuple[Outcome, ...]:
        folder, found = tmp_path_factory.mktemp("trials"), []
        for trial in twin(find_document(config), settings, profile)[1]:
            place = folder / trial.name
            place.mkdir()
            run_trial(trial, place, lambda event: None)
            found.append(read_finished(place / EVENTS_FILE, load_prices()).outcome)
        return tuple(found)

    return lambda *asked: list(run(*asked))


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


def test_an_experiment_agrees_with_itself(config: str, outcomes: Outcomes) -> None:
    same = outcomes(config, "laptop")
    found = compare(config, same, same)
    assert {pair.metric for pair in found.pairs} >= {"training_seconds", "updates_lost"}
    assert set(found.errors_of_times) == {0.0}
    assert not found.uneven
    assert found.readings
    lines = verdict(found)
    assert len(lines) == 3
    assert all(line.endswith(": met)") for line in lines), lines


def test_errors_are_those_of_the_means_and_what_one_side_lacks_is_named(
    config: str, outcomes: Outcomes
) -> None:
    real = outcomes(config, "laptop")
    virtual = outcomes(config, "cluster-25gbit", "training.compute_seconds=0.02")
    found = compare(config, real, virtual)
    (pair,) = (p for p in found.pairs if (p.metric, p.strategy) == ("training_seconds", "chain"))
    means = [
        np.mean([each.row()["training_seconds"] for each in side if "chain" in each.identity.trial])
        for side in (real, virtual)
    ]
    assert pair.error == pytest.approx((means[1] - means[0]) / means[0])
    assert pair.error > 0.3
    assert pair.difference.n == 3
    assert pair.difference.mean == pytest.approx(means[1] - means[0])
    assert "missed" in verdict(found)[0]

    chains = [each for each in virtual if "chain" in each.identity.trial]
    lacking = compare(config, real, chains)
    assert {pair.strategy for pair in lacking.pairs} == {"chain"}
    said = "\n".join(verdict(lacking))
    assert "Readings: 0 of " in said
    assert "cannot be compared" in said
    assert "on real nodes, no reading on virtual time" in said


def test_errors_of_times_do_not_cancel_out() -> None:
    apart = Difference(0.0, 1.0, 3)
    pairs = tuple(
        Pair("training_seconds", "kill", "none", 10.0, virtual, 9.0, 11.0, apart)
        for virtual in (7.0, 8.0, 12.0, 13.0)
    )
    found = Agreement(pairs, (), (), (), (0, 0))
    assert found.errors_of_times == pytest.approx([0.3, 0.2, 0.2, 0.3])
    [said] = [line for line in verdict(found) if line.startswith("Times")]
    assert "median error 25.0% over 4 figures, the largest 30%" in said
    assert said.endswith("missed)")


def test_means_are_over_the_seeds_that_both_have(config: str, outcomes: Outcomes) -> None:
    real = outcomes(config, "laptop")
    virtual = outcomes(config, "cluster-25gbit", "training.compute_seconds=0.02")
    last = [one for one in virtual if one.identity.seed != 0]
    found = compare(config, real, last)
    (pair,) = (p for p in found.pairs if (p.metric, p.strategy) == ("training_seconds", "chain"))
    shared = [
        one.row()["training_seconds"]
        for one in real
        if one.identity.seed != 0 and one.identity.strategy == "chain"
    ]
    assert pair.real == pytest.approx(np.mean(shared))
    assert pair.difference.n == 2
    lines = verdict(found)
    assert not any("wanted: all" in line for line in lines), lines
    assert any(
        line.startswith("Lost and replayed: ") and "cannot be told" in line for line in lines
    )
    assert any(line.startswith("Readings: ") and "cannot be told" in line for line in lines)


def test_figures_that_not_the_same_seeds_have_are_named_with_their_counts(
    config: str, outcomes: Outcomes
) -> None:
    """A seed whose record does not tell a figure is none of the seeds of its mean."""
    real = outcomes(config, "laptop")
    virtual = outcomes(config, "cluster-25gbit")
    kept = [
        replace(one, faults=()) if one.identity.seed == 0 and "chain" in one.identity.trial else one
        for one in virtual
    ]
    found = compare(config, real, kept)
    assert any(
        "detect" in name and "chain" in name and "3 seeds on real nodes, 2 on virtual time" in name
        for name in found.uneven
    ), found.uneven
    assert any(line.startswith("Not for the same seeds on both sides: ") for line in verdict(found))


def test_what_is_not_valid_is_counted_and_left_out(config: str, outcomes: Outcomes) -> None:
    real = outcomes(config, "laptop")
    none = [replace(one, status="invalid", reason="paused late") for one in real]
    found = compare(config, real, none)
    assert not found.pairs
    assert verdict(found) == [
        "There is no seed whose trial is valid on both sides, so nothing is compared.",
        "Left out, as they are not valid: 0 trials on real nodes, 6 on virtual time",
    ]


def test_waiting_for_a_node_that_the_plan_sets_is_no_part_of_the_times(
    config: str, outcomes: Outcomes
) -> None:
    same = outcomes(config, "laptop", "server.spares=0")
    waited = [one for one in same if (one.row()["wait_capacity_seconds"] or 0) > 0]
    assert waited, "no trial waited for a node"
    found = compare(config, same, same)
    strategy = waited[0].identity.strategy
    for metric in ("restore_seconds", "rto_seconds"):
        (pair,) = (p for p in found.pairs if (p.metric, p.strategy) == (metric, strategy))
        rows = [one.row() for one in same if one.identity.strategy == strategy]
        assert pair.real == pytest.approx(
            np.mean([row[metric] - row["wait_capacity_seconds"] for row in rows])
        )


def test_an_experiment_without_axes_is_compared_with_its_twin(
    plain: str, outcomes: Outcomes
) -> None:
    experiment, _ = load_trials(find_document(plain))
    virtual = outcomes(plain, "laptop")
    assert {one.identity.experiment for one in virtual} == {"plain-virtual"}
    own = [replace(one, identity=replace(one.identity, experiment="plain")) for one in virtual]
    found = agreement(own, virtual, experiment, np.random.default_rng(0))
    assert {pair.strategy for pair in found.pairs} == {"plain"}
    assert set(found.errors_of_times) == {0.0}
    assert not found.uneven


def test_a_profile_of_any_name_is_taken_as_it_is_written(config: str, tmp_path: Path) -> None:
    odd = tmp_path / "a, b: {c}.yaml"
    folder = Path(flows.config.profiles.__path__[0])
    odd.write_text((folder / "laptop.yaml").read_text())
    _, trials = twin(find_document(config), [], str(odd))
    assert {each.config.cluster.model_dump()["profile"] for each in trials} == {str(odd)}


@pytest.mark.parametrize("axis", ["cluster", "cluster.tls"])
def test_an_experiment_that_varies_its_nodes_is_refused(config: str, axis: str) -> None:
    values = {"a": {"kind": "local"}} if axis == "cluster" else {"a": "off"}
    settings = [f"axes={{{axis}: {json.dumps(values)}}}"]
    with pytest.raises(ConfigurationError, match=f"axes: '{axis}' varies the nodes"):
        twin(find_document(config), settings, "laptop")


def read(reading: Reading, *differences: float, uneven: bool = False) -> Compared:
    """A row of a comparison, with the differences of each seed to the baseline's."""
    by_seed = dict(enumerate(differences))
    found = paired(by_seed, dict.fromkeys(by_seed, 0.0), np.random.default_rng(0))
    return Compared(
        *("training_seconds", "kill", "chain", "none"),
        *(None, Uneven(2, 3, 3) if uneven else None, None if uneven else found),
        *(reading, None),
    )


SHARP = read("higher", 5.0, 5.1, 4.9)
SHARP_BETTER = read("lower", -5.0, -5.1, -4.9)


@pytest.mark.parametrize(
    ("real", "virtual", "relation"),
    [
        (read("higher", 3.0, 3.1, 2.9), SHARP, "same"),
        (read("unclear", 1.0, 9.0, 4.0), SHARP, "resolution"),
        (SHARP, read("unclear", 1.0, 9.0, 4.0), "resolution"),
        (read("unclear", -9.0, 8.0, -2.0), SHARP, "direction"),
        (read("unclear", 0.1, -0.1, 0.2), SHARP, "contradiction"),
        (read("unclear", 0.4, 0.5, 0.6), SHARP, "contradiction"),
        (SHARP_BETTER, SHARP, "contradiction"),
        (read("too few seeds", 3.0, 3.0, 3.0), SHARP, "contradiction"),
        (None, SHARP, "one side only"),
        (read("not comparable", uneven=True), SHARP, "one side only"),
    ],
)
def test_readings_that_differ_contradict_each_other_if_their_effects_do(
    real: Compared | None, virtual: Compared, relation: Relation
) -> None:
    assert ReadTwice("lost", real, virtual).relation == relation
    found = Agreement((), (), (), (ReadTwice("lost", real, virtual),), (0, 0))
    lines = [line.strip() for line in of_readings(found)]
    met = "met" if relation == "same" else "missed"
    assert lines[0] == f"Readings: {int(relation == 'same')} of 1 are the same (wanted: all: {met})"
    if relation == "same":
        assert len(lines) == 1
    else:
        assert lines[1].startswith("1 ")
        assert "higher (+5.00 [4.75, 5.25]) on virtual time" in lines[2] or virtual is not SHARP


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0])
def test_effects_that_are_the_same_are_seldom_said_to_be_apart(spread: float) -> None:
    """At the 5% level; an interval from both is a cautious one for as few as three seeds."""
    rng, runs = np.random.default_rng(1), 1000
    apart = 0
    for _ in range(runs):
        one = read("higher", *(2 + rng.normal(size=3)))
        other = read("unclear", *(2 + spread * rng.normal(size=3)))
        apart += ReadTwice("lost", one, other).relation == "contradiction"
    assert 0.001 < apart / runs < 0.07


@pytest.mark.cluster
@pytest.mark.slow
def test_both_are_run_once_and_compared(config: str, tmp_path: Path) -> None:
    settings = ["--set", "seeds=[0]", "--set", "axes.faults={none: []}"]
    command = [sys.executable, "-m", "flows.cli", "validate", config, *settings]
    for left in (2, 0):
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert f"small-virtual: 2 trials, {left} to run" in ended.stdout
        assert f"small: 2 trials, {left} to run" in ended.stdout
        assert "Times: median error" in ended.stdout
    for name in ("small", "small-virtual"):
        assert (tmp_path / "results" / name / "report.html").exists()
