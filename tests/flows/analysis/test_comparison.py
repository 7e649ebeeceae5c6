"""Comparisons of strategies from records, how they are shown, and two runs side by side."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from dps.errors import ConfigurationError
from dps.events import TrialStarted
from flows.analysis.comparison import (
    COMPARISON_FILE,
    Compared,
    baseline_of,
    compared,
    read_comparison,
    write_comparison,
)
from flows.analysis.groups import Group
from flows.analysis.learning import Target
from flows.analysis.outcome import Outcome, outcome
from flows.analysis.prices import load_prices
from flows.config.base import ComparisonSection
from flows.config.experiment import load_experiment
from flows.metrics import COLUMNS
from flows.records.record import Record
from flows.report import sentences as words
from flows.report.compare import find_run, judged, print_side_by_side, settings_that_differ
from flows.report.terminal import print_exploratory
from tests.support.synthetic import (
    missed,
    toy_events,
    unsure_trials,
    write_events,
    write_experiment,
)

PRICES = load_prices()
SIX = (
    *("accuracy_final", "accuracy_drop", "rto_seconds"),
    *("updates_lost", "gradients_per_second", "cost_usd"),
)


def trial(strategy: str, seed: int, fault: str = "kill") -> Outcome:
    """A toy trial; seeds beyond those of the toy experiment repeat its accuracy, a bit shifted."""
    found = outcome(Record(tuple(toy_events(strategy, fault, seed % 2))), PRICES)
    shift = 0.001 * seed
    accuracy = dataclasses.replace(found.accuracy, final=(found.accuracy.final or 0) + shift)
    identity = dataclasses.replace(found.identity, seed=seed)
    return dataclasses.replace(found, accuracy=accuracy, identity=identity)


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


def test_only_valid_trials_enter(ten_seeds: list[Outcome]) -> None:
    bad = outcome(Record(tuple(missed(toy_events("chain", "kill", 0)))), PRICES)
    rest = [o for o in ten_seeds if (o.identity.strategy, o.identity.seed) != ("chain", 0)]
    row = judge([bad, *rest])["chain", "updates_lost"]
    assert row.interval.n == 9
    assert row.difference is not None
    assert row.difference.n == 9


def reached(strategy: str, in_time: int, seconds: float) -> list[Outcome]:
    """Ten trials, of which this many reach the target."""
    return [
        dataclasses.replace(
            trial(strategy, seed),
            target=Target(0.9, seconds + 0.1 * seed, 100)
            if seed < in_time
            else Target(0.9, None, None),
        )
        for seed in range(10)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("mine", "theirs"), [(4, 10), (10, 4), (0, 10), (10, 0)])
def test_what_only_some_reach_is_not_judged_by_those(mine: int, theirs: int) -> None:
    trials = [*reached("none", theirs, 9.0), *reached("chain", mine, 2.0)]
    row = judge(trials, metrics=["target_seconds", "updates_lost"])["chain", "target_seconds"]
    assert (row.reading, row.difference, row.p) == ("not comparable", None, "")
    assert row.said == f"not comparable: a value in {mine} of 10 seeds against {theirs} of 10"
    console = Console(width=160, record=True, file=io.StringIO())
    print_exploratory(list(judge(trials, metrics=["target_seconds"]).values()), console)
    assert row.said in text_of(console)
    lost = judge(trials, metrics=["target_seconds", "updates_lost"])["chain", "updates_lost"]
    assert lost.reading == "lower"


@pytest.mark.slow
def test_what_nobody_reaches_for_a_seed_is_compared_over_the_others() -> None:
    trials = [*reached("none", 8, 9.0), *reached("chain", 8, 2.0)]
    row = judge(trials, metrics=["target_seconds"])["chain", "target_seconds"]
    assert (row.reading, row.difference and row.difference.n) == ("lower", 8)
    nobody = [*reached("none", 0, 9.0), *reached("chain", 0, 2.0)]
    assert judge(nobody, metrics=["target_seconds"]) == {}


def test_what_a_resumed_trial_cannot_tell_does_not_count_as_missing(
    ten_seeds: list[Outcome],
) -> None:
    resumed = [dataclasses.replace(ten_seeds[0], whole=False), *ten_seeds[1:]]
    row = judge(resumed, metrics=["updates_lost"])["chain", "updates_lost"]
    assert (row.reading, row.difference and row.difference.n) == ("lower", 9)


def priced(strategy: str, usd: dict[int, float]) -> Group:
    trials = [(trial(strategy, seed), nodes) for seed, nodes in usd.items()]
    return Group(
        strategy,
        "",
        tuple(
            dataclasses.replace(
                each, cost=dataclasses.replace(each.cost, nodes=nodes, moved=0.0, stored=0.0)
            )
            for each, nodes in trials
        ),
        (),
    )


def test_what_a_strategy_costs_against_another_is_told_over_the_seeds_of_both() -> None:
    none = priced("none", {0: 1.0, 1: 2.0, 2: 4.0, 9: 100.0})
    chain = priced("chain", {0: 1.1, 1: 2.4, 2: 5.2, 8: 0.01})
    # 1.1, 1.2 and 1.3: standard error 0.0577, and 4.303 of them at 2 degrees of freedom.
    found = words.ratio(chain, none, "cost_usd")
    assert found is not None
    assert [round(each, 2) for each in (found.mean, found.low, found.high)] == [1.2, 0.95, 1.45]
    one = words.ratio(priced("chain", {0: 1.5}), none, "cost_usd")
    assert one is not None
    assert one.mean == 1.5
    assert words.ratio(chain, priced("none", {7: 1.0}), "cost_usd") is None
    assert words.ratio(chain, priced("none", {0: 0.0}), "cost_usd") is None


def test_repeats_are_for_the_difference_that_is_worth_finding(ten_seeds: list[Outcome]) -> None:
    seen = judge(ten_seeds, metrics=["accuracy_final"])["chain", "accuracy_final"]
    wanted = judge(ten_seeds, metrics=["accuracy_final"], resolve={"accuracy_final": 0.0005})
    many = wanted["chain", "accuracy_final"].repeats_needed
    assert seen.repeats_needed is not None
    assert many is not None
    assert many > seen.repeats_needed


def test_the_baseline_is_none_or_else_the_first(ten_seeds: list[Outcome]) -> None:
    assert baseline_of(ten_seeds, ComparisonSection()) == "none"
    chains = [o for o in ten_seeds if o.identity.strategy == "chain"]
    assert baseline_of(chains, ComparisonSection()) == "chain"
    with pytest.raises(ConfigurationError, match="did you mean 'chain'"):
        baseline_of(ten_seeds, ComparisonSection(baseline="chian"))
    assert compared([], ComparisonSection(), np.random.default_rng(0)) == ()


def test_the_same_records_give_the_same_comparison(ten_seeds: list[Outcome]) -> None:
    assert judge(ten_seeds) == judge(list(reversed(ten_seeds)))


@pytest.mark.parametrize(
    "section",
    [
        {"metrics": ["accuracy"]},
        {"metrics": ["seed"]},
        {"metrics": ["cost_usd", "cost_usd"]},
        {"metrics": []},
        {"resolve": {"cost_usd": 0}},
    ],
)
def test_what_cannot_be_compared_by_is_refused(section: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ComparisonSection.model_validate(section)


def test_a_baseline_that_is_no_strategy_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigurationError, match=r"comparison.baseline.*did you mean 'chain'"):
        load_experiment("demo", ["comparison.baseline=chein"])
    load_experiment("demo", ["comparison.baseline=chain"])


def test_what_to_compare_by_is_kept_beside_the_records(tmp_path: Path) -> None:
    assert read_comparison(tmp_path) == ComparisonSection()
    section = ComparisonSection(baseline="chain", resolve={"cost_usd": 0.01})
    write_comparison(tmp_path, section)
    assert read_comparison(tmp_path) == section
    (tmp_path / COMPARISON_FILE).write_text('{"metrics": ["nothing"]}')
    with pytest.raises(ConfigurationError, match="metrics"):
        read_comparison(tmp_path)
    for text in (b"{", b"\xff", b"[" * 100_000):
        (tmp_path / COMPARISON_FILE).write_bytes(text)
        with pytest.raises(ConfigurationError, match="no JSON"):
            read_comparison(tmp_path)
    (tmp_path / COMPARISON_FILE).write_text(f'{{"metrics": ["{"x" * 100_000}"]}}')
    with pytest.raises(ConfigurationError, match="metrics") as caught:
        read_comparison(tmp_path)
    assert len(str(caught.value)) < 1000, "nobody reads more"


# -- on the terminal -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    write_experiment(folder / "results" / "demo")
    return folder


def text_of(console: Console) -> str:
    return " ".join(console.export_text().split())


def side_by_side(here: Path, first: str, second: str) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    runs = [find_run(name, here, PRICES) for name in (first, second)]
    print_side_by_side(runs, np.random.default_rng(0), console)
    return text_of(console)


def test_differences_are_printed_with_intervals(ten_seeds: list[Outcome]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    print_exploratory(list(judge(ten_seeds).values()), console)
    text = text_of(console)
    assert "lost none 317 [317, 317]" in text
    assert "chain 0 [0, 0] −317 [−317, −317] 0.002 10 (6) lower" in text
    assert "not corrected for how many there are" in text
    assert all(word not in text for word in ("better", "worse", "holds"))


def test_no_count_is_told_to_be_less_than_none() -> None:
    """Student's interval of 0, 0, 0, 0, 0 and 30 reaches below 0, which no number of updates is."""
    lost = {"none": (317, 318, 319, 317, 318, 319), "chain": (0, 0, 0, 0, 0, 30)}
    trials = [
        dataclasses.replace(each, ledger=dataclasses.replace(each.ledger, lost=count))
        for strategy, counts in lost.items()
        for seed, count in enumerate(counts)
        for each in [trial(strategy, seed)]
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    print_exploratory(list(judge(trials, metrics=["updates_lost"]).values()), console)
    assert "chain 5 [0, 30] −313 [−319, −289] 0.031 6 (6) lower" in text_of(console)


def test_what_is_the_same_in_a_few_seeds_is_told_as_that() -> None:
    row = judge([o for _, o in unsure_trials()])["chain", "updates_lost"]
    assert row.difference is not None
    assert not row.difference.excludes_zero, "no interval of 95% is known of three equal values"
    assert row.said == "the same in all 3 seeds: too few to tell"


def test_two_trials_are_shown_setting_by_setting_and_figure_by_figure(here: Path) -> None:
    text = side_by_side(here, "demo/none.kill.seed-0", "demo/chain.kill.seed-0")
    assert "recovery.durability.kind none chain" in text
    assert "training.updates" not in text
    assert "lost 317 0 −317" in text
    assert "status valid valid" in text


def test_what_is_nothing_in_both_is_left_out_but_for_lost_updates(here: Path) -> None:
    text = side_by_side(here, "demo/chain.kill.seed-0", "demo/chain.kill.seed-1")
    assert re.findall(r"([a-z]+) 0[.0]* 0[.0]* ", text) == ["lost"]
    assert "– –" not in text
    assert "gradients per second " in text
    assert "gradients per second, per second" not in text
    assert "goodput, per second" in text


def test_trials_of_several_seeds_are_judged(here: Path) -> None:
    text = side_by_side(here, "demo/none.kill", "demo/chain.kill")
    assert "too few seeds" in text
    assert "difference to demo/none.kill seed by seed" in text


def test_a_strategy_alone_stands_for_all_its_conditions(here: Path) -> None:
    run = find_run("demo/chain", here, PRICES)
    names = {done.outcome.identity.condition for done in run.trials}
    assert {"kill", "no fault"} <= names
    rows = judged([find_run("demo/none", here, PRICES), run], np.random.default_rng(0))
    assert {row.condition for row in rows} == names


def test_a_label_on_another_axis_stands_for_all_that_have_it(here: Path) -> None:
    kill, quiet = (find_run(f"demo/{label}", here, PRICES) for label in ("kill", "no-fault"))
    assert {done.outcome.identity.condition for done in kill.trials} == {"kill"}
    strategies = {done.outcome.identity.strategy for done in kill.trials}
    assert len(strategies) > 1
    rows = judged([quiet, kill], np.random.default_rng(0))
    assert {row.condition for row in rows} == strategies


def test_seeds_and_names_are_no_settings(here: Path) -> None:
    one, other = (find_run(f"demo/chain.kill.seed-{seed}", here, PRICES) for seed in (0, 1))
    assert settings_that_differ(one, other) == []


def test_a_setting_of_an_old_record_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    for strategy in ("none", "chain"):
        events = toy_events(strategy)
        started = events[0]
        assert isinstance(started, TrialStarted)
        config = {**started.settings["config"], f"\x1b[2J{strategy}": "\x1b[31m"}
        events[0] = dataclasses.replace(started, settings={**started.settings, "config": config})
        write_events(tmp_path / "results" / "demo" / f"{strategy}.kill.seed-0", events)
    text = side_by_side(tmp_path, "demo/none.kill.seed-0", "demo/chain.kill.seed-0")
    assert "\x1b" not in text
    assert r"\x1b[2Jnone \x1b[31m –" in text


def test_one_trial_is_shown_with_the_effect_that_its_control_tells(here: Path) -> None:
    run = find_run("demo/chain.kill.seed-0", here, PRICES)
    [done] = run.trials
    assert done.outcome.effects.control == "chain.no-fault.seed-0"
    assert done.outcome.effects.time is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("demo", "demo", "named twice"),
        ("demo", "demo/chain.kill", "one is an experiment, one is not"),
        ("demo/chain.kil", "demo", "did you mean 'chain.kill'"),
        ("dmo", "demo", "did you mean 'demo'"),
    ],
)
def test_runs_that_cannot_be_compared(here: Path, first: str, second: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        side_by_side(here, first, second)


@pytest.mark.slow
def test_experiments_are_compared_under_the_labels_that_both_have(here: Path) -> None:
    write_experiment(here / "results" / "again")
    text = side_by_side(here, "demo", "again")
    assert "Their configurations are the same" in text
    assert "chain · kill" in text
    assert "lost demo 317" in text


def test_the_figures_that_can_be_compared_are_listed_with_their_units() -> None:
    docs = Path(__file__).parents[3] / "docs" / "experiments.md"
    _, _, after = docs.read_text(encoding="utf-8").partition("| unit | figures |\n|---|---|\n")
    table, _, _ = after.partition("\n\n")
    lines = [line.strip("| ").partition(" | ") for line in table.splitlines()]
    listed = {unit.partition(":")[0]: set(re.findall("`(.+?)`", keys)) for unit, _, keys in lines}
    units = {"%": "fraction", "points": "fraction", "s": "seconds", "MB": "bytes", "": "none"}
    comparable: dict[str, set[str]] = {}
    for column in COLUMNS:
        if column.better:
            comparable.setdefault(units.get(column.unit, column.unit), set()).add(column.key)
    assert listed == comparable
