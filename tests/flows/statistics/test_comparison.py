"""Comparisons of strategies from records, how they are shown, and two runs side by side."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dps.errors import ConfigurationError
from flows.config.experiment import load_experiment
from flows.config.settings import ComparisonSection
from flows.metrics.outcome import Outcome, outcome
from flows.metrics.prices import load_prices
from flows.records.record import Record
from flows.report import tables
from flows.report.study import Study
from flows.report.terminal import print_table
from flows.statistics.comparison import (
    QUESTIONS_FILE,
    Compared,
    Questions,
    baseline_of,
    compared,
    read_questions,
    write_questions,
)
from tests.support.records import with_values
from tests.support.synthetic import toy_events

PRICES = load_prices()
SIX = (
    *("accuracy_final", "downtime_seconds", "rto_seconds"),
    *("updates_lost", "gradients_per_second", "cost_usd"),
)


def trial(strategy: str, seed: int, fault: str = "kill") -> Outcome:
    """A toy trial; seeds beyond those of the toy experiment repeat its accuracy, a bit shifted."""
    found = outcome(Record(tuple(toy_events(strategy, fault, seed % 2))), PRICES)
    final = found.row()["accuracy_final"] + 0.001 * seed
    identity = dataclasses.replace(found.identity, seed=seed)
    return with_values(dataclasses.replace(found, identity=identity), accuracy_final=final)


def judge(outcomes: Iterable[Outcome], **choices: object) -> dict[tuple[str, str], Compared]:
    section = ComparisonSection.model_validate({"metrics": SIX, **choices})
    rows = compared(list(outcomes), section, np.random.default_rng(0))
    return {(row.strategy, row.metric): row for row in rows}


@pytest.fixture(scope="module")
def ten_seeds() -> list[Outcome]:
    return [trial(strategy, seed) for strategy in ("none", "chain") for seed in range(10)]


def test_strategies_are_compared_with_the_baseline(ten_seeds: list[Outcome]) -> None:
    rows = judge(ten_seeds, metrics=["rto_seconds", "updates_lost"])
    assert rows["chain", "updates_lost"].reading == "lower"
    assert rows["chain", "rto_seconds"].reading == "lower"
    assert rows["none", "updates_lost"].reading is None
    other = judge(ten_seeds, metrics=["updates_lost"], baseline="chain")
    assert other["none", "updates_lost"].reading == "higher"


def test_figures_that_no_trial_has_are_not_compared() -> None:
    rows = judge([trial(s, seed, "no fault") for s in ("none", "chain") for seed in (0, 1)])
    assert ("chain", "rto_seconds") not in rows
    assert rows["chain", "accuracy_final"].reading == "too few seeds"


def reached(strategy: str, in_time: int, seconds: float) -> list[Outcome]:
    """Ten trials, of which this many reach the target."""
    return [
        with_values(
            trial(strategy, seed),
            target_accuracy=0.9,
            target_seconds=seconds + 0.1 * seed if seed < in_time else None,
        )
        for seed in range(10)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("mine", "theirs"), [(4, 10), (10, 0)])
def test_what_only_some_reach_is_not_judged_by_those(mine: int, theirs: int) -> None:
    trials = [*reached("none", theirs, 9.0), *reached("chain", mine, 2.0)]
    row = judge(trials, metrics=["target_seconds", "updates_lost"])["chain", "target_seconds"]
    assert (row.reading, row.difference, row.p) == ("not comparable", None, "")
    assert row.sentence == f"not comparable: a value in {mine} of 10 seeds against {theirs} of 10"
    console = Console(width=160, record=True, file=io.StringIO())
    shown(trials, list(judge(trials, metrics=["target_seconds"]).values()), console)
    assert row.sentence in text_of(console)
    lost = judge(trials, metrics=["target_seconds", "updates_lost"])["chain", "updates_lost"]
    assert lost.reading == "lower"


def test_the_baseline_is_none_or_else_the_first(ten_seeds: list[Outcome]) -> None:
    assert baseline_of(ten_seeds, ComparisonSection()) == "none"
    chains = [o for o in ten_seeds if o.identity.strategy == "chain"]
    assert baseline_of(chains, ComparisonSection()) == "chain"
    with pytest.raises(ConfigurationError, match="did you mean 'chain'"):
        baseline_of(ten_seeds, ComparisonSection(baseline="chian"))
    assert compared([], ComparisonSection(), np.random.default_rng(0)) == ()


def test_a_baseline_that_is_no_strategy_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigurationError, match=r"comparison.baseline.*did you mean 'chain'"):
        load_experiment("demo", ["comparison.baseline=chein"])
    load_experiment("demo", ["comparison.baseline=chain"])


def test_what_to_show_is_kept_beside_the_records(tmp_path: Path) -> None:
    assert read_questions(tmp_path) == Questions()
    claim = {"metric": "accuracy_final", "strategy": "chain", "against": "none"}
    claim |= {"direction": "more", "smallest": "25%", "condition": {"faults": "kill"}}
    asked = Questions.model_validate({"claims": [claim], "comparison": {"baseline": "chain"}})
    write_questions(tmp_path, asked)
    assert read_questions(tmp_path) == asked
    assert read_questions(tmp_path).claims[0].digest == asked.claims[0].digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"comparison": {"metrics": ["nothing"]}}', "metrics"),
        ('{"claims": [{}]}', "metric"),
        ('{"claims": [1]}', "expected a section"),
        ("{", "Expecting"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / QUESTIONS_FILE).write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_questions(tmp_path)


# -- on the terminal -----------------------------------------------------------------------------


def shown(trials: list[Outcome], rows: list[Compared], console: Console) -> None:
    print_table(tables.comparison(Study(tuple(trials)), rows[0].condition, rows), console)


def text_of(console: Console) -> str:
    return " ".join(console.export_text().split())


def test_differences_are_printed_with_intervals(ten_seeds: list[Outcome]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    shown(ten_seeds, list(judge(ten_seeds).values()), console)
    text = text_of(console)
    assert "updates lost none 317 [317, 317]" in text
    assert "chain 0 [0, 0] −317 [−317, −317] 0.002 10 lower" in text
    assert all(word not in text for word in ("better", "worse", "holds"))
