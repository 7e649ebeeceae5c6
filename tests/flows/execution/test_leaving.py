"""Whole trials in which nodes are told to leave: they are replaced, and every update is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.events import (
    Applied,
    Evaluated,
    Event,
    NodeDrained,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    WorkerJoined,
    WorkerLeft,
)
from dps.recovery.strategy import PRESETS
from flows.config.experiment import load_experiment
from flows.config.trials import expand
from flows.execution.trial import run_trial
from flows.metrics.faults import evaluator_lost, first_unplanned
from flows.metrics.outcome import outcome
from flows.metrics.prices import load_prices
from flows.records.events import Audited, TrialEnded
from flows.records.record import Record, event_files, read_record
from tests.flows.execution.test_run import CONFIG

pytestmark = pytest.mark.cluster

UPDATES = 200
MOMENT = 40


def config(**changes: Any) -> str:
    return yaml.safe_dump(
        {
            **CONFIG,
            "experiment": "leaving",
            "training": {"workers": 2, "updates": UPDATES, "compute_seconds": 0.03},
            "server": {"shards": 2, "lease": 10.0},
            "evaluation": {"every_seconds": 0.5},
            "time_limit": 60.0,
            **changes,
        }
    )


class Teller:
    """Sends signals to nodes once there are so many updates."""

    def __init__(self, signals: dict[str, int]) -> None:
        self._signals = signals
        self._pids: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, NodeJoined):
            self._pids[event.node] = event.pid
        elif isinstance(event, Applied) and event.versions[-1] >= MOMENT:
            for node, number in self._signals.items():
                os.kill(self._pids[node], number)
            self._signals = {}


def trained(folder: Path, teller: Teller, **changes: Any) -> Record:
    (folder / "leaving.yaml").write_text(config(**changes))
    (trial,) = expand(load_experiment(folder / "leaving.yaml"))
    run_trial(trial, folder, teller)
    return read_record(folder / "events.jsonl")


def check_whole(record: Record, updates: int = UPDATES, most: int = 0) -> None:
    """The trial is valid, and has every update once; lost workers may have `most` under way."""
    (ended,) = record.of(TrialEnded)
    assert (ended.status, ended.reason) == ("valid", "")
    audits = record.of(Audited)
    assert len(audits) == 2
    for audited in audits:
        assert updates <= audited.version <= updates + most
        assert audited.version == sum(audited.applied.values())


@pytest.mark.slow
def test_nodes_of_every_role_are_replaced_and_it_is_no_loss(tmp_path: Path) -> None:
    told = ("server-0", "store-0", "worker-1", "evaluator-0")
    record = trained(tmp_path, Teller(dict.fromkeys(told, signal.SIGTERM)), recovery="stateless")
    check_whole(record)
    assert first_unplanned(record) is None
    assert not evaluator_lost(record)
    assert {event.node for event in record.of(NodeLeaving)} == set(told)
    assert {event.node for event in record.of(NodeDrained)} == {"server-0", "store-0"}
    assert {event.node for event in record.of(NodeLeft)} == set(told)
    joined = {event.node for event in record.of(NodeJoined)}
    assert joined >= {f"{name}-b" for name in told}
    assert {event.reason for event in record.of(WorkerLeft)} == {"finished"}
    assert [e.node for e in record.of(WorkerJoined) if e.incarnation == 2] == ["worker-1-b"]
    left = max(event.t for event in record.of(NodeLeft))
    assert any(event.t > left for event in record.of(Evaluated))


@pytest.mark.slow
def test_what_is_killed_by_no_fault_is_replaced_so_that_the_training_ends(tmp_path: Path) -> None:
    teller = Teller(dict.fromkeys(("server-1", "worker-0", "worker-1"), signal.SIGKILL))
    record = trained(tmp_path, teller, recovery="chain")
    check_whole(record, most=2)
    assert {event.node for event in record.of(NodeJoined)} & {"worker-0-b", "worker-1-b"}
    assert first_unplanned(record) is not None


@pytest.mark.slow
def test_somebody_else_is_hired_where_nobody_has_a_share(tmp_path: Path) -> None:
    record = trained(
        tmp_path,
        Teller({"worker-0": signal.SIGTERM}),
        training={"workers": 1, "updates": UPDATES, "compute_seconds": 0.01},
        elastic=[{"at_updates": UPDATES // 2, "servers": 1}],
    )
    check_whole(record, most=UPDATES)  # it takes a moment to see that it is enough
    hired = [(event.worker, event.node) for event in record.of(WorkerJoined)]
    assert hired == [("worker-0", "worker-0"), ("worker-1", "worker-0-b")]


@pytest.mark.deployment
def test_trials_outlive_all_of_their_nodes_under_every_strategy(tmp_path: Path) -> None:
    """Each node may run for some 40 seconds only, and so may whoever takes its place."""
    training = {"workers": 2, "updates": UPDATES, "compute_seconds": 0.3}
    axes = {"recovery": list(PRESETS)}
    (tmp_path / "all.yaml").write_text(config(training=training, axes=axes, time_limit=300.0))
    lifetime = "DASK_DISTRIBUTED__WORKER__LIFETIME__"
    settings = {f"{lifetime}DURATION": "40s", f"{lifetime}STAGGER": "4s"}
    command = [sys.executable, "-m", "flows.cli", "run", "all.yaml", "--parallel", "2"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, **settings})
    records = event_files(tmp_path / "results" / "leaving")
    assert len(records) == len(PRESETS)
    for record in map(read_record, records):
        check_whole(record)
        assert first_unplanned(record) is None
        left = {event.node for event in record.of(NodeLeft)}
        assert left >= {"server-0", "server-1", "worker-0", "worker-1", "evaluator-0"}
        assert {event.why for event in record.of(NodeLeaving)} == {"lifetime"}
        assert outcome(record, load_prices()).row()["updates_lost"] == 0
