"""Maps of who wins where: planted winners, what is hatched, and when there is a map at all."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from scipy import stats

from flows.analysis.learning import Target
from flows.metrics.score import SCORES
from flows.report.figures.dataset import Subject, Trial
from flows.report.figures.figure import Drawing
from flows.report.figures.numeric_axis import numeric_axes
from flows.report.figures.style import looks
from flows.report.figures.winners import _apart, difference, maps
from tests.flows.report.figures.support import labelled, trials

WORKERS, OUTAGES, SEEDS = (1, 2, 4), (0, 1, 2), (0, 1, 2)
NOISE = {0: -0.001, 1: 0.0, 2: 0.001}


def planted(strategy: str, workers: int, outage: int, seed: int) -> float:
    """Chain is a point per worker better, less 2 points for each unit of outage."""
    if strategy == "chain":
        noise = 0.2 * (seed - 1) if (workers, outage) == (2, 0) else NOISE[seed]
        return 0.8 + 0.01 * workers - 0.02 * outage + noise
    return 0.8 if strategy == "checkpoint" else 0.75


def grid(strategies: tuple[str, ...] = ("checkpoint", "chain")) -> list[Trial]:
    [toy] = trials(("chain",), ("no fault",), (0,))
    return [
        labelled(
            toy,
            {
                "recovery": strategy,
                "training.workers": f"{workers} workers",
                "faults": f"outage {outage}",
            },
            seed,
            final=planted(strategy, workers, outage, seed),
        )
        for strategy, workers, outage, seed in product(strategies, WORKERS, OUTAGES, SEEDS)
    ]


def drawn(found: list[Trial], smallest: dict[str, float] | None = None) -> dict[str, Drawing]:
    subject = Subject.of(found)
    axes = numeric_axes([outcome.identity.labels for _, outcome in subject.trials])
    return {drawing.name: drawing for drawing in maps(subject, axes, smallest)}


def hatched(drawing: Drawing) -> set[tuple[int, int]]:
    patches = drawing.figure.axes[0].patches
    return {
        (int(patch.get_x()), int(patch.get_y()))
        for patch in patches
        if isinstance(patch, Rectangle) and patch.get_hatch()
    }


def test_cells_that_are_not_resolved_are_hatched() -> None:
    winners = drawn(grid())["winners-accuracy-final-training-workers-faults"]
    # By column and row: 2 workers without an outage; and where both effects are equal.
    assert hatched(winners) == {(1, 0), (1, 1), (2, 2)}


def test_of_three_strategies_the_best_of_each_cell_is_shown() -> None:
    found = drawn(grid(("none", "checkpoint", "chain")))
    winners = found["winners-accuracy-final-training-workers-faults"]
    best = {row[:2]: row[2] for row in winners.table.rows}
    assert best["4", "0"] == "chain"
    assert best["1", "2"] == "checkpoint"


def test_who_is_ahead_by_less_than_is_told_is_not_called_the_best() -> None:
    def nearly(trial: Trial) -> Trial:
        """Without an outage chain is ahead by a hundredth of a point, else equal."""
        record, found = trial
        ahead = found.identity.strategy == "chain" and found.identity.labels["faults"] == "outage 0"
        if found.identity.strategy == "none":
            return trial
        final = 0.8 + (0.0001 if ahead else 0.0) + NOISE[found.identity.seed or 0]
        return record, replace(found, accuracy=replace(found.accuracy, final=final))

    found = drawn([nearly(trial) for trial in grid(("none", "checkpoint", "chain"))])
    winners = found["winners-accuracy-final-training-workers-faults"]
    assert {row[2] for row in winners.table.rows} == {"equal"}
    assert "less than 0.05 points apart" in " ".join(winners.figure.get_supxlabel().split())
    [legend] = winners.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["equal"]


def test_a_claim_says_from_which_difference_on_one_is_the_best() -> None:
    found = drawn(grid(("none", "checkpoint", "chain")), smallest={"accuracy_final": 0.015})
    winners = found["winners-accuracy-final-training-workers-faults"]
    best = {row[:2]: row[2] for row in winners.table.rows}
    assert best["1", "0"] == "equal"  # a point apart
    assert best["2", "0"] == "chain"  # two points apart
    assert "less than 1.5 points apart" in " ".join(winners.figure.get_supxlabel().split())


def test_the_best_have_their_numbers_of_nodes_and_a_colour_each() -> None:
    winners = drawn(grid(("none", "checkpoint", "chain")))[
        "winners-accuracy-final-training-workers-faults"
    ]
    [legend] = winners.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert all(re.fullmatch(r"(checkpoint|chain) \(\d\)|equal", name) for name in names), names
    many = looks(["stateless", *"abcdefghi"])
    assert many["stateless"].colour in {many[name].colour for name in "abcdefghi"}
    apart = _apart(many, list(many)[:7])
    assert len({apart[name].colour for name in list(many)[:7]}) == 7


def outages(virtual: str) -> dict[str, Drawing]:
    def moved(trial: Trial) -> Trial:
        record, found = trial
        labels = found.identity.labels
        named = {
            "recovery": labels["recovery"],
            "faults": "mtbf " + labels["training.workers"].removesuffix(" workers"),
            "faults.*.back_after": labels["faults"],
        }
        return record, replace(
            found, virtual=virtual, identity=replace(found.identity, labels=named)
        )

    return drawn([moved(trial) for trial in grid()])


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("cluster-25gbit", "the start of a node comes on top, 1.5 s"),
        ("", "the start of a node comes on top"),
    ],
    ids=["virtual", "real"],
)
def test_axes_have_units_and_an_outage_is_longer_by_the_start_of_a_node(
    profile: str, said: str
) -> None:
    found = outages(profile)
    [drawing] = [each for name, each in found.items() if "accuracy-final" in name]
    axes = drawing.figure.axes[0]
    assert axes.get_xlabel() == "mean time between failures, s"
    assert axes.get_ylabel().split() == ["fresh", "node", "asked", "for", "after,", "s"]
    assert drawing.table.columns[:2] == (axes.get_xlabel(), "fresh node asked for after, s")
    assert " ".join(drawing.figure.get_supxlabel().split()).endswith(said)


def test_less_of_rmse_wins_and_is_told_in_its_own_unit() -> None:
    def by_rmse(trial: Trial) -> Trial:
        return trial[0], replace(trial[1], score=SCORES["rmse"])

    found = drawn([by_rmse(trial) for trial in grid(("none", "checkpoint", "chain"))])
    winners = found["winners-accuracy-final-training-workers-faults"]
    best = {row[:2]: row[2] for row in winners.table.rows}
    assert best == dict.fromkeys(best, "none")
    assert winners.title == "Best final RMSE"


def test_the_table_of_the_best_has_every_strategy_with_its_interval() -> None:
    found = drawn(grid(("none", "checkpoint", "chain")))
    rows = found["winners-accuracy-final-training-workers-faults"].table.rows
    assert len(rows) == 9 * 3
    [chain] = [row for row in rows if row[:2] == ("2", "0") and row[4] == "chain"]
    values = [planted("chain", 2, 0, seed) for seed in SEEDS]
    bounds = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert chain[5:] == pytest.approx((np.mean(values), *bounds, 3))


def test_who_did_not_reach_a_target_in_every_seed_is_not_the_best() -> None:
    def reached(trial: Trial) -> Trial:
        """Chain is the fastest where it reaches the target, which it does in two seeds."""
        record, found = trial
        strategy, seed = found.identity.strategy, found.identity.seed
        seconds = {"chain": None if seed == 2 else 1.0, "checkpoint": 5.0}.get(strategy, 9.0)
        return record, replace(found, target=Target(0.8, seconds, None))

    found = drawn([reached(trial) for trial in grid(("none", "checkpoint", "chain"))])
    rows = found["winners-target-seconds-training-workers-faults"].table.rows
    assert {row[2] for row in rows} == {"checkpoint"}


def test_a_map_takes_two_numeric_axes_and_two_strategies() -> None:
    [toy] = trials(("chain",), ("no fault",), (0,))
    one_axis = [
        labelled(toy, {"recovery": s, "training.workers": str(w)}, 0, final=0.5)
        for s, w in product(("none", "chain"), WORKERS)
    ]
    assert drawn(one_axis) == {}
    assert drawn(grid(("chain",))) == {}


def test_too_few_seeds_resolve_nothing_and_equal_values_are_equal() -> None:
    found = difference({0: 1.0, 1: 2.0, 9: 5.0}, {0: 0.5, 1: 1.0})
    assert found is not None
    assert (found.mean, found.resolved) == (0.75, False)
    assert difference({0: 1.0}, {1: 1.0}) is None
    same = difference({0: 0.1 + 0.2, 1: 1.0, 2: 2.0}, {0: 0.3, 1: 1.0, 2: 2.0})
    assert same is not None
    assert (same.mean, same.resolved) == (0.0, False)
