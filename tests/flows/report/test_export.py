"""Files for other programs, and runs side by side: numbers are those of the outcomes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.metrics import BY_KEY
from flows.metrics.prices import load_prices
from flows.records.events import TrialStarted
from flows.report import figures, style
from flows.report.compare import check_comparable, compared, find_run, settings_that_differ
from flows.report.export import export
from flows.report.html import open_study
from flows.report.study import Study
from flows.report.tables import comparison_frame
from tests.support.synthetic import STRATEGIES, toy_events, write_events, write_experiment


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("here")
    write_experiment(here / "results" / "demo")
    return here


@pytest.fixture(scope="module")
def study(here: Path) -> Study:
    return open_study(here / "results" / "demo", load_prices())[0]


def dps(here: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.chdir(here)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


# -- files -------------------------------------------------------------------------------------


def test_csv_holds_plain_numbers(study: Study, tmp_path: Path) -> None:
    export(study, tmp_path, ["csv"], [])
    frame = pd.read_csv(tmp_path / "trials.csv")
    assert list(frame.columns) == list(BY_KEY)
    assert list(frame["trial"]) == [o.identity.trial for o in study.outcomes]
    for key in ("accuracy_final", "updates_lost", "cost_usd"):
        wanted = [outcome.row()[key] for outcome in study.outcomes]
        assert list(frame[key]) == pytest.approx(wanted)


def test_figures_are_files_with_their_data_and_the_same_every_time(
    study: Study, tmp_path: Path
) -> None:
    files = export(study, tmp_path, [], ["svg", "pdf", "png"])
    assert {path.suffix for path in files} == {".csv", ".svg", ".pdf", ".png"}
    [again] = [each for each in figures.draw(study) if each.name == "recovery-time"]
    for path in files:
        if path.stem == "recovery-time" and path.suffix != ".csv":
            assert style.to_file(again.figure, path.suffix[1:]) == path.read_bytes()
    data = pd.read_csv(tmp_path / "figures" / "recovery-time.csv")
    assert {*data["strategy"]} == {*STRATEGIES}


def test_latex_has_the_tables_of_the_report(study: Study, tmp_path: Path) -> None:
    export(study, tmp_path, ["latex"], [])
    names = {path.stem for path in tmp_path.iterdir()}
    assert names >= {"glance", "metrics-kill", "metrics-no-fault", "comparison-kill"}
    text = (tmp_path / "metrics-kill.tex").read_text()
    assert r"\toprule" in text
    assert r"\label{tab:metrics-kill}" in text
    assert r"final accuracy, \%" in text
    assert "−" not in text


# -- commands ----------------------------------------------------------------------------------


def test_results_show_what_the_json_says(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(dps(here, monkeypatch, "results", "demo", "--json"))
    assert document["score"] == "accuracy"
    assert len(document["trials"]) == 2 * 2 * len(STRATEGIES)
    assert {row["metric"] for row in document["comparison"]} >= {"updates_lost", "cost_usd"}
    text = dps(here, monkeypatch, "results", "demo")
    assert all(trial["trial"] in text for trial in document["trials"])
    assert "No claims were fixed beforehand" in text
    assert "none, kill: lost acknowledged or buffered updates in 2 of 2 trials" in text


def test_report_says_where_it_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(dps(here, monkeypatch, "report", "demo", "-o", "mine.html", "--json"))
    assert Path(here, document["report"]).read_text().startswith("<!DOCTYPE html>")
    assert document["report"].endswith("mine.html")
    assert document["left_out"] == []


# -- side by side ------------------------------------------------------------------------------


def test_an_experiment_of_another_directory_and_version_is_compared_by_its_path(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before" / "results" / "demo"
    for strategy in ("none", "chain"):
        for seed in (0, 1):
            started, *rest = toy_events(strategy, "kill", seed)
            assert isinstance(started, TrialStarted)
            old = TrialStarted(started.t, started.trial, started.settings, {"dps": "0.0.9"})
            write_events(before / f"{strategy}.kill.seed-{seed}", [old, *rest])
    text = dps(here, monkeypatch, "compare", str(before), "demo")
    assert re.search(r"^dps +0\.0\.9 +0\.1\.0", text, re.MULTILINE)
    words = ("compare", f"{before}/chain.kill", "demo/chain.kill", "--json")
    document = json.loads(dps(here, monkeypatch, *words))
    assert document["settings"] == [{"key": "versions.dps", "values": [["0.0.9"], ["0.1.0"]]}]
    one = find_run(str(before / "chain.kill.seed-1"), here, load_prices())
    assert (len(one.trials), one.part) == (1, "chain.kill.seed-1")


def test_more_than_two_runs_are_compared_with_the_first(here: Path) -> None:
    runs = [find_run(f"demo/{name}", here, load_prices()) for name in STRATEGIES]
    check_comparable(runs)
    found = comparison_frame(compared(runs))
    assert {*found["strategy"]} == {run.name for run in runs}
    assert {*found["baseline"]} == {"demo/none"}
    [kind] = [s for s in settings_that_differ(*runs) if s.key == "recovery.durability.kind"]
    assert kind.values == (("none",), ("checkpoint",), ("chain",), ("shared_store",))
