"""Two runs, side by side: settings, figures and what their trials show."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from dps.errors import ConfigurationError
from flows.metrics.prices import load_prices
from flows.report.compare import check_comparable, compared, find_run, print_side_by_side
from tests.support.synthetic import write_experiment

PRICES = load_prices()


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
    check_comparable(runs)
    print_side_by_side(runs, console)
    return text_of(console)


def test_two_trials_are_shown_setting_by_setting_and_figure_by_figure(here: Path) -> None:
    text = side_by_side(here, "demo/none.kill.seed-0", "demo/chain.kill.seed-0")
    assert "recovery.durability.kind none chain" in text
    assert "training.updates" not in text
    assert "lost 317 0 −317" in text
    assert "status valid valid" in text


def test_trials_of_several_seeds_are_judged(here: Path) -> None:
    text = side_by_side(here, "demo/none.kill", "demo/chain.kill")
    assert "too few seeds" in text
    assert "difference" in text


def test_a_strategy_or_a_label_alone_stands_for_all_that_have_it(here: Path) -> None:
    chain, kill, quiet = (
        find_run(f"demo/{name}", here, PRICES) for name in ("chain", "kill", "no-fault")
    )
    conditions = {row.condition for row in compared([find_run("demo/none", here, PRICES), chain])}
    assert conditions >= {"kill", "no fault"}
    strategies = {done.outcome.identity.strategy for done in kill.trials}
    assert len(strategies) > 1
    assert {row.condition for row in compared([quiet, kill])} == strategies


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("demo", "demo", "named twice"),
        ("demo", "demo/chain.kill", "have no labels in common"),
        ("demo/chain.kil", "demo", "did you mean 'chain.kill'"),
        ("dmo", "demo", "did you mean 'demo'"),
    ],
)
def test_runs_that_cannot_be_compared(here: Path, first: str, second: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        side_by_side(here, first, second)
