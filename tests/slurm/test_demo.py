"""The demo on a real Slurm, as a user runs it: servers in one partition, workers in the other.

Its faults are those of a cluster: `scancel --signal=KILL`, and a host that is set down. Whatever is
claimed of the strategies must hold as it does on one machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.events import Killed, NodeJoined, Promoted, Restored
from flows.records.record import Record, read_record
from tests.slurm.there import CLUSTER, skip_without
from tests.support.waiting import eventually

# Twelve trials, each with jobs of its own.
pytestmark = [pytest.mark.cluster, pytest.mark.slurm, pytest.mark.timeout(600)]

KILL = {"kind": "kill", "target": "server-0", "at_updates": 100, "back_after": 1.5}
FAULTS = {"no fault": [], "scancel": [KILL], "node down": [{**KILL, "by": "host"}]}
STRATEGIES = ("none", "checkpoint", "chain", "stateless")
EVERY = 100  # updates between checkpoints, as in configs/demo.yaml

Row = dict[str, Any]


def dps(here: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "flows.cli", *arguments]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CRITICAL" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo was run, with one seed."""
    skip_without()
    here = tmp_path_factory.mktemp("demo")
    changes = {"cluster": CLUSTER, "seeds": [0], "axes.faults": FAULTS}
    settings = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in changes.items()
    ]
    print(dps(here, "run", "demo", *(word for s in settings for word in ("--set", s))))
    return here


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[tuple[str, str], Row]:
    """Every trial's figures, by strategy and condition."""
    found = json.loads(dps(folder, "results", "demo", "--format", "json"))
    return {(row["strategy"], row["condition"]): row for row in found}


def record_of(folder: Path, strategy: str, condition: str) -> Record:
    name = f"{strategy}.{condition.replace(' ', '-')}.seed-0"
    return read_record(folder / "results" / "demo" / name / "events.jsonl")


def test_every_fault_happened_and_every_trial_counts(rows: dict[tuple[str, str], Row]) -> None:
    assert len(rows) == len(STRATEGIES) * len(FAULTS)
    assert {key: (row["status"], row["reason"]) for key, row in rows.items()} == dict.fromkeys(
        rows, ("valid", "")
    )


def test_the_strategies_lose_what_they_are_said_to(rows: dict[tuple[str, str], Row]) -> None:
    for (strategy, condition), row in rows.items():
        lost = row["updates_lost"]
        if condition == "no fault" or strategy in ("chain", "stateless"):
            assert lost == 0, (strategy, condition)
        elif strategy == "none":
            assert lost >= KILL["at_updates"], condition
        else:
            shards = 1 if condition == "scancel" else 2  # both servers may be on the host
            assert 0 <= lost <= shards * EVERY, condition


def test_only_a_stateless_server_lets_workers_go_on(rows: dict[tuple[str, str], Row]) -> None:
    for (strategy, condition), row in rows.items():
        went_on = row["updates_replayed"] > 0
        assert went_on == (strategy == "stateless" and condition != "no fault"), (
            strategy,
            condition,
        )


def test_a_chain_is_back_first(rows: dict[tuple[str, str], Row]) -> None:
    for condition in ("scancel", "node down"):
        times = {s: rows[s, condition]["rto_seconds"] for s in STRATEGIES}
        assert min(times, key=times.__getitem__) == "chain", times


def test_every_training_gets_where_it_would_have_got_without_the_fault(
    rows: dict[tuple[str, str], Row],
) -> None:
    for (strategy, condition), row in rows.items():
        without = rows[strategy, "no fault"]["accuracy_final"]
        assert row["accuracy_final"] > without - 0.05, (strategy, condition)


def test_what_slurm_says_is_on_record(folder: Path) -> None:
    for strategy in STRATEGIES:
        (one,) = record_of(folder, strategy, "scancel").of(Killed)
        assert one.gone
        assert one.evidence.startswith("job ")
        assert "RUNNING" not in one.evidence
        with_host = record_of(folder, strategy, "node down").of(Killed)
        assert "server-0" in {event.node for event in with_host}
        assert all(event.gone for event in with_host)
        assert all("NODE_FAIL, host" in event.evidence for event in with_host)
        assert all(event.evidence.endswith("DOWN") for event in with_host)


def test_a_chain_survives_its_host_because_its_replicas_have_different_ones(folder: Path) -> None:
    record = record_of(folder, "chain", "node down")
    lost = {event.node for event in record.of(Killed)}
    assert not {"server-0", "replica-0-1"} <= lost
    assert record.of(Promoted)
    assert not [event for event in record.of(Restored) if event.epoch > 1]
    assert {event.node for event in record.of(NodeJoined)} >= {f"{name}-b" for name in lost}


def test_nothing_is_left(folder: Path) -> None:
    shown = ["squeue", "-h", "-t", "pending,running"]
    eventually(lambda: not subprocess.run(shown, capture_output=True).stdout, 30.0)
    down = subprocess.run(["sinfo", "-h", "-t", "down,drain", "-o", "%N"], capture_output=True)
    assert not down.stdout.strip()
    assert {path.name for path in folder.iterdir()} == {"job-logs", "mlruns", "results"}
