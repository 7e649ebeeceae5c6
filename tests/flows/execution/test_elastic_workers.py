"""Trials in which servers and workers come and go: what may be asked for, and one that is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.elastic import Row, table
from dps.events import Applied, Moved, Rescaled, WorkerLeft
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.config.base import ChangeSection
from flows.config.experiment import TrialConfig, load_experiment
from flows.config.trials import expand
from flows.execution.resume import can_go_on
from flows.execution.trial import run_trial
from flows.monitor.progress import Course
from flows.records.record import Record, read_record
from flows.report.figures.curves import RATE_BY_TIME, curves, is_rescaled
from flows.report.figures.dataset import Subject
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


def test_a_recorded_configuration_is_read_back(config: Path) -> None:
    trial = only(config, elastic(*CHANGES), "server.shards=6")
    assert TrialConfig.model_validate(trial.model_dump(mode="json")) == trial
    assert not can_go_on(trial)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"servers": 2}, "expected one moment"),
        ({"at_updates": 5, "at_seconds": 1.0, "servers": 2}, "expected one moment"),
        ({"at_updates": 5}, "expected what changes: servers, workers or both"),
        ({"at_updates": 5, "servers": 3}, "2 shards with one replica each can be spread over 1"),
        ({"at_updates": 100, "workers": 3}, "ends after 100 updates"),
        ({"at_updates": 5, "workers": 0}, "expected more than 0, got 0"),
        ({"at_updates": 5, "worker": 3}, "did you mean 'workers'"),
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


def test_a_change_is_due_at_its_moment() -> None:
    assert not ChangeSection(at_updates=5, servers=1).is_due(4, 99.0)
    assert ChangeSection(at_updates=5, servers=1).is_due(5, 0.0)
    assert not ChangeSection(at_seconds=2.0, workers=1).is_due(99, 1.9)
    assert ChangeSection(at_seconds=2.0, workers=1).is_due(0, 2.0)


def test_progress_tells_of_changes_and_moves() -> None:
    course = Course(shards=2, started=100.0)
    assert course.take(Rescaled(101.0, 4, None, 30)) == (
        "  1.00 s  after 30 updates, wanted from now on: servers: 4"
    )
    moved = Moved(102.0, 1, 5, "server-0", "server-2", 100, 0.05, 0.0123)
    assert course.take(moved) == (
        "  2.00 s  shard 1 moved from server-0 to server-2, with a pause of 12 ms"
    )


def test_the_table_of_the_benchmark_gives_a_verdict() -> None:
    moved = [Moved(1.0, 0, 3, "a", "b", 100, 0.05, 0.01)]
    quick, slow = Row("none", moved, [0.03], [0.02]), Row("chain", moved, [0.3], [0.02])
    lines = table([quick, slow]).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["none", "chain"]
    assert [line.split()[-1] for line in lines[-2:]] == ["met", "missed"]


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
    fixed = tuple(event for event in record.events if not isinstance(event, Rescaled))
    plain = Record(fixed)
    condition = found.identity.condition
    for records, marked in (([plain, record], True), ([plain], False)):
        subject = Subject.of([(each, found) for each in records])
        assert is_rescaled(subject, condition) == marked
        drawing = curves(subject, RATE_BY_TIME, condition)
        assert drawing is not None
        assert ("Dotted: " in drawing.note) == marked
