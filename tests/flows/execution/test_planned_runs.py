"""What a trial would refuse of its configuration is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dps.errors import ConfigurationError
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, expand
from flows.execution.preflight import check_models
from tests.support.virtual_trials import BASE, virtual_trial

GROUPED: dict[str, Any] = {
    "kind": "proximal",
    "learning_rate": 0.1,
    "penalty": {"kind": "group_l1", "strength": 0.01},
}


def planned(**changes: Any) -> tuple[Trial, ...]:
    """Return trials that `dps plan` accepts; sections are those of small trials, changed."""
    written: dict[str, Any] = {key: value for key, value in BASE.items() if key != "seed"}
    for key, change in changes.items():
        merge = isinstance(change, dict) and "kind" not in change
        written[key] = {**written[key], **change} if merge else change
    trials = expand(ExperimentConfig.model_validate({**written, "seeds": [3]}))
    check_models(trials)
    return trials


def test_a_batch_has_no_more_examples_than_a_worker_has(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"training": {"partition": "by_class", "workers": 30}}
    largest = 47

    def with_batches_of(size: int) -> dict[str, Any]:
        return {**changes, "training": {**changes.get("training", {}), "batch_size": size}}

    with pytest.raises(ConfigurationError, match=f"{largest:,} rows to train on"):
        planned(**with_batches_of(largest + 1))
    (trial,) = planned(**with_batches_of(largest))
    sections = json.loads(trial.config.model_dump_json(exclude={"experiment", "seed"}))
    assert virtual_trial(tmp_path / "trial", **sections).outcome.valid


@pytest.mark.parametrize(
    ("changes", "shards", "unit"),
    [({}, 650, "elements"), ({"optimizer": GROUPED}, 74, "rows")],
)
def test_each_shard_has_something_to_hold(changes: dict[str, Any], shards: int, unit: str) -> None:
    with pytest.raises(ConfigurationError, match=f"server.shards: .*only {shards} {unit}"):
        planned(**changes, server={"shards": shards + 1})
    planned(**changes, server={"shards": shards})
