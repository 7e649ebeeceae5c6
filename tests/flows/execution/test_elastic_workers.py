"""Trials in which servers and workers come and go: what may be asked for, and one that is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.events import Applied, Moved, WorkerLeft
from flows.config.experiment import load_experiment
from flows.config.trials import expand
from flows.execution.trial import run_trial
from flows.metrics.outcome import outcome
from flows.metrics.prices import load_prices
from flows.records.events import Rescaled
from flows.records.record import read_record
from tests.flows.config.test_experiment import SMALL, complaint, config, only

__all__ = ["config"]

CHANGES: list[dict[str, Any]] = [
    {"at_updates": 30, "servers": 4},
    {"at_updates": 50, "workers": 3},
    {"at_updates": 80, "servers": 3, "workers": 1},
]


def elastic(*changes: dict[str, Any]) -> str:
    return f"elastic={json.dumps(changes)}"


def test_nodes_are_there_for_the_most_that_is_wanted(config: Path) -> None:
    trial = only(config, elastic(*CHANGES), "server.shards=6", "server.servers=2")
    assert trial.servers == 2
    assert trial.node_names == (
        *("server-0", "server-1", "server-2", "server-3"),
        *("worker-0", "worker-1", "worker-2", "evaluator-0"),
    )


def test_without_a_first_number_there_is_a_server_for_each_replica(config: Path) -> None:
    trial = only(config, elastic({"at_updates": 9, "servers": 3}), "recovery=chain")
    assert trial.servers == 4
    assert only(config, elastic({"at_updates": 9, "workers": 3})).servers is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"servers": 2}, "expected one moment"),
        ({"at_updates": 5}, "expected what changes: servers, workers or both"),
        ({"at_updates": 5, "servers": 3}, "expected 1 to 2 for 2 shards with one replica each"),
        ({"at_updates": 100, "workers": 3}, "ends earlier, after 100 updates"),
    ],
)
def test_what_cannot_be_is_told(config: Path, change: dict[str, Any], told: str) -> None:
    text = complaint(config, elastic(change))
    assert "elastic.0" in text
    assert told in text


def test_shards_that_go_back_together_cannot_move(config: Path) -> None:
    together = 'recovery={"durability": {"kind": "checkpoint", "scope": "all"}}'
    assert "cannot move" in complaint(config, elastic({"at_updates": 5, "servers": 1}), together)
    only(config, elastic({"at_updates": 5, "workers": 1}), together)


@pytest.mark.slow
@pytest.mark.cluster
def test_a_real_trial_changes_as_it_was_told(tmp_path: Path) -> None:
    settings = {
        **SMALL,
        "server": {"shards": 6, "servers": 2, "lease": 3.0},
        "training": {"workers": 2, "updates": 120, "compute_seconds": 0.01},
        "elastic": CHANGES,
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(settings))
    (trial,) = expand(load_experiment(str(path)))
    run_trial(trial, tmp_path, lambda event: None)
    record = read_record(tmp_path / "events.jsonl")
    assert record.ended is not None
    assert (record.ended.status, record.ended.reason) == ("valid", "")
    wanted = [(event.servers, event.workers) for event in record.of(Rescaled)]
    assert wanted == [(4, None), (None, 3), (3, 1)]
    assert len(record.of(Moved)) == 2 + 1
    left = {event.worker for event in record.of(WorkerLeft)}
    assert left == {"worker-0", "worker-1", "worker-2"}
    assert {batch.node for batch in record.of(Applied)} == {f"server-{i}" for i in range(4)}
    found = outcome(record, load_prices())
    assert found.valid
