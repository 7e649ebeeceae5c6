"""The figures of a report: what is drawn is what was, and nothing where nothing can be known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from flows.config.settings import ComparisonSection
from flows.metrics.outcome import outcome
from flows.metrics.prices import load_prices
from flows.records.record import Record
from flows.report import figures
from flows.report.figures import Drawing, accuracy_points, outages
from flows.report.html import open_study
from flows.report.study import Study, Trial, start
from flows.statistics import interval
from tests.support.records import with_values
from tests.support.synthetic import toy_events, write_experiment


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = write_experiment(tmp_path_factory.mktemp("results") / "demo")
    return open_study(folder, load_prices())[0]


@pytest.fixture(scope="module")
def drawn(study: Study) -> dict[str, Drawing]:
    return {each.name: each for each in figures.draw(study)}


def labelled(
    axis: str, labels: Sequence[str], values: Sequence[float], key: str = "accuracy_final"
) -> Study:
    """Return a study of two strategies along an axis with the given values, three seeds each."""
    trials = list[Trial]()
    for (strategy, (label, value)), seed in product(
        product(("none", "chain"), zip(labels, values, strict=True)), (0, 1, 2)
    ):
        record = Record(tuple(toy_events(strategy, "no fault", 0)))
        found = outcome(record, load_prices())
        own = replace(found.identity, labels={"recovery": strategy, axis: label}, seed=seed)
        found = with_values(found, **{key: value + 0.01 * seed})
        trials.append((record, replace(found, identity=own)))
    records, outcomes = zip(*trials, strict=True)
    section = ComparisonSection(metrics=(key,))
    return Study(outcomes, records, (), section)


def test_no_line_crosses_an_outage(study: Study) -> None:
    for trial in study.under("kill", "none"):
        x, y = np.array(accuracy_points(trial)).T
        [(began, until)] = outages(trial)
        zero = start(trial[0])
        inside = (x > began - zero) & (x < until - zero)
        assert np.isnan(y[inside]).any()
    quiet = study.under("no fault", "none")[0]
    assert not any(math.isnan(value) for _, value in accuracy_points(quiet))


def test_effects_have_the_mean_and_its_interval(study: Study, drawn: dict[str, Drawing]) -> None:
    data = drawn["effects"].data.set_index(["strategy", "effect"])
    rows = study.valid[study.valid["condition"] == "kill"]
    for strategy, group in rows.groupby("strategy"):
        row = data.loc[(strategy, "on average since the fault")]
        values = 100 * group["effect_time_mean"]
        assert row["effect on accuracy, points"] == pytest.approx(values.mean())
        assert row["n"] == len(values)
        assert pd.isna(row["low"]), "two seeds have no interval"


def test_recovery_times_agree_with_the_outcomes(study: Study, drawn: dict[str, Drawing]) -> None:
    data = drawn["recovery-time"].data
    seconds = "seconds since the fault"
    for strategy, group in data.groupby("strategy"):
        parts = group[group["part"] != "each outage"][seconds].sum()
        each = group[group["part"] == "each outage"][seconds]
        rows = study.valid[(study.valid["strategy"] == strategy) & study.valid["faults"].gt(0)]
        assert parts == pytest.approx(rows["rto_seconds"].mean())
        assert sorted(each) == pytest.approx(sorted(rows["rto_seconds"]))


@pytest.mark.parametrize(
    ("labels", "ticks"),
    [
        (["4 workers", "1 workers", "2 workers"], ["1", "2", "4"]),
        (["tau 0", "tau 8", "tau inf"], ["0", "8", "∞"]),
    ],
)
def test_numbers_are_drawn_in_their_order(labels: list[str], ticks: list[str]) -> None:
    study = labelled("training.workers", labels, [0.5, 0.6, 0.7])
    drawing = figures.sensitivity(study, "training.workers")
    assert drawing is not None
    axes = drawing.figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ticks
    assert axes.get_xlabel() == "workers"


def test_money_is_drawn_in_the_unit_of_its_title() -> None:
    study = labelled("faults", ["kill", "cut"], [0.0001, 0.0002], "cost_usd")
    drawing = figures.sensitivity(study, "faults")
    assert drawing is not None
    (panel,) = drawing.figure.axes
    assert panel.get_title() == "money, µUSD"
    highest = 1e6 * float(study.valid["cost_usd"].max())
    assert panel.get_ylim()[1] > 0.5 * highest


def test_means_along_an_axis_have_intervals_and_names_are_no_line() -> None:
    study = labelled("faults", ["kill", "cut", "pause"], [0.5, 0.6, 0.7])
    drawing = figures.sensitivity(study, "faults")
    assert drawing is not None
    row = drawing.data.set_index(["line", "faults"]).loc[("chain", "cut")]
    found = interval([0.6, 0.61, 0.62], np.random.default_rng(0))
    assert (row["mean"], row["low"], row["high"]) == pytest.approx(
        (found.mean, found.low, found.high)
    )
    lines = drawing.figure.axes[0].get_lines()
    assert {line.get_linestyle() for line in lines} <= {"None", "none", ""}
