"""A disk that is really full in the midst of an experiment: the trial ends, in one line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Evaluated, Promoted
from flows.records.events import TrainingStarted, TrialEnded, TrialStarted
from flows.records.log import LOG_FILE, TrialLog
from flows.records.record import EVENTS_FILE, EventWriter, Record, read_record
from tests.flows.execution.test_run import CONFIG
from tests.support.waiting import eventually

ENDLESS: dict[str, Any] = {
    **CONFIG,
    "training": {"workers": 1, "updates": 1_000_000, "compute_seconds": 0.002},
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
def test_a_trial_whose_events_cannot_be_written_fails_and_trains_no_more(
    tmp_path: Path, small_disk: Path
) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(ENDLESS))
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
    assert not read_record(path).torn


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
        write.end(TrialEnded(4.0, "failed", str(write.failure)))
    record = read_record(path)
    assert record.events[:-1] == written.events
    assert record.ended == TrialEnded(4.0, "failed", str(write.failure))


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
