"""A disk that is really full in the midst of an experiment: the trial ends, in one line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import (
    CheckpointFailed,
    CheckpointWritten,
    Evaluated,
    Event,
    Promoted,
    TrainingStarted,
    TrialEnded,
    TrialStarted,
)
from flows.analysis.outcome import status
from flows.config.experiment import ExperimentConfig
from flows.config.trials import expand
from flows.execution.trial import run_trial
from flows.execution.workers import Unwritten
from flows.records.log import LOG_FILE, TrialLog
from flows.records.record import (
    EVENTS_FILE,
    EventWriter,
    Record,
    end_record,
    read_record,
    read_trial,
)
from tests.support.waiting import eventually

CONFIG: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 1_000_000, "compute_seconds": 0.002},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "server": {"shards": 1},
    "recovery": "none",
    "seeds": [0, 1],
}


def fill(folder: Path) -> Path:
    """Write until there is no space left."""
    rest = folder / "rest"
    with rest.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return rest


def write_many(write: EventWriter) -> None:
    for number in range(10_000):
        write(Evaluated(2.0, number, 0.5, 0.9))


def record_of(path: Path) -> Record:
    try:
        return read_record(path)
    except ConfigurationError:
        return Record(())


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_a_trial_whose_events_cannot_be_written_fails_and_trains_no_more(
    tmp_path: Path, small_disk: Path
) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "results").symlink_to(small_disk)
    path = small_disk / "small" / "seed-0" / EVENTS_FILE
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", "small.yaml"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
    ) as run:
        eventually(lambda: record_of(path).of(TrainingStarted), 60.0)
        fill(small_disk)
        said, _ = run.communicate(timeout=100)
    assert run.returncode == 2
    assert "Traceback" not in said
    assert len(said.splitlines()) < 20, said
    assert "No space left on device" in said.splitlines()[-1]
    record = read_record(path)
    assert record.ended is not None
    assert record.ended.status == "failed"
    assert "the events cannot be written to" in record.ended.reason
    assert "No space left on device" in record.ended.reason
    assert not record.torn


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_a_trial_that_waits_for_its_checkpoints_says_so_at_its_time_limit(
    tmp_path: Path, small_disk: Path
) -> None:
    durability = {"kind": "checkpoint", "every": 20, "path": str(small_disk)}
    [trial] = expand(
        ExperimentConfig.model_validate(
            {**CONFIG, "recovery": {"durability": durability}, "time_limit": 5.0, "seeds": [0]}
        )
    )

    def watch(event: Event) -> None:
        if isinstance(event, TrainingStarted):
            fill(small_disk)

    run_trial(trial, tmp_path / "trial", watch)
    assert (ended := read_record(tmp_path / "trial" / EVENTS_FILE).ended) is not None
    assert ended.status == "failed"
    assert "within the time limit of 5 s (" in ended.reason
    assert "; no newer checkpoint of shard 0: " in ended.reason
    assert ended.reason.endswith("No space left on device")


def test_a_checkpoint_that_could_be_written_after_all_is_not_waited_for() -> None:
    unwritten = Unwritten()
    assert not str(unwritten)
    unwritten.note(CheckpointFailed(1.0, 1, 1, "checkpoint to a: no space"))
    unwritten.note(CheckpointFailed(1.0, 0, 1, "checkpoint to b: no space"))
    assert str(unwritten) == "; no newer checkpoint of shard 0: checkpoint to b: no space"
    unwritten.note(CheckpointWritten(2.0, 0, 1, 20, 100, 0.1))
    assert str(unwritten) == "; no newer checkpoint of shard 1: checkpoint to a: no space"


def test_a_record_on_a_full_disk_has_whole_lines_and_its_end(small_disk: Path) -> None:
    path = small_disk / EVENTS_FILE
    with EventWriter(path) as write:
        write(TrialStarted(1.0, "seed-0", {}, {}))
        rest = fill(small_disk)
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            write_many(write)
        written = read_record(path)
        assert not written.torn
        rest.unlink()
        write(Evaluated(3.0, 0, 0.5, 0.9))  # it would leave a gap
        assert read_record(path) == written
        fill(small_disk)
        write.end(TrialEnded(4.0, "failed", str(write.failure)))
    record = read_record(path)
    assert record.events[:-1] == written.events
    assert record.ended == TrialEnded(4.0, "failed", str(write.failure))
    assert {file.name for file in small_disk.iterdir()} == {EVENTS_FILE, "rest"}


def test_a_trial_that_failed_before_its_start_was_written_is_told_as_failed(
    small_disk: Path,
) -> None:
    """Not as damaged: what its record holds is why it failed."""
    path = small_disk / EVENTS_FILE
    with EventWriter(path) as write:
        fill(small_disk)
        with pytest.raises(StoreUnavailable, match="No space left on device"):
            write(TrialStarted(1.0, "seed-0", {}, {"label": "x" * 10_000}))
        write.end(TrialEnded(2.0, "failed", str(write.failure)))
    record = read_trial(path)
    assert record.started is None
    assert status(record) == ("failed", str(write.failure))


def test_a_log_on_a_full_disk_ends_without_a_word(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_disk / LOG_FILE
    with TrialLog(path, {}) as log:
        log(Promoted(1.0, 0, 1, "server-0", 1))
        fill(small_disk)
        for number in range(10_000):
            log(Promoted(2.0, 0, 2, "server-0", number))
    assert capsys.readouterr() == ("", "")
    assert path.read_text().startswith("time=1970-01-01T00:00:01.000Z level=INFO ")


def test_an_end_is_put_behind_what_is_whole(tmp_path: Path) -> None:
    path, start = tmp_path / EVENTS_FILE, TrialStarted(1.0, "seed-0", {}, {})
    with EventWriter(path) as write:
        write(start)
    with path.open("a") as file:
        file.write('{"event":"Evalu')
    end_record(path, TrialEnded(2.0, "failed", "lost"))
    assert read_record(path).events == (start, TrialEnded(2.0, "failed", "lost"))


def test_there_is_room_for_the_end_of_a_record_whose_writer_was_killed(small_disk: Path) -> None:
    path, start = small_disk / EVENTS_FILE, TrialStarted(1.0, "seed-0", {}, {})
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dps.events import TrialStarted\n"
        "from flows.records.record import EventWriter\n"
        "EventWriter(Path(sys.argv[1]))(TrialStarted(1.0, 'seed-0', {}, {}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    fill(small_disk)
    with path.open("ab", buffering=0) as file:
        file.write(b"x" * (4096 - path.stat().st_size))  # what is left of its last page
    end_record(path, TrialEnded(2.0, "failed", "its driver was lost " * 300))
    assert {file.name for file in small_disk.iterdir()} == {EVENTS_FILE, "rest"}
    ended = read_record(path).ended
    assert ended is not None
    assert ended.status == "failed"
    assert read_record(path).started == start
