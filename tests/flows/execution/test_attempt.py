"""What becomes of earlier records when a trial is attempted again: nothing recorded is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from dps.events import TrialEnded, TrialStarted
from flows.execution.attempt import (
    Attempt,
    end_unfinished,
    is_over,
    prepare,
    prepare_again,
    set_aside,
    take_back,
)
from flows.execution.experiment import AGAIN, _again
from flows.monitor.progress import PlainView
from flows.records.record import EARLIER, EVENTS_FILE, read_record, read_start
from tests.support.synthetic import demo_trials, toy_events, write_events

TRIAL = next(trial for trial in demo_trials() if trial.name == "chain.kill.seed-0")
CHANGED = replace(TRIAL, digest="0123456789ab")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    events = toy_events("chain", "kill", 0)
    assert isinstance(events[0], TrialStarted)
    events[0] = replace(events[0], settings={**events[0].settings, "digest": TRIAL.digest})
    return write_events(tmp_path / TRIAL.name, events).parent


def test_a_record_under_another_configuration_is_kept_and_taken_back(folder: Path) -> None:
    said: list[str] = []
    before = (folder / EVENTS_FILE).read_bytes()
    set_aside(CHANGED, folder, said.append)
    kept = folder.parent / EARLIER / f"{TRIAL.name}.{TRIAL.digest}"
    assert (kept / EVENTS_FILE).read_bytes() == before
    assert not folder.exists()
    end_unfinished(Attempt(CHANGED, folder), "no reason")

    take_back(TRIAL, folder, said.append)
    assert (folder / EVENTS_FILE).read_bytes() == before
    assert (folder.parent / EARLIER / f"{TRIAL.name}.{CHANGED.digest}" / EVENTS_FILE).exists()
    assert len(said) == 3
    assert "under another configuration is kept in" in said[0]
    assert "is back from" in said[2]


def test_records_of_one_digest_that_are_set_aside_twice_are_both_kept(folder: Path) -> None:
    kept = folder.parent / EARLIER
    (kept / f"{TRIAL.name}.{TRIAL.digest}").mkdir(parents=True)
    set_aside(CHANGED, folder, list[str]().append)
    assert (kept / f"{TRIAL.name}.{TRIAL.digest}.2" / EVENTS_FILE).exists()


@pytest.mark.parametrize("line", [0, 3])
def test_a_damaged_record_is_kept_and_its_trial_starts_again(folder: Path, line: int) -> None:
    said: list[str] = []
    lines = (folder / EVENTS_FILE).read_text().splitlines(keepends=True)
    lines[line] = "garbage\n"
    (folder / EVENTS_FILE).write_text("".join(lines))
    set_aside(TRIAL, folder, said.append)
    kept = folder.parent / EARLIER / f"{TRIAL.name}.damaged"
    assert (kept / EVENTS_FILE).read_text() == "".join(lines)
    assert not folder.exists()
    assert said[0].startswith(f"{TRIAL.name}: its record is kept in {kept}, for it is damaged: ")
    assert f"line {line + 1} is not an event" in said[0]
    assert said[0].endswith("runs the trial again.")


def test_the_same_trial_starts_again(folder: Path) -> None:
    said: list[str] = []
    path = folder / EVENTS_FILE
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))  # has no end
    attempt = prepare(TRIAL, folder, {"parallel": 2}, said.append)
    assert attempt.path is None
    assert attempt.circumstances == {"parallel": 2, "failed_attempts": 0}
    assert not folder.exists()
    assert said == [f"{TRIAL.name}: an earlier attempt left nothing to go on from: it starts again"]


def test_attempts_that_failed_are_kept_and_counted(tmp_path: Path) -> None:
    folder, said = tmp_path / TRIAL.name, list[str]()
    for number in (1, 2):
        end_unfinished(Attempt(TRIAL, folder), "it hangs")
        (folder / "checkpoints").mkdir()
        before = (folder / EVENTS_FILE).read_bytes()
        attempt = prepare(TRIAL, folder, {}, said.append)
        assert attempt.circumstances == {"failed_attempts": number}
        kept = tmp_path / EARLIER / f"{TRIAL.name}.{TRIAL.digest}.failed-{number}"
        assert [path.name for path in kept.iterdir()] == [EVENTS_FILE]
        assert (kept / EVENTS_FILE).read_bytes() == before
        assert not folder.exists()
        assert said[-1].endswith(f"the record of the attempt before is kept in {kept}")
    assert prepare(CHANGED, folder, {}, said.append).circumstances == {"failed_attempts": 0}


@pytest.mark.parametrize("resume", [True, False])
def test_an_attempt_whose_driver_was_lost_is_kept_as_one_that_failed(
    folder: Path, resume: bool
) -> None:
    said: list[str] = []
    path = folder / EVENTS_FILE
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))  # has no end
    lost = Attempt(TRIAL, folder, None, {"parallel": 2, "failed_attempts": 0})
    assert not is_over(lost)
    again = prepare_again(lost, "its driver was lost", said.append, resume=resume)
    assert again == Attempt(TRIAL, folder, None, {"parallel": 2, "failed_attempts": 1})
    assert not folder.exists()
    kept = folder.parent / EARLIER / f"{TRIAL.name}.{TRIAL.digest}.failed-1"
    ended = read_record(kept / EVENTS_FILE).ended
    assert ended is not None
    assert (ended.status, ended.reason) == ("failed", "its driver was lost")
    assert said == [
        f"{TRIAL.name}: its driver was lost; it starts again",
        f"{TRIAL.name}: is tried again; the record of the attempt before is kept in {kept}",
    ]


@pytest.mark.parametrize("torn", [b"", b'{"event":"Appl'])
def test_a_record_that_its_driver_left_open_is_ended(folder: Path, torn: bytes) -> None:
    path = folder / EVENTS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + torn)
    end_unfinished(Attempt(TRIAL, folder), "the driver was lost")
    record = read_record(path)
    assert not record.torn
    assert len(record.events) == len(lines)
    assert record.ended is not None
    assert (record.ended.status, record.ended.reason) == ("failed", "the driver was lost")


def test_a_driver_that_left_nothing_is_recorded_as_well(tmp_path: Path) -> None:
    end_unfinished(Attempt(TRIAL, tmp_path / "new", None, {"position": 3}), "it never started")
    start = read_start(tmp_path / "new" / EVENTS_FILE)
    assert start is not None
    assert start.settings["digest"] == TRIAL.digest
    assert start.settings["circumstances"] == {"position": 3}


def test_a_record_that_is_whole_keeps_its_end(folder: Path) -> None:
    before = (folder / EVENTS_FILE).read_bytes()
    end_unfinished(Attempt(TRIAL, folder), "too late")
    assert (folder / EVENTS_FILE).read_bytes() == before
    assert isinstance(read_record(folder / EVENTS_FILE).events[-1], TrialEnded)


def test_a_trial_whose_driver_is_lost_is_not_tried_again_without_end(folder: Path) -> None:
    said: list[str] = []
    again = _again(Mock(spec=PlainView, say=said.append), resume=False)
    other = Attempt(CHANGED, folder.parent / "other")
    attempt: Attempt | None = Attempt(TRIAL, folder)
    for _ in range(AGAIN):
        assert attempt is not None
        attempt = again(attempt, "its driver was lost: it was killed")
    assert attempt is not None
    assert again(attempt, "its driver was lost: it was killed") is None
    ended = read_record(folder / EVENTS_FILE).ended
    assert ended is not None
    assert (ended.status, ended.reason) == (
        "failed",
        f"its driver was lost: it was killed; it was lost {AGAIN + 1} times in this run",
    )
    assert again(replace(other, trial=replace(CHANGED, name="another")), "lost") is not None
