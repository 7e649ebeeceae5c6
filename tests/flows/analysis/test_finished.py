"""Reading records back, and showing them: on the terminal, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dps.errors import ConfigurationError
from dps.events import Detected, TrialEnded, TrialStarted
from flows.analysis.finished import (
    experiment_folder,
    is_recorded,
    print_comparison,
    read_experiment,
    to_csv,
    to_json,
    to_table,
)
from flows.analysis.learning import Target
from flows.analysis.left_out import short_of_target
from flows.analysis.outcome import Outcome, outcome
from flows.analysis.prices import load_prices
from flows.config.experiment import load_experiment
from flows.config.trials import Trial, expand
from flows.metrics import BY_KEY
from flows.records.record import EVENTS_FILE, GRID_FILE, Record
from tests.support.synthetic import demo_trials, missed, toy_events, write_events, write_experiment


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    here = tmp_path_factory.mktemp("here")
    write_experiment(here / "results" / "demo")
    folder = experiment_folder("demo", here)
    return [done.outcome for done in read_experiment(folder, load_prices())]


def shown(outcomes: list[Outcome], width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    print_comparison(outcomes, console)
    return console.export_text().splitlines()


def test_trials_without_faults_come_first_where_no_order_was_noted(tmp_path: Path) -> None:
    for fault in ("kill", "no fault"):
        write_events(tmp_path / f"chain.{fault}", toy_events("chain", fault))
    found = [done.outcome.identity.condition for done in read_experiment(tmp_path, load_prices())]
    assert found == ["no fault", "kill"]


@pytest.mark.slow
def test_json_is_one_object_per_trial_with_every_figure(outcomes: list[Outcome]) -> None:
    rows = json.loads(to_json(outcomes))
    assert len(rows) == 16
    assert all(set(row) == set(BY_KEY) for row in rows)
    kill = next(row for row in rows if row["trial"] == "none.kill.seed-0")
    assert kill["updates_lost"] > 0
    assert kill["accuracy_before"] > kill["accuracy_after"]


def test_csv_reads_back(outcomes: list[Outcome]) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(outcomes))))
    assert [row["trial"] for row in rows] == [o.identity.trial for o in outcomes]
    assert float(rows[0]["accuracy_final"]) == outcomes[0].accuracy.final
    assert rows[0]["reason"] == ""


def test_table_has_a_line_per_trial_that_fits(outcomes: list[Outcome]) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(to_table(outcomes))
    text = console.export_text()
    assert all(o.identity.trial in text for o in outcomes)
    assert "…" not in text


@pytest.mark.parametrize("width", [100, 120])
def test_memory_is_no_column_of_a_comparison_where_none_was_measured(
    outcomes: list[Outcome], width: int
) -> None:
    assert any("peak" in line for line in shown(outcomes, width))
    without = [
        replace(o, usage={role: replace(used, peak_bytes=0) for role, used in o.usage.items()})
        for o in outcomes
    ]
    assert not any("peak" in line for line in shown(without, width))


@pytest.mark.parametrize("width", [100, 118, 120])
def test_comparison_is_whole_at_any_usual_width(outcomes: list[Outcome], width: int) -> None:
    lines = shown(outcomes, width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    chain = [line for line in lines if line.startswith("chain") and "kill" in line]
    assert len(chain) == (1 if width >= 118 else 2)
    effects = " ".join(lines)
    assert "effect, points" in effects
    assert re.search(r"chain +kill +\S+ +[−\d.]+/[−\d.]+/[−\d.]+ ", chain[0])


def test_comparison_gives_means_over_seeds(outcomes: list[Outcome]) -> None:
    pair = [o for o in outcomes if o.identity.strategy == "none" and o.faults]
    mean = sum(o.ledger.lost for o in pair) / len(pair)
    (line,) = (
        line for line in shown(outcomes, 120) if line.startswith("none  ") and " kill " in line
    )
    assert f" {BY_KEY['updates_lost'].text(mean)} " in line


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


def test_a_damaged_experiment_holds_up_no_other(tmp_path: Path) -> None:
    for name in ("demo", "damaged"):
        write_events(tmp_path / "results" / name / "one", toy_events())
    (tmp_path / "results" / "damaged" / GRID_FILE).write_text("")
    assert experiment_folder("demo", tmp_path).name == "demo"


def test_the_demo_is_what_the_toy_records_are_of() -> None:
    packaged = expand(load_experiment("demo", ["seeds=[0, 1]"]))
    assert [trial.labels for trial in packaged] == [trial.labels for trial in demo_trials()]


def test_a_target_that_is_not_reached_is_said() -> None:
    records = [Record(tuple(toy_events("chain", "no fault", seed))) for seed in (0, 1)]
    found = [outcome(record, load_prices()) for record in records]
    assert short_of_target(found) == ""
    short = [replace(each, target=Target(0.99, None, None)) for each in found]
    told = short_of_target(short)
    assert told.startswith("None of 2 valid trials reached the target, accuracy of 99.0%; the best")
    some = [replace(found[0], target=Target(0.9, 1.0, 100)), short[1]]
    assert short_of_target(some).startswith("1 of 2 valid trials reached the target")
    console = Console(file=io.StringIO(), width=200)
    print_comparison(short, console)
    assert isinstance(console.file, io.StringIO)
    assert told in console.file.getvalue()
