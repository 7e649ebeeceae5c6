"""How fast a training went, and how old its weights were, on hand-made records."""

from __future__ import annotations

import pytest

from dps.events import Event, Reported
from flows.metrics.outcome import outcome
from flows.records.events import TrainingStarted
from flows.records.record import Record
from tests.support.records import PRICES, acked, applied, audited, restored, start


def computed(times: tuple[float, ...], seconds: tuple[float, ...], run: int = 1) -> Reported:
    steps = tuple(range(1, len(times) + 1))
    return Reported(times[-1], "w", run, "compute_seconds", times, steps, seconds)


def idle(*events: Event) -> float | None:
    return outcome(Record(events), PRICES).row()["idle_share"]


def test_a_worker_is_idle_while_it_does_not_compute() -> None:
    # From 10 to 14 it computed 0.5 + 1.5 s; the first step, with its loading, does not count.
    assert idle(computed((10.0, 12.0, 14.0), (9.0, 0.5, 1.5))) == pytest.approx(0.5)


def test_incarnations_are_apart_and_workers_are_weighed_by_their_time() -> None:
    first, second = computed((10.0, 12.0), (1.0, 2.0)), computed((50.0, 56.0), (1.0, 0.0), run=2)
    assert idle(first, second) == pytest.approx(6 / 8)


def together(*events: Event) -> float | None:
    return outcome(Record(events), PRICES).row()["gradients_together"]


def test_the_pace_of_all_leaves_out_when_some_are_not_at_work() -> None:
    early = [acked([i], t=10.0 + i, worker="early") for i in range(5)]  # until 14
    late = [acked([i], t=13.0 + i / 2, worker="late") for i in range(9)]  # from 13 on
    assert together(*early, *late) == pytest.approx(1 + 2)
    assert together(*early) == pytest.approx(1.0)
    assert together(*early, acked([1], t=20.0, worker="later")) is None
    assert together() is None


def test_goodput_counts_what_survives() -> None:
    record = Record(
        (
            TrainingStarted(10.0, 1, 1, 5),
            start(),
            applied([1, 2, 3, 4]),
            acked([1, 2, 3, 4], t=14.0),
            restored(2),
            audited(2),
        )
    )
    found = outcome(record, PRICES)
    assert found.row()["gradients_per_second"] == pytest.approx(1.0)
    assert found.row()["goodput"] == pytest.approx(0.5)
