"""Which trials go on from their checkpoints, and which start again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dps.events import Event, TrialEnded
from flows import resume
from flows.grid import Trial
from flows.record import EVENTS_FILE, EventWriter
from flows.resume import interrupted
from tests.flows.synthetic import demo_trials, toy_events

TRIAL = next(trial for trial in demo_trials() if trial.name == "checkpoint.kill.seed-0")


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Checkpoints of the trial are wherever they are looked for."""
    about = json.dumps({"digest": TRIAL.digest})
    found = SimpleNamespace(run=SimpleNamespace(about=about), updates=300)
    monkeypatch.setattr(resume, "find_saved", lambda path: found)
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


def test_a_trial_that_failed_starts_again(tmp_path: Path) -> None:
    events = toy_events("checkpoint", "kill")
    failed = TrialEnded(events[-1].t, "failed", "it took too long")
    assert not goes_on(TRIAL, recorded(tmp_path, [*events[:-1], failed]))


def test_a_trial_whose_record_is_damaged_starts_again(tmp_path: Path) -> None:
    folder = recorded(tmp_path, toy_events("checkpoint", "kill")[:5])
    with (folder / EVENTS_FILE).open("a") as file:
        file.write("no event\n{}\n")
    assert not goes_on(TRIAL, folder)
