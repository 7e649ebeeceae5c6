"""What a trial would refuse of its configuration is refused before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dps.errors import ConfigurationError
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, expand
from flows.execution.experiment import dataset_digests
from flows.execution.preflight import check_models
from tests.support.virtual_trials import BASE, virtual_trial

PATCHES: dict[str, Any] = {"kind": "patches", "count": 100, "size": 3, "components": 4}
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


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({}, 1437),
        ({"training": {"partition": "by_class", "workers": 30}}, 47),
        ({"dataset": PATCHES, "workload": {"kind": "rica", "filters": 4}}, 100),
    ],
)
def test_a_batch_has_no_more_examples_than_a_worker_has(
    tmp_path: Path, changes: dict[str, Any], largest: int
) -> None:
    def with_batches_of(size: int) -> dict[str, Any]:
        return {**changes, "training": {**changes.get("training", {}), "batch_size": size}}

    with pytest.raises(ConfigurationError, match=f"{largest:,} rows to train on"):
        planned(**with_batches_of(largest + 1))
    (trial,) = planned(**with_batches_of(largest))
    sections = json.loads(trial.config.model_dump_json(exclude={"experiment", "seed"}))
    assert virtual_trial(tmp_path / "trial", **sections).outcome.valid


@pytest.mark.parametrize(
    ("changes", "shards", "unit"),
    [
        ({}, 650, "elements"),
        ({"optimizer": GROUPED}, 74, "rows"),
        ({"workload": {"kind": "mlp", "hidden": [2]}}, 160, "elements"),
        ({"workload": {"kind": "rica", "filters": 3}, "dataset": PATCHES}, 12, "elements"),
    ],
)
def test_each_shard_has_something_to_hold(changes: dict[str, Any], shards: int, unit: str) -> None:
    with pytest.raises(ConfigurationError, match=f"server.shards: .*only {shards} {unit}"):
        planned(**changes, server={"shards": shards + 1})
    planned(**changes, server={"shards": shards})


def test_patches_are_no_fewer_than_their_components() -> None:
    changes = {"workload": {"kind": "rica", "filters": 4}, "training": {"batch_size": 2}}
    with pytest.raises(ValueError, match="count=3, expected at least the 4 components"):
        planned(**changes, dataset={**PATCHES, "count": 3})
    planned(**changes, dataset={**PATCHES, "count": 4})


def test_data_whose_size_is_known_when_they_are_loaded_are_looked_at_before_a_trial() -> None:
    """Pixels in the corners of digits are always the same: nothing can be whitened to 63."""
    flat = {"kind": "patches", "count": 100, "size": 8, "components": 63}
    trials = planned(dataset=flat, workload={"kind": "rica"})
    with pytest.raises(ConfigurationError, match="do not vary in 63 components"):
        dataset_digests(trials)
