"""Which trials go on from their checkpoints, and which start again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from dps.errors import StoreUnavailable
from dps.events import Event, TrialEnded
from dps.protocol.storage.manifest import find_saved
from flows.cli import main
from flows.config.experiment import TrialConfig
from flows.config.trials import Trial
from flows.execution import resume
from flows.execution.attempt import prepare
from flows.execution.experiment import exclusive
from flows.execution.resume import can_go_on, checkpoints_of, interrupted, keep_record, saved_in
from flows.records.record import EVENTS_FILE, EventWriter
from tests.support.synthetic import demo_trials, toy_events

TRIAL = next(trial for trial in demo_trials() if trial.name == "checkpoint.kill.seed-0")


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Checkpoints of the trial are wherever they are looked for."""
    about = json.dumps({"digest": TRIAL.digest})
    found = SimpleNamespace(run=SimpleNamespace(about=about), updates=300)
    monkeypatch.setattr(resume, "find_saved", lambda path: found)
    monkeypatch.setattr(resume, "trial_of", lambda saved, path: TRIAL)
    return found


def recorded(folder: Path, events: list[Event]) -> Path:
    with EventWriter(folder / EVENTS_FILE) as write:
        for event in events:
            write(event)
    return folder


def goes_on(trial: Trial, folder: Path) -> bool:
    return interrupted(trial, folder) is not None


def test_a_trial_whose_record_has_no_end_goes_on(tmp_path: Path) -> None:
    events = toy_events("checkpoint", "kill")
    assert goes_on(TRIAL, recorded(tmp_path, events[:-1]))
    assert goes_on(TRIAL, tmp_path / "no record")
    assert not goes_on(replace(TRIAL, digest="0123456789ab"), tmp_path)


def test_a_trial_that_must_not_go_on_starts_again(tmp_path: Path) -> None:
    folder, said = tmp_path / TRIAL.name, list[str]()
    recorded(folder, toy_events("checkpoint", "kill")[:-1])
    assert prepare(TRIAL, folder, {}, said.append, resume=False).path is None
    assert not folder.exists()
    assert said == [f"{TRIAL.name}: an earlier attempt was interrupted: it starts again"]


def test_a_trial_that_failed_starts_again(tmp_path: Path) -> None:
    events = toy_events("checkpoint", "kill")
    failed = TrialEnded(events[-1].t, "failed", "it took too long")
    assert not goes_on(TRIAL, recorded(tmp_path, [*events[:-1], failed]))


def test_a_trial_whose_record_is_damaged_starts_again(tmp_path: Path) -> None:
    folder = recorded(tmp_path, toy_events("checkpoint", "kill")[:5])
    with (folder / EVENTS_FILE).open("a") as file:
        file.write("no event\n{}\n")
    assert not goes_on(TRIAL, folder)


def test_a_trial_its_folder_and_its_checkpoints_all_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Path("results", "demo", "seed-0", "checkpoints")
    checkpoints.mkdir(parents=True)
    for name in ("demo/seed-0", "results/demo/seed-0", "results/demo/seed-0/", str(checkpoints)):
        assert Path(checkpoints_of(name, tmp_path)).resolve() == checkpoints.resolve()
    assert checkpoints_of("memory://elsewhere", tmp_path) == "memory://elsewhere"


def test_what_has_no_checkpoints_is_told_what_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "find_saved", find_saved)
    with pytest.raises(StoreUnavailable, match=r"Expected a trial that wrote .* its folder in"):
        saved_in(str(tmp_path))


class Refused(NamedTuple):
    code: object
    message: str


@pytest.fixture
def dps_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Path], Refused]:
    def call(folder: Path) -> Refused:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["dps", "resume", str(folder / "checkpoints")])
        with pytest.raises(SystemExit) as ended:
            main()
        return Refused(ended.value.code, capsys.readouterr().err)

    return call


@pytest.mark.parametrize("status", ["valid", "invalid", "failed"])
def test_a_trial_that_has_ended_is_not_resumed_and_keeps_its_record(
    tmp_path: Path, dps_resume: Callable[[Path], Refused], status: str
) -> None:
    events = [*toy_events("checkpoint", "kill")[:-1], TrialEnded(1e9, status, "")]
    folder = recorded(tmp_path / "demo" / TRIAL.name, events)
    before = (folder / EVENTS_FILE).read_bytes()
    code, message = dps_resume(folder)
    assert code == 2
    assert f"it ended already ({status}); to run it again, delete that folder" in message
    assert [path.name for path in folder.iterdir()] == [EVENTS_FILE]
    assert (folder / EVENTS_FILE).read_bytes() == before


def test_a_trial_that_a_run_is_at_work_on_is_not_resumed(
    tmp_path: Path, dps_resume: Callable[[Path], Refused]
) -> None:
    folder = recorded(tmp_path / "demo" / TRIAL.name, toy_events("checkpoint", "kill")[:5])
    with exclusive(folder.parent):
        code, message = dps_resume(folder)
    assert code == 2
    assert "another `dps run` or `dps resume` is writing to" in message
    assert [path.name for path in folder.iterdir()] == [EVENTS_FILE]


def test_each_interrupted_record_is_kept_under_a_name_of_its_own(tmp_path: Path) -> None:
    for written in ("first", "second", "third"):
        (tmp_path / EVENTS_FILE).write_text(written)
        keep_record(tmp_path)
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
        assert can_go_on(TrialConfig.model_validate({**config, "faults": faults})) is known
