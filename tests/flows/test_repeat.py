"""The configuration that is put together from records: the same trials, of grids of any shape."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from dps.events import TrialStarted
from flows.config import ExperimentConfig
from flows.grid import Trial, expand
from flows.kept import settings
from flows.record import Record
from flows.repeat import experiment_yaml

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
LEFT_OUT = [{"recovery": "chain", "training.workers": 4}]


def record_of(trial: Trial, order_seed: int) -> Record:
    kept = settings(trial, {"order_seed": order_seed})
    return Record((TrialStarted(0.0, trial.name, kept, {}),))


@pytest.mark.parametrize(
    "shape", [{}, {"zip": IN_STEP}, {"exclude": LEFT_OUT}, {"zip": IN_STEP, "exclude": LEFT_OUT}]
)
def test_it_expands_to_the_same_trials(shape: dict[str, Any]) -> None:
    trials = expand(ExperimentConfig.model_validate({**BASE, **shape}))
    text = experiment_yaml([record_of(t, 7) for t in sorted(trials, key=lambda t: t.name)])
    again = ExperimentConfig.model_validate(yaml.safe_load(text))
    assert {t.digest: t.name for t in expand(again)} == {t.digest: t.name for t in trials}
    assert bool(again.zip) == ("zip" in shape)
    assert again.order_seed == 7


def test_what_is_left_out_of_a_record_is_there_as_its_default() -> None:
    axes = {
        "filters": {"none": {}, "some": {"*": [{"kind": "top_k", "share": 0.5}]}},
        "optimizer.staleness_aware": [False, True],
        "optimizer.delay_compensation": {"no": None, "yes": 0.1},
    }
    trials = expand(ExperimentConfig.model_validate({**BASE, "axes": axes, "seeds": [0]}))
    for order in (trials, trials[::-1]):
        text = experiment_yaml([record_of(trial, 7) for trial in order])
        again = ExperimentConfig.model_validate(yaml.safe_load(text))
        assert {t.digest: t.name for t in expand(again)} == {t.digest: t.name for t in trials}
