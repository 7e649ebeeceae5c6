"""Comparisons for other programs: one schema, the same numbers in every form."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import typing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from dps.errors import ConfigurationError
from dps.events import TrialStarted
from flows.analysis.comparison import compared
from flows.analysis.outcome import Outcome
from flows.analysis.prices import load_prices
from flows.analysis.statistics.claims import judge
from flows.cli import app
from flows.cli.documents import claims as claims_of
from flows.config.base import ComparisonSection
from flows.config.claims import ClaimSection
from flows.metrics.score import SCORES
from flows.records.record import write_grid
from flows.report.compare import check_comparable, find_run, judged, settings_that_differ
from flows.report.export import FIELDS, SCHEMA, ExportedRow, exported, to_csv, to_json
from tests.flows.report.test_latex import check
from tests.support.synthetic import (
    STRATEGIES,
    toy_events,
    unsure_trials,
    write_events,
    write_experiment,
)

CLAIM = ClaimSection.model_validate(
    {
        "claim": 'A chain, "as always", ends lower',
        "metric": "accuracy_final",
        "strategy": "chain",
        "against": "none",
        "direction": "less",
        "smallest": 0.01,
    }
)
TYPES = typing.get_type_hints(ExportedRow)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [outcome for _, outcome in unsure_trials()]


@pytest.fixture(scope="module")
def rows(outcomes: list[Outcome]) -> tuple[ExportedRow, ...]:
    section = ComparisonSection(metrics=("accuracy_final", "updates_lost", "rto_seconds"))
    generator = np.random.default_rng(0)
    return exported(
        compared(outcomes, section, generator), judge(outcomes, [CLAIM], np.random.default_rng(0))
    )


def read(name: str, text: str) -> Any:
    """A value of a column as its type has it; nothing is None, or the empty text."""
    kind = TYPES[name]
    if not text:
        return None if type(None) in typing.get_args(kind) else ""
    number = next((t for t in typing.get_args(kind) if t in (int, float)), str)
    return number(text)


def test_csv_reads_back_as_the_same_rows(rows: tuple[ExportedRow, ...]) -> None:
    lines = csv.DictReader(io.StringIO(to_csv(rows)))
    again = [
        ExportedRow(**{name: read(name, text) for name, text in line.items()}) for line in lines
    ]
    assert again == list(rows)
    assert tuple(lines.fieldnames or ()) == FIELDS


def test_json_reads_back_as_the_same_rows(rows: tuple[ExportedRow, ...]) -> None:
    told = json.loads(to_json(rows, ["demo"]))
    assert [ExportedRow(**row) for row in told["rows"]] == list(rows)
    assert (told["schema"], told["runs"]) == (SCHEMA, ["demo"])
    assert "settings" not in told


def test_rows_have_what_was_compared_and_claimed(
    outcomes: list[Outcome], rows: tuple[ExportedRow, ...]
) -> None:
    claim, *metrics = rows
    assert (claim.kind, claim.verdict, claim.claim) == ("claim", "holds", CLAIM.claim)
    [chain] = [r for r in metrics if (r.strategy, r.metric) == ("chain", "accuracy_final")]
    values = {
        name: [
            o.row()["accuracy_final"]
            for o in sorted(outcomes, key=lambda o: o.identity.seed or 0)
            if o.identity.strategy == name
        ]
        for name in ("none", "chain")
    }
    assert chain.mean == pytest.approx(np.mean(values["chain"]))
    paired = np.subtract(values["chain"], values["none"])
    assert chain.difference == claim.difference == pytest.approx(np.mean(paired))
    reach = 4.302653 * np.std(paired, ddof=1) / np.sqrt(3)  # Student's t, 2 degrees of freedom
    assert chain.difference_high == pytest.approx(np.mean(paired) + reach, rel=1e-6)
    assert (chain.unit, chain.level, chain.baseline) == ("fraction", 0.95, "none")
    [base] = [r for r in metrics if (r.strategy, r.metric) == ("none", "accuracy_final")]
    assert (base.baseline, base.difference, base.verdict) == (None, None, None)


def test_a_claim_among_others_is_told_as_it_was_judged_with_them(outcomes: list[Outcome]) -> None:
    """In each form with the p-value after the correction, and the interval of that level."""
    nowhere = [CLAIM.model_copy(update={"condition": {"faults": each}}) for each in ("a", "b")]
    judged = judge(outcomes, [CLAIM, *nowhere], np.random.default_rng(0))
    row, document = exported([], judged)[0], claims_of(judged)[0]
    finals = {(o.identity.strategy, o.identity.seed): o.row()["accuracy_final"] for o in outcomes}
    paired = [finals["chain", seed] - finals["none", seed] for seed in range(3)]
    p = stats.ttest_1samp(paired, 0).pvalue
    reach = stats.t.ppf(1 - 0.05 / 6, 2) * np.std(paired, ddof=1) / np.sqrt(3)
    bounds = np.mean(paired) - reach, np.mean(paired) + reach
    assert (row.difference_low, row.difference_high) == pytest.approx(bounds)
    assert (row.p, row.level) == pytest.approx((min(1, 3 * p), 1 - 0.05 / 3))
    assert document["interval"] == pytest.approx(bounds)
    assert (document["p"], document["p_corrected"]) == pytest.approx((p, min(1, 3 * p)))
    assert document["confidence"] == pytest.approx(1 - 0.05 / 3)
    assert document["difference"]["low"] > row.difference_low, "of 95%, not corrected"


def test_a_claim_about_one_strategy_has_no_baseline(outcomes: list[Outcome]) -> None:
    changed = {"metric": "effect_time_mean", "against": "none-given"}
    claim = ClaimSection.model_validate({**CLAIM.model_dump(), **changed})
    (row,) = exported([], judge(outcomes, [claim], np.random.default_rng(0)))
    assert (row.baseline, row.unit, row.strategy) == (None, "fraction", "chain")


def test_every_column_is_documented() -> None:
    docs = Path(__file__).parents[3] / "docs" / "experiments.md"
    _, _, after = docs.read_text(encoding="utf-8").partition("| column | |\n|---|---|\n")
    table, _, _ = after.partition("\n\n")
    named = [re.findall("`(.+?)`", line.split("|")[1]) for line in table.splitlines()]
    assert tuple(name for names in named for name in names) == FIELDS
    assert SCHEMA in docs.read_text(encoding="utf-8")


# -- by the command ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    write_experiment(folder / "results" / "demo")
    return folder


def dps(here: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.chdir(here)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [("results", "demo", "--summary"), ("compare", "demo/none", "demo/chain")],
    ids="-".join,
)
def test_commands_tell_the_same_in_every_form(
    here: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    told = json.loads(dps(here, monkeypatch, *words, "--format", "json"))
    lines = list(csv.DictReader(io.StringIO(dps(here, monkeypatch, *words, "--format", "csv"))))
    assert [{n: read(n, t) for n, t in line.items()} for line in lines] == told["rows"]
    assert {row["condition"] for row in told["rows"]} == {"kill", "no fault"}
    latex = dps(here, monkeypatch, *words, "--format", "latex")
    head, *tables = re.split(r"^(?=\\begin\{table)", latex, flags=re.MULTILINE)
    assert head == "% needs \\usepackage{booktabs}\n"
    for table in tables:
        check(table)
    assert len(tables) >= 2
    labels = re.findall(r"\\label\{(.+?)\}", latex)
    assert len(labels) == len(set(labels))


def test_every_form_says_what_models_are_scored_by(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    shutil.copytree(here / "results" / "demo", folder / "demo")
    for strategy in ("none", "chain"):
        for seed in (0, 1):
            started, *rest = toy_events(strategy, "kill", seed)
            assert isinstance(started, TrialStarted)
            config = started.settings["config"]
            evaluation = {**config["evaluation"], "metric": "rmse"}
            config = {**config, "evaluation": evaluation}
            scored = replace(started, settings={**started.settings, "config": config})
            write_events(folder / "scored" / f"{strategy}.kill.seed-{seed}", [scored, *rest])

    def scores(*words: str) -> set[str | None]:
        lines = csv.DictReader(io.StringIO(dps(tmp_path, monkeypatch, *words, "-f", "csv")))
        told = json.loads(dps(tmp_path, monkeypatch, *words, "-f", "json"))
        found = {row["score"] for row in told["rows"]}
        assert {line["score"] or None for line in lines} == found
        return found

    assert scores("results", "scored", "--summary") == {"rmse"}
    assert scores("results", "demo", "--summary") == {"accuracy"}
    assert scores("compare", "scored/none", "scored/chain") == {"rmse"}
    assert scores("compare", "demo/chain", "scored/chain") == {None}
    assert json.loads(dps(tmp_path, monkeypatch, "results", "scored", "--json"))["score"] == "rmse"
    text = " ".join(dps(tmp_path, monkeypatch, "results", "scored").split())
    assert SCORES["rmse"].told in text
    assert "the share of the examples" not in dps(tmp_path, monkeypatch, "results", "demo")


def test_results_are_of_every_trial_unless_a_summary_is_asked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = json.loads(dps(here, monkeypatch, "results", "demo", "--format", "json"))
    assert len(trials) == 2 * 2 * len(STRATEGIES)


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
    assert re.search(r"^software ", text, re.MULTILINE)
    assert re.search(r"^dps +0\.0\.9 +0\.1\.0", text, re.MULTILINE)
    told = json.loads(
        dps(here, monkeypatch, "compare", f"{before}/chain.kill", "demo/chain.kill", "-f", "json")
    )
    assert told["settings"] == [{"setting": "versions.dps", "values": [["0.0.9"], ["0.1.0"]]}]
    one = find_run(str(before / "chain.kill.seed-1"), here, load_prices())
    assert (len(one.trials), one.part) == (1, "chain.kill.seed-1")


def test_more_than_two_runs_are_compared_with_the_first(here: Path) -> None:
    runs = [find_run(f"demo/{name}", here, load_prices()) for name in STRATEGIES]
    check_comparable(runs)
    found = judged(runs, np.random.default_rng(0))
    assert {row.strategy for row in found} == {run.name for run in runs}
    assert {row.baseline for row in found} == {"demo/none"}
    [kind] = [s for s in settings_that_differ(*runs) if s.key == "recovery.durability.kind"]
    assert kind.values == (("none",), ("checkpoint",), ("chain",), ("shared_store",))


def test_conditions_of_runs_have_the_order_of_the_configuration(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "results" / "demo", tmp_path / "results" / "demo")
    folder = tmp_path / "results" / "demo"
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    for order in (["kill", "no fault"], ["no fault", "kill"]):
        write_grid(folder, names, 0, {"recovery": list(STRATEGIES), "faults": order})
        runs = [find_run(f"demo/{name}", tmp_path, load_prices()) for name in ("none", "chain")]
        found = judged(runs, np.random.default_rng(0))
        assert list(dict.fromkeys(row.condition for row in found)) == order


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("demo",), "demo alone: name two runs or more"),
        (("./nowhere", "demo"), "expected the folder of an experiment"),
        (("./results/demo/chian", "demo"), "has no trial 'chian'; there are: chain.kill"),
    ],
)
def test_what_cannot_be_compared_is_told(here: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_comparable([find_run(name, here, load_prices()) for name in names])


def test_a_row_is_plain_data(rows: tuple[ExportedRow, ...]) -> None:
    plain = (str, int, float, type(None))
    assert all(isinstance(value, plain) for row in rows for value in asdict(row).values())
    assert not any(isinstance(v, np.generic) for row in rows for v in asdict(row).values())
