"""What becomes of earlier records when a trial is attempted again: nothing recorded is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dps.events import Event
from flows.config.experiment import TrialConfig
from flows.execution import attempt
from flows.execution.attempt import (
    Attempt,
    can_resume,
    end_unfinished,
    keep_interrupted,
    prepare,
    resumable,
    set_aside,
    take_back,
)
from flows.records.events import TrialEnded, TrialStarted
from flows.records.record import EARLIER, EVENTS_FILE, read_record, read_start
from tests.support.synthetic import demo_trials, toy_events, write_events

TRIAL = next(trial for trial in demo_trials() if trial.name == "chain.kill.seed-0")
SAVED = next(trial for trial in demo_trials() if trial.name == "checkpoint.kill.seed-0")
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
    assert "the record of another configuration is kept in" in said[0]
    assert "is restored from" in said[2]


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
    assert said[0].startswith(f"{TRIAL.name}: its damaged record is kept in {kept}: ")
    assert f"line {line + 1} has no checksum" in said[0]
    assert said[0].endswith("reruns the trial.")


def test_attempts_that_failed_are_kept_and_counted(tmp_path: Path) -> None:
    folder, said = tmp_path / TRIAL.name, list[str]()
    for number in (1, 2):
        end_unfinished(Attempt(TRIAL, folder), "it hangs")
        (folder / "checkpoints").mkdir()
        before = (folder / EVENTS_FILE).read_bytes()
        prepared = prepare(TRIAL, folder, {}, said.append)
        assert prepared.circumstances == {"failed_attempts": number}
        kept = tmp_path / EARLIER / f"{TRIAL.name}.{TRIAL.digest}.failed-{number}"
        assert [path.name for path in kept.iterdir()] == [EVENTS_FILE]
        assert (kept / EVENTS_FILE).read_bytes() == before
        assert not folder.exists()
        assert said[-1].endswith(f"the record of the previous attempt is kept in {kept}")
    assert prepare(CHANGED, folder, {}, said.append).circumstances == {"failed_attempts": 0}


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


@pytest.fixture
def _saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of the trial are wherever they are looked for."""
    about = json.dumps({"digest": SAVED.digest})
    found = SimpleNamespace(run=SimpleNamespace(about=about), updates=300)
    monkeypatch.setattr(attempt, "find_saved", lambda path: found)


@pytest.mark.usefixtures("_saved")
def test_only_an_interrupted_trial_of_the_same_configuration_resumes(tmp_path: Path) -> None:
    events = toy_events("checkpoint", "kill")
    failed = TrialEnded(events[-1].t, "failed", "it took too long")
    records: dict[str, list[Event]] = {
        "interrupted": events[:-1],
        "valid": events,
        "failed": [*events[:-1], failed],
        "damaged": events[:5],
    }
    for name, those in records.items():
        write_events(tmp_path / name, those)
    with (tmp_path / "damaged" / EVENTS_FILE).open("a") as file:
        file.write("no event\n{}\n")
    resumed = {name for name in (*records, "new") if resumable(SAVED, tmp_path / name, print)}
    assert resumed == {"interrupted", "new"}
    other = replace(SAVED, digest="0123456789ab")
    assert resumable(other, tmp_path / "interrupted", print) is None
    training = SAVED.config.training.model_copy(update={"updates": 300})
    over = replace(SAVED, config=SAVED.config.model_copy(update={"training": training}))
    assert resumable(over, tmp_path / "interrupted", print) is None


@pytest.mark.usefixtures("_saved")
def test_a_trial_that_must_not_resume_starts_again(tmp_path: Path) -> None:
    folder, said = tmp_path / SAVED.name, list[str]()
    write_events(folder, toy_events("checkpoint", "kill")[:-1])
    assert prepare(SAVED, folder, {}, said.append, resume=False).path is None
    assert not folder.exists()
    assert said == [f"{SAVED.name}: restarted, because an earlier attempt was interrupted"]


def test_each_interrupted_record_is_kept_under_a_name_of_its_own(tmp_path: Path) -> None:
    for written in ("first", "second", "third"):
        (tmp_path / EVENTS_FILE).write_text(written)
        keep_interrupted(tmp_path)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {
        "events.interrupted.jsonl": "first",
        "events.interrupted-2.jsonl": "second",
        "events.interrupted-3.jsonl": "third",
    }


def test_one_fault_by_the_clock_is_enough_to_start_again() -> None:
    config = demo_trials()[0].config.model_dump(mode="json")
    by_updates = {"kind": "pause", "target": "server-0", "at_updates": 10}
    by_clock = {"kind": "pause", "target": "server-1", "at_seconds": 1.0}
    for faults, known in (([by_updates], True), ([by_updates, by_clock], False)):
        assert can_resume(TrialConfig.model_validate({**config, "faults": faults})) is known
