"""`dps rerun`: a recorded trial runs again under the faults that it met."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dps.errors import ConfigurationError
from dps.events import Disturbed, Event, FaultMissed, Killed, Paused
from dps.faults import Among, AtUpdates, InChain, Kill, Pause, Seat, Slow
from flows.config.experiment import load_experiment
from flows.config.trials import Trial, expand
from flows.execution.rerun import as_it_was, rerun_of
from flows.execution.trial import run_trial
from flows.records.events import TrialStarted
from flows.records.record import EVENTS_FILE, EventWriter, Record, read_record
from tests.flows.execution.test_run import CONFIG
from tests.support.commands import dps

FAULTS = [
    {"kind": "pause", "target": {"pick": "random"}, "at_updates": 20, "seconds": 0.2},
    {
        "kind": "kill",
        "target": {"shard": 0},
        "after": {"fault": 0, "seconds": 0.3},
        "back_after": 0,
    },
]


def small(here: Path, **changes: object) -> Trial:
    path = here / "small.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, **changes}))
    (trial,) = expand(load_experiment(str(path)))
    return trial


def test_whom_a_fault_hit_is_kept() -> None:
    soon = AtUpdates(5)
    plan = (
        Pause(Among("random"), soon),
        Kill(InChain(0), soon),
        Kill(Seat("server-0"), soon),
        Kill(Among("all", "worker"), soon),
        Pause(Among("random", "worker"), soon),
        Slow(Among("random"), soon, seconds=1.0),
    )
    events: list[Event] = [
        Paused(1.0, 0, "worker-1", 7, 5, True),
        Killed(2.0, 1, "replica-0-1", 8, 5, True),
        Killed(3.0, 2, "server-0-b", 9, 5, True),
        Killed(4.0, 3, "worker-0", 10, 5, True),
        Killed(4.0, 3, "worker-1", 11, 5, True),
        FaultMissed(5.0, 4, "a random worker node", "no such node existed then"),
        Disturbed(6.0, 5, "slow", "server-1", 5, "stopped half of the time", True),
    ]
    assert as_it_was(plan, Record(tuple(events))) == (
        Pause(("worker-1",), soon),
        Kill(("replica-0-1",), soon),
        plan[2],  # the same kills before it make for the same replacement
        Kill(("worker-0", "worker-1"), soon),
        plan[4],
        Slow(("server-1",), soon, seconds=1.0),
    )


def test_what_is_not_recorded_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing is recorded in"):
        rerun_of("small/seed-0", tmp_path)
    folder = tmp_path / "results" / "small" / "seed-0"
    folder.mkdir(parents=True)
    (folder / EVENTS_FILE).write_text("")
    with pytest.raises(ConfigurationError, match="did you mean 'small/seed-0'"):
        rerun_of("small/seed-1", tmp_path)
    with pytest.raises(ConfigurationError, match="was not recorded by this version of dps"):
        rerun_of("small/seed-0", tmp_path)
    kept = {"config": {**CONFIG, "speed": 3}}
    with EventWriter(folder / EVENTS_FILE) as write:
        write(TrialStarted(1.0, "seed-0", kept, {}))
    with pytest.raises(ConfigurationError, match=r"config\.speed: unknown key[\s\S]*use dps run"):
        rerun_of("small/seed-0", tmp_path)


def test_a_trial_runs_again_under_the_faults_that_it_met(tmp_path: Path) -> None:
    slow = {"workers": 1, "updates": 100, "compute_seconds": 0.01}
    trial = small(tmp_path, faults=FAULTS, training=slow, cluster={"kind": "virtual"})
    folder = tmp_path / "results" / "small" / trial.name
    folder.mkdir(parents=True)
    run_trial(trial, folder, lambda event: None)
    ended = dps(tmp_path, "rerun", f"small/{trial.name}")
    assert ended.returncode == 0, ended.stderr
    first, again = (
        read_record(tmp_path / "results" / "small" / name / EVENTS_FILE)
        for name in ("seed-0", "seed-0.rerun-1")
    )
    assert again.started is not None
    assert again.started.trial == "seed-0.rerun-1"
    for record in (first, again):
        assert record.ended is not None
        assert record.ended.status == "valid", record.ended.reason
    for kind in (Paused, Killed):
        hit = [[(e.fault, e.node) for e in record.of(kind)] for record in (first, again)]
        assert len(hit[0]) == 1
        assert hit[0] == hit[1]
    cells = [line.split() for line in ended.stdout.splitlines()]
    assert ["metric", "seed-0", "seed-0.rerun-1", "difference"] in cells
    assert ["status", "valid", "valid"] in cells
    assert rerun_of(f"small/{trial.name}", tmp_path).trial.name == "seed-0.rerun-2"
