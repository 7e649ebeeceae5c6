"""Drivers and schedulers that are killed within `dps run`: it attempts their trials again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dps.cluster.backends.processes import is_gone
from dps.events import Applied
from flows.execution.attempt import INTERRUPTED
from flows.execution.experiment import AGAIN
from flows.records.events import Audited, TrainingStarted, TrialResumed
from flows.records.record import EARLIER, EVENTS_FILE, Record, read_record
from tests.flows.execution.test_run import CONFIG
from tests.support.commands import Command
from tests.support.deployment import deployed, workers
from tests.support.stores import with_store
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

UPDATES = 240
LOST: dict[str, Any] = {
    **CONFIG,
    "experiment": "lost",
    "training": {"workers": 2, "updates": UPDATES, "compute_seconds": 0.03},
}
KILL = [{"kind": "kill", "target": "server-0", "at_updates": 120, "back_after": 0.2}]
CHECKPOINT = {"durability": {"kind": "checkpoint", "every": 10}}
LAYERED = {"preset": "chain", "durability": {"below": {"every": 10}}}
SECONDS = 120.0  # on a machine that is busy
HOW = {
    "driver": "its driver was lost: killed by SIGKILL; ",
    "scheduler": "Dask's scheduler was lost: the connection to Dask's scheduler at tls://",
}


class Run(Command):
    """A `dps run` in a process of its own."""

    def __init__(self, here: Path, *options: str, **changes: Any) -> None:
        self.folder = with_store(here) / "results" / "lost"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        super().__init__(here, ["run", "lost.yaml", *options], environment)
        (here / "lost.yaml").write_text(yaml.safe_dump({**LOST, **changes}, sort_keys=False))

    def record(self, trial: str) -> Record:
        """What is recorded of a trial so far."""
        path = self.folder / trial / EVENTS_FILE
        return read_record(path) if path.exists() else Record(())

    def updates(self, trial: str) -> int:
        """How many updates a trial has applied, as far as its record tells."""
        return max((each.versions[-1] for each in self.record(trial).of(Applied)), default=0)

    def driver(self, trial: str) -> psutil.Process | None:
        """The process that writes the record of a trial."""
        path = str(self.folder / trial / EVENTS_FILE)
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                if any(file.path == path for file in child.open_files()):
                    return child
        return None

    def scheduler(self, trial: str) -> psutil.Process | None:
        """The scheduler of a trial's cluster, which leads the group of its nodes."""
        driver = self.driver(trial)
        with suppress(psutil.Error, ProcessLookupError):
            below = driver.children(recursive=True) if driver is not None else []
            return next((each for each in below if os.getpgid(each.pid) == each.pid), None)
        return None

    def strike(self, what: str, victims: Mapping[str, int]) -> dict[str, list[psutil.Process]]:
        """Kill the driver or the scheduler of trials, each when it has so many updates.

        Returns the processes that each had then.
        """
        struck: dict[str, list[psutil.Process]] = {}

        def strike_those_that_are_so_far() -> bool:
            assert self.process.poll() is None, self.told
            for trial, updates in victims.items():
                if trial in struck or self.updates(trial) < updates:
                    continue
                driver = self.driver(trial)
                victim = driver if what == "driver" else self.scheduler(trial)
                assert driver is not None
                assert victim is not None
                struck[trial] = [driver, *driver.children(recursive=True)]
                victim.kill()
            return len(struck) == len(victims)

        eventually(strike_those_that_are_so_far, SECONDS)
        return struck

    def rows(self) -> dict[str, dict[str, Any]]:
        """What `dps results` shows of each trial."""
        words = [sys.executable, "-m", "flows.cli", "results", "lost", "--json"]
        shown = subprocess.run(words, cwd=self.here, capture_output=True, text=True, check=True)
        return {row["trial"]: row for row in json.loads(shown.stdout)["trials"]}

    def kept(self) -> list[Path]:
        """The records of attempts that failed."""
        return sorted((self.folder / EARLIER).glob(f"*/{EVENTS_FILE}"))

    def has_kept(self, number: int) -> bool:
        """Whether the records of so many attempts that failed are kept."""
        return len(self.kept()) == number


def has_ended(process: psutil.Process) -> bool:
    """Whether a process runs no more, though the system may not have tidied up after it yet.

    While it does, the process is no zombie, but has no memory any more, and so no environment.
    """
    try:
        return is_gone(process, 0.0) or not process.environ()
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("what", "parallel", "checkpoints"),
    [("driver", 2, CHECKPOINT), ("scheduler", 1, LAYERED)],
    ids=["driver", "scheduler"],
)
def test_a_grid_ends_whole_though_drivers_or_schedulers_are_lost(
    tmp_path: Path, what: str, parallel: int, checkpoints: dict[str, Any]
) -> None:
    goes_on, starts_again = "checkpoint.no-fault.seed-0", "chain.kill.seed-0"
    axes = {
        "recovery": {"checkpoint": checkpoints, "chain": "chain"},
        "faults": {"no fault": [], "kill": KILL},
    }
    with Run(tmp_path, "--parallel", str(parallel), axes=axes) as run:
        struck = run.strike(what, {goes_on: 60, starts_again: 150})
        kept = run.folder / goes_on / INTERRUPTED
        eventually(lambda: kept.exists() and len(run.kept()) == 1, SECONDS)
        # Whatever an attempt has left would disturb the next one, which begins just then.
        assert all(has_ended(each) for processes in struck.values() for each in processes)
    assert run.process.returncode == 0, run.told

    rows = run.rows()
    assert {row["status"] for row in rows.values()} == {"valid"}
    assert {name: row["failed_before"] for name, row in rows.items() if row["failed_before"]} == {
        starts_again: 1
    }
    records = {name: run.record(name) for name in rows}
    assert [name for name, record in records.items() if record.of(TrialResumed)] == [goes_on]
    for name in (goes_on, starts_again):
        (audited,) = records[name].of(Audited)
        assert audited.version == sum(audited.applied.values()) == UPDATES

    (resumed,) = records[goes_on].of(TrialResumed)
    assert 30 <= resumed.updates < UPDATES  # of a chain, no ack waits for what is below
    line = f"{goes_on}: {HOW[what]}"
    assert line in run.told
    assert "; it resumes from its checkpoints\n" in run.told
    assert f" resumed at update {resumed.updates}, from checkpoints in " in run.told
    assert read_record(kept).ended is None

    assert f"{starts_again}: {HOW[what]}" in run.told
    assert "; it restarts\n" in run.told
    [failed] = run.kept()
    ended = read_record(failed).ended
    assert ended is not None
    assert (ended.status, ended.reason.startswith(HOW[what])) == ("failed", True)
    # Its record is whole, so that it compares with its control; that of the other has no beginning.
    assert rows[starts_again]["effect_time_mean"] is not None
    assert rows["checkpoint.kill.seed-0"]["effect_time_mean"] is None


def test_what_is_lost_too_often_has_failed_and_the_next_run_tries_it_again(tmp_path: Path) -> None:
    with Run(tmp_path, seeds=[0, 1]) as run:
        for attempt in range(1 + AGAIN):
            eventually(partial(run.has_kept, attempt), SECONDS)
            run.strike("driver", {"seed-0": 10})
    assert run.process.returncode == 1, run.told
    ended = run.record("seed-0").ended
    assert ended is not None
    assert ended.status == "failed"
    assert ended.reason.startswith(HOW["driver"])
    assert ended.reason.endswith("; 3 losses in this run")
    other = run.record("seed-1")
    assert other.failed_before == 0
    assert other.ended is not None
    assert other.ended.status == "valid"

    with Run(tmp_path, seeds=[0, 1]) as run:
        pass
    assert run.process.returncode == 0, run.told
    assert run.record("seed-0").failed_before == 1 + AGAIN


def test_without_resuming_a_trial_with_checkpoints_starts_again(tmp_path: Path) -> None:
    what = "driver"
    with Run(tmp_path, "--no-resume", recovery=CHECKPOINT) as run:
        run.strike(what, {"seed-0": 60})
    assert run.process.returncode == 0, run.told
    assert f"seed-0: {HOW[what]}" in run.told
    assert "; it restarts\n" in run.told
    record = run.record("seed-0")
    assert record.failed_before == len(run.kept()) == 1
    assert not record.of(TrialResumed)
    assert not (run.folder / "seed-0" / INTERRUPTED).exists()
    assert record.ended is not None
    assert record.ended.status == "valid"


@pytest.mark.deployment
def test_a_trial_on_a_deployment_goes_on_as_well_when_its_driver_is_lost(tmp_path: Path) -> None:
    with deployed(tmp_path, workers(4)) as address:
        cluster = {"kind": "existing", "address": address, "patience": 60.0}
        with Run(tmp_path, recovery=CHECKPOINT, cluster=cluster) as run:
            run.strike("driver", {"seed-0": 60})
        assert run.process.returncode == 0, run.told
    record = run.record("seed-0")
    (resumed,) = record.of(TrialResumed)
    assert "; it resumes from its checkpoints\n" in run.told
    assert f" resumed at update {resumed.updates}, from checkpoints in " in run.told
    (audited,) = record.of(Audited)
    assert audited.version == sum(audited.applied.values()) == UPDATES


def test_a_scheduler_that_is_lost_before_the_training_begins_is_noticed_soon(
    tmp_path: Path,
) -> None:
    with Run(tmp_path) as run:
        scheduler = eventually(lambda: run.scheduler("seed-0"), SECONDS)
        assert scheduler is not None
        scheduler.kill()
        killed = time.monotonic()
        assert not run.record("seed-0").of(TrainingStarted)
        eventually(lambda: "Dask's scheduler was lost: " in run.told, SECONDS)
        assert time.monotonic() - killed < 30
    assert run.process.returncode == 0, run.told
    assert run.record("seed-0").failed_before == 1
