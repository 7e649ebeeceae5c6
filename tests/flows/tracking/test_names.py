"""What tracked runs are sorted by, and which figures are compared first, without a store."""

from __future__ import annotations

from dataclasses import replace

from flows.analysis.outcome import Identity, outcome
from flows.analysis.prices import load_prices
from flows.metrics import COLUMNS
from flows.records.record import Record
from flows.tracking.names import named
from flows.tracking.tracker import _order
from tests.support.synthetic import toy_events

CHAIN = outcome(Record(tuple(toy_events("chain", "kill"))), load_prices())


def test_trials_have_the_order_of_their_seeds_as_numbers() -> None:
    """MLflow sorts tags as texts."""
    seeds = [0, 2, 10, 99, 100, 2_147_483_647]
    trials = [replace(CHAIN.identity, seed=seed) for seed in seeds]
    mixed = [trials[place] for place in (3, 0, 5, 2, 1, 4)]
    assert sorted(mixed, key=_order) == trials


def test_within_a_seed_the_strategies_of_a_condition_stand_beside_each_other() -> None:
    def places(trials: list[Identity]) -> list[tuple[str, str]]:
        return [(each.condition, each.strategy) for each in trials]

    same = [
        replace(CHAIN.identity, labels={"recovery": strategy, "faults": condition})
        for strategy in ("chain", "none")
        for condition in ("kill", "no fault")
    ]
    assert places(sorted(same, key=_order)) == sorted(places(same))


def test_each_figure_has_one_name_but_money_which_is_to_be_compared_in_millionths() -> None:
    row = CHAIN.row()
    found = dict(named(COLUMNS, row))
    assert found["compare/accuracy_final"] == row["accuracy_final"]
    assert found["compare/cost_micro_usd"] == 1e6 * row["cost_usd"]
    assert found["trial/cost/usd"] == row["cost_usd"]
    told = [each for each in COLUMNS if each.metric is not None and row[each.key] is not None]
    assert len(found) == len(told) + 1
