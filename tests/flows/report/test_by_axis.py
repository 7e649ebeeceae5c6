"""Figures against a numeric axis: which axes are numbers, and that what is drawn is what was."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dps.events import ResourceSampled, TrainingStarted, TrialStarted
from flows.analysis.groups import in_order, strategies
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.analysis.resources import busiest, cores_used
from flows.records.record import Record
from flows.report.figures.by_axis import EQUAL_DISTANCES
from flows.report.figures.dataset import Trial
from flows.report.figures.figure import Drawing, write_files
from flows.report.figures.gallery import chapters
from flows.report.figures.numeric_axis import numeric_axes
from flows.report.html import write_report
from tests.support.synthetic import missed, toy_events, write_events

Labels = dict[str, str]


def grid(**axes: Sequence[str]) -> list[Labels]:
    """The labels of all combinations; "__" in the name of an axis is a dot."""
    keys = [key.replace("__", ".") for key in axes]
    return [dict(zip(keys, labels, strict=True)) for labels in product(*axes.values())]


# -- which axes are numbers --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "name", "values"),
    [
        (["1", "2", "16"], "batch size", [1, 2, 16]),
        (["16 workers", "1 worker", "2 workers"], "workers", [1, 2, 16]),
        (["tau inf", "tau 0", "tau 4"], "tau", [0, 4, float("inf")]),
        (["∞", "0.5", "-1"], "batch size", [-1, 0.5, float("inf")]),
        (["sgd learning_rate=1e-05", "sgd learning_rate=0.1", "sgd learning_rate=3"],
         "sgd learning_rate", [1e-5, 0.1, 3]),
    ],
)  # fmt: skip
def test_labels_that_say_numbers(labels: list[str], name: str, values: list[float]) -> None:
    (axis,) = numeric_axes(grid(training__batch_size=labels))
    assert axis.name == name
    assert list(axis.values.values()) == values
    assert sorted(axis.values) == sorted(labels)


@pytest.mark.parametrize(
    "labels",
    [
        ["none", "chain", "checkpoint"],
        ["1", "2", "many"],
        ["1", "2"],
        ["1 worker", "2 servers", "3 workers"],
        ["kill 1 at 2", "kill 1 at 3", "kill 1 at 4"],
        ["v1", "v2", "v3"],
        ["1", "1.0", "2"],
    ],
)
def test_labels_that_do_not(labels: list[str]) -> None:
    assert numeric_axes(grid(axis=labels)) == ()


def test_lines_are_told_apart_by_the_axes_that_do_not_vary_with_the_numbers() -> None:
    trials = [
        {"training.workers": w, "training.updates": u, "recovery": r, "server": "one"}
        for (w, u), r in product([("1", "40"), ("2", "80"), ("4", "160")], ["none", "chain"])
    ]
    (axis,) = numeric_axes(trials)
    assert (axis.key, axis.others) == ("training.workers", ("recovery",))
    assert [axis.line(labels) for labels in trials[:2]] == ["none", "chain"]


def test_two_numeric_axes_are_each_drawn() -> None:
    workers, shards = numeric_axes(grid(workers=["1", "2", "4"], shards=["1", "2", "3"]))
    assert (workers.others, shards.others) == (("shards",), ("workers",))


def test_infinity_and_magnitudes_are_drawn_at_equal_distances() -> None:
    (workers,) = numeric_axes(grid(axis=["1", "2", "4", "8", "16"]))
    (rates,) = numeric_axes(grid(axis=["1e-5", "1e-3", "0.1"]))
    (bounds,) = numeric_axes(grid(axis=["0", "1", "inf"]))
    assert list(workers.places.values()) == [1, 2, 4, 8, 16]
    assert list(rates.places.values()) == list(bounds.places.values()) == [0, 1, 2]
    assert [bounds.tick(label) for label in bounds.values] == ["0", "1", "∞"]


@pytest.mark.parametrize(
    ("labels", "doubles"),
    [
        (["1", "2", "4", "8", "16", "32", "64", "128"], True),
        (["1", "2", "4", "8"], False),
        (["1", "2", "3", "4", "5"], False),
        (["0", "1", "2", "4", "8"], False),
        (["1", "2", "4", "8", "inf"], False),
    ],
    ids=["doubled", "few", "even", "zero", "infinite"],
)
def test_an_axis_is_logarithmic_where_each_value_is_twice_the_one_before(
    labels: list[str], doubles: bool
) -> None:
    (axis,) = numeric_axes(grid(axis=labels))
    assert axis.doubles == doubles
    if doubles:
        assert list(axis.places.values()) == [float(label) for label in labels]


def test_strategies_come_in_the_order_of_their_numbers() -> None:
    assert in_order(["tau 16", "tau inf", "tau 0", "tau 2"]) == [
        "tau 0",
        "tau 2",
        "tau 16",
        "tau inf",
    ]
    assert in_order(["b 2", "a", "b 1"]) == ["b 2", "a", "b 1"]
    assert in_order([]) == []
    records = [record(0, {"training.workers": n}, int(n)) for n in ("8", "2", "16")]
    assert strategies([outcome(r, load_prices()) for r in records]) == ("2", "8", "16")


def test_records_of_different_experiments_have_no_axis_in_common() -> None:
    assert numeric_axes([*grid(axis=["1", "2", "3"]), {"other": "4"}]) == ()
    assert numeric_axes([]) == ()


# -- what is drawn -----------------------------------------------------------------------------


def record(seed: int, labels: Labels, workers: int, valid: bool = True) -> Record:
    """A record of a toy training, said to be of these labels and so many workers."""
    events = toy_events("none", "no fault", seed % 2)
    assert isinstance(events[0], TrialStarted)
    config = dict(events[0].settings["config"])
    told: dict[str, Any] = {
        **events[0].settings,
        "trial": f"{'-'.join(labels.values())}.{seed}".replace(" ", "-"),
        "labels": labels,
        "seed": seed,
        "config": {**config, "training": {**config["training"], "workers": workers}},
    }
    events[0] = replace(events[0], settings=told)
    return Record(tuple(events if valid else missed(events)))


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    prices = load_prices()
    records = [
        record(seed, {"training.workers": str(w), "recovery": r}, w, valid=(w, r) != (4, "chain"))
        for seed, w, r in product([0, 1, 2], [1, 2, 4], ["none", "chain"])
    ]
    return [(r, outcome(r, prices)) for r in records]


@pytest.fixture(scope="module")
def drawn(trials: list[Trial]) -> dict[str, Drawing]:
    (chapter,) = (c for c in chapters(trials) if c.name.startswith("against"))
    assert chapter.title == "Against workers"
    return {drawing.name.partition("-against-")[0]: drawing for drawing in chapter.drawings}


def rows(drawing: Drawing) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(drawing.csv)))


@pytest.mark.slow
def test_each_trial_and_the_means_are_drawn(drawn: dict[str, Drawing], trials: list[Trial]) -> None:
    pace = drawn["gradients-together"]
    rates = {
        (o.identity.strategy, o.identity.labels["training.workers"], str(o.identity.seed)): (
            o.pace.together or 0.0
        )
        for _, o in trials
        if o.valid
    }
    dots = {(r["line"], r["workers"], r["seed"]): r["gradients per second"] for r in rows(pace)}
    for place, rate in rates.items():
        assert float(dots[place]) == pytest.approx(rate, rel=1e-5)
    (mean,) = (
        r for r in rows(pace) if (r["line"], r["workers"], r["seed"]) == ("none", "2", "mean")
    )
    three = [rates["none", "2", seed] for seed in "012"]
    assert float(mean["gradients per second"]) == pytest.approx(sum(three) / 3, rel=1e-5)
    assert float(mean["low"]) < min(three) <= max(three) < float(mean["high"])
    assert not any((r["line"], r["workers"]) == ("chain", "4") for r in rows(pace)), "not valid"
    assert pace.note.endswith("the shorter a training is.")


def test_workers_are_compared_with_what_grows_in_proportion(drawn: dict[str, Drawing]) -> None:
    linear = [r for r in rows(drawn["gradients-together"]) if r["line"] == "linear"]
    one, two, four = (float(r["gradients per second"]) for r in linear)
    assert [two, four] == pytest.approx([2 * one, 4 * one], rel=1e-5)
    shares = {
        (r["line"], r["workers"], r["seed"]): r["efficiency"] for r in rows(drawn["efficiency"])
    }
    for seed in "012":  # the toy training has the same pace whatever the number
        assert float(shares["none", "1", seed]) == pytest.approx(1.0)
        assert float(shares["none", "4", seed]) == pytest.approx(0.25)


@pytest.mark.slow
def test_a_mean_is_not_drawn_where_a_trial_has_no_value(trials: list[Trial]) -> None:
    """The toy trials have no target; here two of three reach one."""
    reached = [
        (r, replace(o, target=replace(o.target, seconds=s if o.identity.seed else None)))
        for (r, o), s in zip(trials, range(1, 100), strict=False)
    ]
    (chapter,) = (c for c in chapters(reached) if c.name.startswith("against"))
    (target,) = (d for d in chapter.drawings if d.name.startswith("target-seconds"))
    seeds = {r["seed"]: r["seconds to the target"] for r in rows(target) if r["line"] == "none"}
    assert seeds["mean"] == ""
    assert set(seeds) == {"1", "2", "mean"}


def test_what_no_trial_has_is_not_drawn(drawn: dict[str, Drawing]) -> None:
    assert not drawn.keys() & {"target-seconds", "rto-seconds"}
    assert {"idle-share", "staleness-p99", "staleness-median"} <= drawn.keys()


def test_what_is_nothing_in_every_trial_is_not_drawn(drawn: dict[str, Drawing]) -> None:
    assert "updates-lost" not in drawn


def test_another_number_than_that_of_workers_has_no_efficiency() -> None:
    records = [record(0, {"consistency": f"tau {tau}"}, 2) for tau in ("0", "1", "inf")]
    found = [(r, outcome(r, load_prices())) for r in records]
    (chapter,) = (c for c in chapters(found) if c.name.startswith("against"))
    assert chapter.title == "Against tau"
    assert not any(drawing.name.startswith("efficiency") for drawing in chapter.drawings)
    assert all(drawing.note.endswith(EQUAL_DISTANCES) for drawing in chapter.drawings)


@pytest.mark.slow
def test_the_report_has_them(tmp_path: Path, trials: list[Trial]) -> None:
    for recorded, found in trials[:6]:
        write_events(tmp_path / "grid" / found.identity.trial, list(recorded.events))
    page = write_report(tmp_path / "grid", tmp_path / "report.html").read_text()
    assert 'id="against-training-workers"' in page
    assert "Efficiency against workers" in page
    told = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))
    labels = dict.fromkeys(found.identity.labels["training.workers"] for _, found in trials[:6])
    assert (told["workers"], told["gradients"]) == (", ".join(labels), "800")


def test_they_are_written_as_files(tmp_path: Path, drawn: dict[str, Drawing]) -> None:
    write_files([drawn["efficiency"]], tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        f"efficiency-against-training-workers.{e}" for e in ("svg", "pdf", "png", "csv")
    }


# -- how busy processes are --------------------------------------------------------------------


def sampled(t: float, node: str, pid: int, cpu: float) -> ResourceSampled:
    role = node.partition("-")[0]
    return ResourceSampled(t, node, role, pid, cpu, 0, {}, {}, 0)


def test_processor_time_is_that_of_the_training() -> None:
    busy = Record(
        (
            sampled(0.0, "server-0", 1, 1.0),
            sampled(9.0, "server-0", 1, 3.0),  # its start is no part of the training
            sampled(9.5, "server-1", 2, 1.0),
            TrainingStarted(10.0, 1, 2, 5),
            sampled(11.0, "worker-0", 3, 2.0),
            sampled(13.0, "server-0", 1, 5.0),
            sampled(13.5, "server-1", 2, 4.0),
            sampled(13.0, "worker-0", 3, 2.5),
        )
    )
    assert busiest(busy) == pytest.approx(0.75)
    assert cores_used(busy) == pytest.approx(0.5 + 0.75 + 0.25)
    assert busiest(Record(())) is None
    assert cores_used(Record(())) is None
