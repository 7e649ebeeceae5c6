"""The pilot of an experiment: which records serve as one, and which are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dps.errors import ConfigurationError
from flows.config.experiment import ExperimentConfig
from flows.config.trials import expand
from flows.execution.plan import find_pilot
from flows.metrics.prices import load_prices
from flows.records.events import TrialStarted
from tests.support.synthetic import (
    KILL,
    STRATEGIES,
    demo_trials,
    toy_events,
    write_events,
    write_experiment,
)
from tests.support.virtual_trials import BASE, virtual_trial

Warn = Callable[[str], object]

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
    write_experiment(tmp_path / "results" / "demo")
    assert pilot_of(toy, tmp_path) == (2 * 2 * len(STRATEGIES), "demo")
    folder = str(write_experiment(tmp_path / "elsewhere"))
    assert pilot_of(toy, tmp_path, folder) == (2 * 2 * len(STRATEGIES), folder)
    with pytest.raises(ConfigurationError, match="did you mean 'demo'"):
        pilot_of(toy, tmp_path, "dmo")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"updates": 400}}, "training.updates is 800, planned 400"),
        ({"optimizer": {"kind": "sgd", "learning_rate": 0.2}}, "learning_rate is 0.1, planned"),
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
    with pytest.raises(ConfigurationError, match=rf"--pilot demo: .*{re.escape(said)}.*dps run"):
        pilot_of(planned, tmp_path, "demo")
    told = list[str]()
    assert pilot_of(planned, tmp_path, warn=told.append) == (0, "")
    assert len(told) == 1
    assert said in told[0]


@pytest.mark.parametrize(
    ("section", "changes", "said"),
    [
        ("faults", [KILL, {**KILL, "target": "server-1"}], "faults.1.kind is 'kill', planned"),
        (
            "optimizer",
            {"clip": {"norm": 1.0, "value": None}},
            "optimizer.clip.norm is 1.0, planned",
        ),
        ("optimizer", {"schedule": {"kind": "cosine", "over": 800}}, "schedule.kind is 'cosine'"),
    ],
)
def test_a_pilot_with_what_the_plan_lacks_is_refused(
    toy: ExperimentConfig, tmp_path: Path, section: str, changes: Any, said: str
) -> None:
    started, *rest = toy_events("chain", "kill")
    assert isinstance(started, TrialStarted)
    config = started.settings["config"]
    value = {**config[section], **changes} if isinstance(changes, dict) else changes
    settings = {**started.settings, "config": {**config, section: value}}
    write_events(tmp_path / "pilot" / "a-trial", [replace(started, settings=settings), *rest])
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        pilot_of(toy, tmp_path, str(tmp_path / "pilot"))


def test_a_virtual_pilot_is_known_by_its_profile(tmp_path: Path) -> None:
    """It may be that of a real experiment, but not of one with another profile."""
    virtual_trial(tmp_path / "pilot" / "a-trial", cluster={"kind": "virtual", "profile": "laptop"})
    for cluster, told in (
        ({"kind": "local"}, ""),
        ({"kind": "virtual", "profile": "laptop"}, ""),
        ({"kind": "virtual", "profile": "cluster-25gbit"}, "cluster.profile.*, planned "),
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
