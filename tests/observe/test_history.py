"""The history of a training: what is kept of it, and what is left out when there is too much."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from dps import (
    SGD,
    Adam,
    Clipped,
    Cosine,
    Momentum,
    PerArray,
    Scheduled,
    StalenessAware,
    WarmUp,
    WeightDecay,
)
from dps.core.rules.rule import UpdateRule
from dps.events import Acked, Evaluated, Reported
from dps.observe.history import History, Number


def reported(
    worker: str,
    steps: Sequence[int],
    metric: str = "loss",
    incarnation: int = 1,
    versions: Sequence[int] = (),
) -> Reported:
    times, values = tuple(map(float, steps)), tuple(1.0 / step for step in steps)
    who = worker, incarnation, metric
    return Reported(times[-1], *who, times, tuple(steps), values, tuple(versions))


def test_the_table_has_a_row_for_each_number_in_the_order_of_time() -> None:
    history = History()
    history.add(reported("worker-1", range(2, 4)))
    history.add(reported("worker-0", range(1, 3), versions=[10, 14]))
    history.add(Evaluated(2.5, 12.4, 0.5, 0.9))
    history.add(Acked(1.0, "worker-0", 1, (1.0,), (0,), (1,), (1,), ("applied",)))
    frame = history.frame()
    names = ["time", "source", "incarnation", "metric", "step", "value", "report", "learning_rate"]
    assert list(frame.columns) == names
    assert frame["time"].is_monotonic_increasing
    assert str(frame["time"].dt.tz) == "UTC"
    assert frame["time"][0] == pd.Timestamp(1.0, unit="s", tz="UTC")
    of_worker = frame[frame["source"] == "worker-0"]
    np.testing.assert_array_equal(of_worker["step"], [10, 14])
    np.testing.assert_array_equal(of_worker["report"], [1, 2])
    assert set(frame[frame["source"] == "worker-1"]["step"]) == {-1}, "it had read nothing"
    np.testing.assert_array_equal(of_worker["value"], [1.0, 0.5])
    scores = frame[frame["source"] == "evaluator"].set_index("metric")["value"]
    assert scores.to_dict() == {"loss": 0.5, "accuracy": 0.9}
    of_evaluator = frame[frame["source"] == "evaluator"]
    assert (set(of_evaluator["step"]), set(of_evaluator["report"])) == ({12}, {0})


def test_a_number_that_is_none_leaves_the_history_as_it_was() -> None:
    history = History()
    history.add(Evaluated(1.0, 12.0, 0.5, 0.9))
    with pytest.raises(ValueError, match="good"):
        history.add(Evaluated(2.0, 13.0, "good", 0.9))  # type: ignore[arg-type]
    assert history.frame()["value"].tolist() == [0.5, 0.9]


def test_the_learning_rate_is_that_of_the_schedule_at_each_version() -> None:
    schedule = WarmUp(4, Cosine(40, least=0.1), start=0.2)
    versions = [-1, *range(0, 58, 2)]
    history = History(StalenessAware(Scheduled(Momentum(0.5), schedule)))
    history.add(reported("worker-0", range(1, 31), versions=versions))
    history.add(Evaluated(2.5, 12.4, 0.5, 0.9))
    frame = history.frame()
    found = frame[frame["source"] == "worker-0"]["learning_rate"].to_numpy()
    assert np.isnan(found[0]), "nothing was given to it by then"
    expected = [0.5 * schedule.factor(version) for version in versions[1:]]
    assert len(set(expected)) > 20
    np.testing.assert_array_equal(found[1:], expected)
    scores = frame[frame["source"] == "evaluator"]["learning_rate"]
    assert scores.tolist() == [0.5 * schedule.factor(12)] * 2


@pytest.mark.parametrize(
    ("rule", "rate"),
    [
        (SGD(0.25), 0.25),
        (Clipped(WeightDecay(Adam(0.125), 0.1), norm=1.0), 0.125),
        (PerArray((("w", SGD(0.5)), ("*", Adam(0.1)))), math.nan),
        (None, math.nan),
    ],
    ids=["a rule", "rules within rules", "rules by names", "none"],
)
def test_the_learning_rate_of_what_has_no_schedule(rule: UpdateRule | None, rate: float) -> None:
    history = History(rule)
    history.add(reported("worker-0", range(1, 4), versions=[0, 7, 9]))
    np.testing.assert_array_equal(history.frame()["learning_rate"], [rate] * 3)


def test_a_long_history_is_thinned_evenly_and_ends_with_the_last_number() -> None:
    history, limit = History(limit=1000), 1000
    for begin in range(1, 10_000, 50):
        history.add(reported("worker-0", range(begin, begin + 50)))
    history.add(reported("worker-1", range(1, 11)))
    frame = history.frame()
    long = frame[frame["source"] == "worker-0"]["report"].to_numpy()
    assert limit / 2 - 10 <= len(long) <= limit
    assert long[0] == 1
    assert long[-1] == 10_000
    assert len(set(np.diff(long[:-1]))) == 1
    assert len(frame[frame["source"] == "worker-1"]) == 10  # short ones keep all they have


def test_the_last_numbers_are_those_of_the_last_incarnation() -> None:
    history = History()
    history.add(reported("worker-0", range(1, 5), incarnation=2))
    history.add(reported("worker-0", range(1, 3), incarnation=1))
    history.add(reported("worker-0", range(1, 2), metric="lr", incarnation=1))
    assert history.last("worker-0") == {"loss": 0.25, "lr": 1.0}
    assert history.last("worker-1") == {}


def test_whoever_listens_is_told_of_what_was_before() -> None:
    history = History()
    history.add(reported("worker-0", range(1, 3)))
    heard: list[Number] = []

    def listen(numbers: Sequence[Number]) -> None:
        heard.extend(numbers)

    history.listen(listen)
    history.add(reported("worker-0", range(3, 4)))
    history.unlisten(listen)
    history.add(reported("worker-0", range(4, 5)))
    assert [number.report for number in heard] == [1, 2, 3]
