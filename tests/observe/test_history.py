"""The history of a training: what is kept of it, and what is left out when there is too much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dps.events import Acked, Evaluated, Reported
from dps.observe.history import History, Number


def reported(worker: str, steps: range, metric: str = "loss", incarnation: int = 1) -> Reported:
    times, values = tuple(map(float, steps)), tuple(1.0 / step for step in steps)
    return Reported(times[-1], worker, incarnation, metric, times, tuple(steps), values)


def test_the_table_has_a_row_for_each_number_in_the_order_of_time() -> None:
    history = History()
    history.add(reported("worker-1", range(2, 4)))
    history.add(reported("worker-0", range(1, 3)))
    history.add(Evaluated(2.5, 12.4, 0.5, 0.9))
    history.add(Acked(1.0, "worker-0", 1, (1.0,), (0,), (1,), (1,), ("applied",)))
    frame = history.frame()
    assert list(frame.columns) == ["time", "source", "incarnation", "metric", "step", "value"]
    assert frame["time"].is_monotonic_increasing
    assert str(frame["time"].dt.tz) == "UTC"
    assert frame["time"][0] == pd.Timestamp(1.0, unit="s", tz="UTC")
    of_worker = frame[frame["source"] == "worker-0"]
    np.testing.assert_array_equal(of_worker["step"], [1, 2])
    np.testing.assert_array_equal(of_worker["value"], [1.0, 0.5])
    scores = frame[frame["source"] == "evaluator"].set_index("metric")["value"]
    assert scores.to_dict() == {"loss": 0.5, "accuracy": 0.9}
    assert set(frame[frame["source"] == "evaluator"]["step"]) == {12}


def test_an_empty_table_has_the_same_columns_and_types() -> None:
    full = History()
    full.add(reported("worker-0", range(1, 3)))
    pd.testing.assert_series_equal(
        History().frame().dtypes.drop(["source", "metric"]),
        full.frame().dtypes.drop(["source", "metric"]),
    )


def test_a_long_history_is_thinned_evenly_and_ends_with_the_last_number() -> None:
    history, limit = History(limit=1000), 1000
    for begin in range(1, 10_000, 50):
        history.add(reported("worker-0", range(begin, begin + 50)))
    history.add(reported("worker-1", range(1, 11)))
    frame = history.frame()
    long = frame[frame["source"] == "worker-0"]["step"].to_numpy()
    assert limit / 2 - 10 <= len(long) <= limit
    assert long[0] == 1
    assert long[-1] == 10_000
    assert len(set(np.diff(long[:-1]))) == 1
    assert len(frame[frame["source"] == "worker-1"]) == 10  # short ones keep all they have


def test_names_without_end_do_not_fill_the_memory() -> None:
    history = History(limit=100)
    for number in range(1000):
        history.add(reported("worker-0", range(1, 2), metric=f"loss {number}"))
    found = history.numbers()
    assert len(found) == 100
    assert found[-1].metric == "loss 999"


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
    assert [number.step for number in heard] == [1, 2, 3]
