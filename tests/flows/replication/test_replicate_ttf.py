"""Which records the replication of the first paper goes by, and what becomes of others."""

from __future__ import annotations

import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console

from dps.events import Evaluated, ResourceSampled, TrainingStarted, TrialEnded, TrialStarted
from flows.analysis.finished import RESULTS, is_recorded
from flows.cli import replicate
from flows.execution.attempt import EARLIER
from flows.monitor.progress import PlainView
from flows.records.record import (
    EVENTS_FILE,
    FAILED_ATTEMPTS,
    EventWriter,
    event_files,
    read_record,
    write_grid,
)
from flows.replication.ttf import run as replicate_ttf
from flows.replication.ttf.emulation.settings import PublishedConfig, PublishedTrial
from flows.replication.ttf.run import PUBLISHED, findings, published_trials, run_published_trials
from flows.replication.version import Version
from tests.support.records import acked

SMALL = {
    "emulation": PUBLISHED,
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "scale": 60,
    "repeats": 1,
}


def small(**changes: object) -> PublishedTrial:
    config = PublishedConfig.model_validate({**SMALL, **changes})
    return PublishedTrial("stateless", 0, 0, config)


def recorded(
    trial: PublishedTrial, folder: Path, failed_before: int = 0, status: str = "valid"
) -> None:
    told = {**trial.settings(), "circumstances": {FAILED_ATTEMPTS: failed_before}}
    with EventWriter(folder / EVENTS_FILE) as write:
        write(TrialStarted(1.0, trial.name, told, {}))
        write(TrainingStarted(1.0, 1, 1, 10))
        write(ResourceSampled(1.5, "server-0", "server", 1, 0.5, 100, {}, {}, 0))
        write(acked([1], t=2.0))
        write(Evaluated(2.0, 1.0, 1.0, 0.5))
        write(TrialEnded(2.0, status, "" if status == "valid" else "the store burnt down"))


def test_a_record_of_another_configuration_is_kept_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate_ttf, "run_published", recorded)
    first, other = small(), small(target=0.9)
    place = tmp_path / RESULTS / PUBLISHED
    for trial, aside in ((first, None), (other, first), (first, other)):
        monkeypatch.setattr(replicate_ttf, "published_trials", lambda full, only=trial: (only,))
        run_published_trials(False, tmp_path, quiet())
        assert is_recorded(trial, place)
        kept = [each.name for each in place.glob(f"{EARLIER}/*")]
        assert kept == ([f"{trial.name}.{aside.digest}"] if aside else [])


def quiet() -> PlainView:
    return PlainView(Console(file=StringIO()))


def test_attempts_of_the_emulation_that_failed_are_kept_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, place = small(), tmp_path / RESULTS / PUBLISHED
    monkeypatch.setattr(replicate_ttf, "run_published", recorded)
    monkeypatch.setattr(replicate_ttf, "published_trials", lambda full: (trial,))
    recorded(trial, place / trial.name, status="failed")
    run_published_trials(False, tmp_path, quiet())
    assert read_record(place / trial.name / EVENTS_FILE).failed_before == 1
    kept = read_record(place / EARLIER / f"{trial.name}.{trial.digest}.failed-1" / EVENTS_FILE)
    assert kept.ended is not None
    assert kept.ended.status == "failed"


def test_other_configurations_are_set_aside_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    place = tmp_path / RESULTS / PUBLISHED
    trials = [replace(small(target=0.9), seed=seed) for seed in range(3)]
    for trial in trials:
        recorded(replace(small(), seed=trial.seed), place / trial.name)
    monkeypatch.setattr(replicate_ttf, "run_published", interrupted)
    monkeypatch.setattr(replicate_ttf, "published_trials", lambda full: trials)
    with pytest.raises(KeyboardInterrupt):
        run_published_trials(False, tmp_path, quiet())
    assert list(event_files(place)) == []
    assert len(list(place.glob(f"{EARLIER}/*"))) == len(trials)


@pytest.mark.slow
@pytest.mark.torch
def test_findings_go_by_the_trials_of_the_version_that_is_asked_for(tmp_path: Path) -> None:
    """A short run after a full one notes only its own trials as those of the experiment."""
    pytest.importorskip("torch")
    place = tmp_path / RESULTS / PUBLISHED
    short = published_trials(False)
    for trial in published_trials(True):
        recorded(trial, place / trial.name)
    write_grid(place, [trial.name for trial in short], 0)
    assert "(a) as published: 90 of 90 trials;" in findings(Version(full=True), tmp_path)
    assert "(a) as published: 27 of 27 trials;" in findings(Version(), tmp_path)
    shutil.rmtree(place / short[0].name)
    recorded(small(), place / short[0].name)  # another configuration under the same name
    text = findings(Version(), tmp_path)
    assert "(a) as published: 26 of 27 trials;" in text
    assert "**Only 26 of" in text
    assert {path.name for path in (tmp_path / RESULTS).glob("replicate-*")} == {
        "replicate-ttf",
        "replicate-ttf-short",
    }


def test_trials_that_failed_are_named_and_end_the_command_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(trial: PublishedTrial, folder: Path, failed_before: int) -> None:
        recorded(trial, folder, failed_before, "failed" if trial.seed else "valid")

    trials = [replace(small(), seed=seed) for seed in range(2)]
    monkeypatch.setattr(replicate_ttf, "run_published", ran)
    monkeypatch.setattr(replicate_ttf, "published_trials", lambda full: trials)
    monkeypatch.setattr(replicate_ttf, "JUDGED", {})
    monkeypatch.setattr(replicate_ttf, "SHOWN", {})
    monkeypatch.setattr(replicate_ttf, "BY_DESIGN", {})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit) as ended:
        replicate.ttf()
    assert ended.value.exit_code == 1
    shown = capsys.readouterr()
    assert shown.err == f"dps: {trials[1].name} failed: the store burnt down\n"
    assert "The text above, with its figures" in shown.out
    replicate.ttf(records=True)  # nothing ran, so nothing failed


@pytest.mark.parametrize("line", [0, 3])
def test_damaged_records_are_left_out_and_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: int,
) -> None:
    trials = [replace(small(), seed=seed) for seed in range(2)]
    for trial in trials:
        recorded(trial, tmp_path / RESULTS / PUBLISHED / trial.name)
    path = tmp_path / RESULTS / PUBLISHED / trials[1].name / EVENTS_FILE
    lines = path.read_text().splitlines(keepends=True)
    lines[line] = "garbage\n"
    path.write_text("".join(lines))
    monkeypatch.setattr(replicate_ttf, "published_trials", lambda full: trials)
    monkeypatch.setattr(replicate_ttf, "JUDGED", {})
    monkeypatch.setattr(replicate_ttf, "SHOWN", {})
    monkeypatch.setattr(replicate_ttf, "BY_DESIGN", {})
    monkeypatch.chdir(tmp_path)
    replicate.ttf(records=True)
    shown = capsys.readouterr()
    assert f"dps: warning: {trials[1].name} is left out, its record is damaged: " in shown.err
    assert "(a) as published: 1 of 2 trials" in shown.out


def test_the_way_to_go_on_after_an_interruption_has_all_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(replicate_ttf, "run", interrupted)
    with pytest.raises(typer.Exit):
        replicate.ttf(full=True, published=Path("my curves.csv"))
    assert "dps replicate ttf --full --published 'my curves.csv'\n" in capsys.readouterr().err
