"""Reading records back, and printing what was found."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dps.errors import ConfigurationError
from dps.events import Detected
from flows.config.trials import Trial
from flows.metrics.outcome import Outcome, outcome
from flows.metrics.prices import load_prices
from flows.records.events import TrialEnded, TrialStarted
from flows.records.record import EVENTS_FILE, Record
from flows.report.study import Study
from flows.report.terminal import print_study
from flows.statistics.caveats import short_of_target
from flows.statistics.finished import experiment_folder, read_experiment, whole_record
from tests.support.records import with_values
from tests.support.synthetic import demo_trials, missed, toy_events, write_events, write_experiment


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    here = tmp_path_factory.mktemp("here")
    write_experiment(here / "results" / "demo")
    folder = experiment_folder("demo", here)
    return [done.outcome for done in read_experiment(folder, load_prices())]


def shown(outcomes: list[Outcome], width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    print_study(Study(tuple(outcomes)), None, console)
    return console.export_text().splitlines()


def test_what_is_printed_fits_one_screen(outcomes: list[Outcome]) -> None:
    lines = shown(outcomes, width := 100)
    table = [line for line in lines if line.startswith(("none ", "checkpoint ", "chain "))]
    assert len(table) == 3
    assert max(map(len, table)) <= width
    assert len(lines) < 24
    assert not any("…" in line for line in lines)
    assert any("control:" in line for line in lines)


def test_comparison_says_which_trials_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "demo"
    write_events(folder / "chain.kill.seed-0", missed(toy_events("chain", "kill", 0)))
    outcomes = [done.outcome for done in read_experiment(folder, load_prices())]
    text = " ".join(" ".join(shown(outcomes, 120)).split())
    assert "chain.kill.seed-0 is invalid and left out: the training ended first" in text


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (-1, "its record has no end: it is running, or was cut short"),
        (-0.5, "running, or was cut short; its last line is not whole and left out"),
        (0.5, "its record was cut short in its first line"),
        (0, "its record is empty"),
    ],
)
def test_a_record_without_its_end_is_named_with_the_reason(
    tmp_path: Path, kept: float, reason: str
) -> None:
    file = write_events(tmp_path / "chain.kill.seed-0", toy_events("chain", "kill", 0))
    lines = file.read_text().splitlines(keepends=True)
    whole = lines[: int(kept)] if kept < 0 else []
    cut = {-0.5: [*lines[:-1], lines[-1][:9]], 0.5: [lines[0][:9]]}.get(kept, whole)
    file.write_text("".join(cut))
    [done] = read_experiment(tmp_path, load_prices())
    assert done.outcome.identity.trial == "chain.kill.seed-0"
    assert done.outcome.status == "failed"
    assert done.outcome.reason.endswith(reason)


# -- what is recorded --------------------------------------------------------------------------


@pytest.fixture
def trial() -> Trial:
    return next(trial for trial in demo_trials() if trial.name == "chain.kill.seed-0")


def is_recorded(trial: Trial, folder: Path) -> bool:
    return whole_record(trial, folder) is not None


def test_a_whole_record_of_the_same_configuration_counts(tmp_path: Path, trial: Trial) -> None:
    assert not is_recorded(trial, tmp_path)
    events = toy_events("chain", "kill", 0)
    write_events(tmp_path / trial.name, events)
    assert is_recorded(trial, tmp_path)
    assert not is_recorded(replace(trial, digest="of another configuration"), tmp_path)
    write_events(tmp_path / trial.name, missed(events))
    assert is_recorded(trial, tmp_path)


def test_a_failed_interrupted_or_damaged_record_does_not(tmp_path: Path, trial: Trial) -> None:
    events = toy_events("chain", "kill", 0)
    file = write_events(tmp_path / trial.name, [*events[:-1], TrialEnded(0, "failed", "why")])
    assert not is_recorded(trial, tmp_path)
    whole = write_events(tmp_path / trial.name, events).read_text()
    file.write_text(whole[:-30])
    assert not is_recorded(trial, tmp_path)
    file.write_text("nonsense\n" + whole)
    assert not is_recorded(trial, tmp_path)
    started = next(event for event in events if isinstance(event, TrialStarted))
    assert started.settings["digest"] == trial.digest


def test_a_trial_that_failed_as_its_record_tells_counts_as_missing_too(tmp_path: Path) -> None:
    """Its driver took it for valid, as long as nobody asked why a server had gone."""
    trial = next(t for t in demo_trials() if t.name == "chain.no-fault.seed-0")
    events = toy_events("chain", "no fault", 0)
    write_events(tmp_path / trial.name, events)
    assert is_recorded(trial, tmp_path)
    crash = Detected(events[len(events) // 2].t, 0, 2, "server-0", True, "scheduler")
    write_events(tmp_path / trial.name, sorted([*events, crash], key=lambda event: event.t))
    assert not is_recorded(trial, tmp_path)


def test_an_unknown_experiment_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nothing is recorded in"):
        experiment_folder("demo", tmp_path)
    write_events(tmp_path / "results" / "demo" / "one", toy_events())
    (tmp_path / "results" / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="did you mean 'demo'"):
        experiment_folder("dmo", tmp_path)
    with pytest.raises(ConfigurationError, match="there are: demo"):
        experiment_folder("../results/demo", tmp_path)
    assert (experiment_folder("demo", tmp_path) / "one" / EVENTS_FILE).exists()


def test_a_target_that_is_not_reached_is_said() -> None:
    records = [Record(tuple(toy_events("chain", "no fault", seed))) for seed in (0, 1)]
    found = [outcome(record, load_prices()) for record in records]
    assert short_of_target(found) == ""
    short = [with_values(each, target_accuracy=0.99, target_seconds=None) for each in found]
    told = short_of_target(short)
    assert told.startswith("None of 2 valid trials reached the target, accuracy of 99.0%; the best")
    some = [with_values(found[0], target_accuracy=0.9, target_seconds=1.0), short[1]]
    assert short_of_target(some).startswith("1 of 2 valid trials reached the target")
    console = Console(file=io.StringIO(), width=200)
    print_study(Study(tuple(short)), None, console)
    assert isinstance(console.file, io.StringIO)
    assert told in console.file.getvalue()
