"""`dps run` as a process, with real trials: interruption and return, failed and invalid trials."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dps.errors import StoreUnavailable
from dps.recovery.manifest import find_saved
from flows.records.events import Audited, TrialResumed
from flows.records.record import read_record
from flows.tracking.store import default_uri
from tests.support.commands import DPS
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

CONFIG: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 60},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "server": {"shards": 1},
}


def command(here: Path, *arguments: str, **changes: Any) -> list[str]:
    (here / "small.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    return [*DPS, *arguments]


def finish(command: list[str], here: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)


def rows(here: Path) -> list[dict[str, Any]]:
    shown = finish([*DPS, "results", "small", "--json"], here)
    found: list[dict[str, Any]] = json.loads(shown.stdout)["trials"]
    return found


def alive_in_session(session: int) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it ends meanwhile
            lives = process.status() != psutil.STATUS_ZOMBIE
            if lives and os.getsid(process.pid) == session:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_interrupted_and_run_again(tmp_path: Path, parallel: int) -> None:
    options = ["--parallel=2"] if parallel == 2 else []
    run = command(tmp_path, "run", "small.yaml", *options, seeds=[0, 1, 2])
    with subprocess.Popen(
        run,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        while "[3/3] seed-2" not in process.stdout.readline():
            assert process.poll() is None
        if parallel == 1:
            process.send_signal(signal.SIGINT)
        else:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    again = shlex.join(["dps", "run", "small.yaml", *options])
    assert errors.splitlines()[-1].endswith(f"To run the missing trials: {again}")
    assert "Traceback" not in errors
    # The fork servers end by themselves, just after the drivers that they served.
    eventually(lambda: not alive_in_session(process.pid), 5)
    records = sorted((tmp_path / "results" / "small").glob("*/events.jsonl"))
    before = {path: path.read_bytes() for path in records if read_record(path).ended}
    assert 1 <= len(before) <= 2

    ended = finish(run, tmp_path)
    assert ended.returncode == 0
    skipped = ", ".join(path.parent.name for path in before)
    assert f"recorded already, skipped: {skipped}\n" in ended.stdout
    assert all(path.read_bytes() == text for path, text in before.items())
    assert [row["status"] for row in rows(tmp_path)] == ["valid"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 130)], ids=["SIGINT", "SIGTERM"]
)
def test_what_was_started_in_the_background_is_ended_by_sigterm_and_not_by_ctrl_c(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = command(tmp_path, "run", "small.yaml", seeds=[0, 1])
    with subprocess.Popen(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *run],  # as a script's `dps run … &` is
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout
        while "[1/2] seed-" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, number)
        _, errors = process.communicate()
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    eventually(lambda: not alive_in_session(process.pid), 5)


@pytest.mark.slow
def test_a_failed_trial_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    axes = {"time_limit": {"short": 0.01, "long": 60.0}}
    words = command(tmp_path, "run", "small.yaml", axes=axes, cluster={"kind": "virtual"})
    ended = finish(words, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("dps: short.seed-0 failed: ")
    assert {row["trial"]: row["status"] for row in rows(tmp_path)} == {
        "short.seed-0": "failed",
        "long.seed-0": "valid",
    }


@pytest.mark.slow
def test_a_kill_that_never_comes_makes_the_trial_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "mlruns").mkdir(parents=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_uri(elsewhere))
    late = [{"kind": "kill", "target": "server-0", "at_updates": 1000}]
    words = command(tmp_path, "run", "small.yaml", faults=late, cluster={"kind": "virtual"})
    ended = finish(words, tmp_path)
    assert ended.returncode == 0
    assert "seed-0 is invalid and left out" in ended.stdout
    assert "to run it again: dps run small.yaml --retry-invalid\n" in ended.stdout
    (row,) = rows(tmp_path)
    assert row["status"] == "invalid"
    assert "invalid" in (tmp_path / "results" / "small" / "report.html").read_text()
    # The store that the environment names is used, and no other.
    assert (elsewhere / "mlruns" / "mlflow.db").exists()
    assert not (tmp_path / "mlruns" / "mlflow.db").exists()


@pytest.mark.slow
def test_an_unusable_store_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "mlruns").write_text("a file where the folder should be")
    ended = finish(command(tmp_path, "run", "small.yaml"), tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("dps: the tracking store sqlite:///")
    assert "Traceback" not in ended.stderr
    assert not list((tmp_path / "results" / "small").glob("*/events.jsonl"))


@pytest.mark.slow
def test_a_killed_run_resumes_its_trial_from_the_last_checkpoint(tmp_path: Path) -> None:
    slow = {"workers": 2, "updates": 120, "compute_seconds": 0.03}
    checkpoint = {"durability": {"kind": "checkpoint", "every": 10}}
    run = command(tmp_path, "run", "small.yaml", training=slow, recovery=checkpoint)
    folder = tmp_path / "results" / "small" / "seed-0"
    path = str(folder / "checkpoints")

    def far_enough() -> bool:
        try:
            return find_saved(path).updates >= 30
        except StoreUnavailable:
            return False

    with subprocess.Popen(
        run, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        eventually(far_enough, 30)
        process.kill()
    eventually(lambda: not alive_in_session(process.pid), 30)
    updates = find_saved(path).updates

    again = finish(run, tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"resumed at update {updates}, from checkpoints in {path}" in again.stdout
    assert [row["status"] for row in rows(tmp_path)] == ["valid"]
    assert (folder / "events.interrupted.jsonl").exists()
    record = read_record(folder / "events.jsonl")
    (audited,) = record.of(Audited)
    # Each shard's workers go on from what all shards have of them: here there is but one shard.
    assert audited.version == sum(audited.applied.values()) == 120
    (began,) = record.of(TrialResumed)
    assert began.updates == updates
