"""The configuration that is put together from records: the same trials, of grids of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dps.events import TrialStarted
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, expand, load_trials
from flows.records.record import Record
from flows.records.settings import settings
from flows.report.reproduce import experiment_yaml

BASE: dict[str, Any] = {
    "experiment": "grid",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "axes": {
        "recovery": ["none", "chain", "checkpoint"],
        "training.workers": [1, 2, 4],
        "training.updates": {"short": 40, "medium": 30, "long": 10},
    },
    "seeds": [3, 1],
}
IN_STEP = [["training.workers", "training.updates"]]
DEFAULTS = {
    "training.workers": [1, 2],
    "elastic": {"fixed": [], "one more": [{"at_updates": 9, "workers": 3}]},
    "server.servers": {"by shard": None, "one": 1},
    "optimizer.staleness_aware": [False, True],
}
LEFT_OUT = [{"recovery": "chain", "training.workers": 4}]


def record_of(trial: Trial, order_seed: int) -> Record:
    kept = settings(trial, {"order_seed": order_seed})
    return Record((TrialStarted(0.0, trial.name, kept, {}),))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"zip": IN_STEP},
        {"exclude": LEFT_OUT},
        {"zip": IN_STEP, "exclude": LEFT_OUT},
        {"axes": DEFAULTS},
    ],
)
def test_it_expands_to_the_same_trials(shape: dict[str, Any]) -> None:
    trials = expand(ExperimentConfig.model_validate({**BASE, **shape}))
    text = experiment_yaml([record_of(t, 7) for t in sorted(trials, key=lambda t: t.name)])
    again = ExperimentConfig.model_validate(yaml.safe_load(text))
    assert {t.digest: t.name for t in expand(again)} == {t.digest: t.name for t in trials}
    assert bool(again.zip) == ("zip" in shape)
    assert again.order_seed == 7


def test_settings_that_are_the_default_are_there_too() -> None:
    axes = {
        "training.partition": {"shared data": "shared", "own classes": "by_class"},
        "training.straggling": {"nobody": None, "one": {"factor": 4.0, "workers": [0]}},
        "filters": {"none": {}, "some": {"*": [{"kind": "top_k", "share": 0.5}]}},
        "optimizer.staleness_aware": [False, True],
        "optimizer.delay_compensation": {"no": None, "yes": 0.1},
    }
    training = {"updates": 100, "compute_seconds": 0.01}
    experiment = {**BASE, "training": training, "axes": axes, "seeds": [0]}
    trials = expand(ExperimentConfig.model_validate(experiment))
    for order in (trials, trials[::-1]):
        text = experiment_yaml([record_of(trial, 7) for trial in order])
        again = ExperimentConfig.model_validate(yaml.safe_load(text))
        assert {t.digest: t.name for t in expand(again)} == {t.digest: t.name for t in trials}


@pytest.mark.parametrize("backwards", [False, True])
def test_it_says_what_is_set_in_every_entry_of_a_list(backwards: bool) -> None:
    experiment, trials = load_trials("frontier", ["seeds=[100]"])
    assert "faults.*.back_after" in experiment.axes
    records = [record_of(trial, 0) for trial in (trials[::-1] if backwards else trials)]
    text = experiment_yaml(records, experiment.claims, experiment.comparison)
    again = ExperimentConfig.model_validate(yaml.safe_load(text))
    assert {t.digest: t.name for t in expand(again)} == {t.digest: t.name for t in trials}
    assert again.comparison == experiment.comparison
    assert again.claims == experiment.claims


def test_what_is_set_in_every_entry_of_lists_that_have_none_is_nothing() -> None:
    faults = {"none": []}
    axes = {"faults": faults, "faults.*.back_after": {"soon": 1.0, "late": 8.0}}
    trials = expand(ExperimentConfig.model_validate({**BASE, "axes": axes}))
    again = yaml.safe_load(experiment_yaml([record_of(trial, 0) for trial in trials]))
    assert again["axes"]["faults.*.back_after"] == {"soon": None, "late": None}
    found = expand(ExperimentConfig.model_validate(again))
    assert {t.name for t in found} == {t.name for t in trials}
