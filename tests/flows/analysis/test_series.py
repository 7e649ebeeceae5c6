"""The learning rate among the series of a trial."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dps.events import Applied, Event, Restored, TrialStarted
from flows.analysis.series import LEARNING_RATE, Point, series
from flows.records.record import Record
from tests.support.records import applied
from tests.support.synthetic import toy_events

RATE = 0.4
COSINE = {"kind": "cosine", "updates": 500, "least": 0.1}
WARM_UP = {"kind": "warm_up", "updates": 100, "then": {"kind": "step", "every": 150, "by": 0.5}}


def cosine(done: int) -> float:
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 500) / 500)) / 2


def warm_up(done: int) -> float:
    return float(done / 100 if done < 100 else 0.5 ** ((done - 100) // 150))


def rates(events: list[Event], schedule: dict[str, Any] | None) -> list[Point]:
    """The points of learning rates in the record of a trial with such a schedule."""
    started = events[0]
    assert isinstance(started, TrialStarted)
    optimizer: dict[str, Any] = {"kind": "sgd", "learning_rate": RATE}
    if schedule is not None:
        optimizer["schedule"] = schedule
    config = {**started.settings["config"], "optimizer": optimizer}
    started = replace(started, settings={**started.settings, "config": config})
    found = series(Record((started, *events[1:])))
    return [point for point in found if point.name.startswith(LEARNING_RATE)]


@pytest.mark.parametrize(
    ("schedule", "factor"), [(COSINE, cosine), (WARM_UP, warm_up)], ids=["cosine", "warm-up"]
)
def test_it_follows_the_versions_also_back_after_a_recovery(
    schedule: dict[str, Any], factor: Any
) -> None:
    events = toy_events("none")
    heads = [event for event in events if isinstance(event, Applied) and event.head]
    rows = sorted(
        (t, event.shard, version)
        for event in heads
        for t, version in zip(event.times, event.versions, strict=True)
    )
    assert any(
        event.version == 0 and event.epoch > 1 for event in events if type(event) is Restored
    )
    points = [point for point in rates(events, schedule) if point.name == LEARNING_RATE]
    assert len(points) > 10
    fell_back = False
    before: dict[int, int] = {}
    for point in points:
        versions = {shard: version for t, shard, version in rows if t <= point.t}
        fell_back |= any(versions[shard] < before.get(shard, 0) for shard in versions)
        before = versions
        expected = [RATE * factor(version - 1) for version in versions.values()]
        assert point.value == pytest.approx(sum(expected) / len(expected))
    assert fell_back, "no shard went back: nothing of a recovery was checked"


def test_shards_have_points_of_their_own_only_where_they_differ() -> None:
    points = rates(toy_events("none"), COSINE)
    mean = {point.t: point.value for point in points if point.name == LEARNING_RATE}
    own: dict[float, list[float]] = {}
    for point in points:
        if point.name != LEARNING_RATE:
            own.setdefault(point.t, []).append(point.value)
    assert own, "after the loss of one shard, the other one is ahead"
    assert len(own) < len(mean), "before it they go alike"
    for t, values in own.items():
        assert max(values) > 1.01 * min(values)
        assert mean[t] == pytest.approx(sum(values) / len(values))


def test_versions_are_the_last_ones_though_batches_come_late() -> None:
    """What a lost head had applied may be reported after what its successor has."""
    record = Record((applied([6], t=10.2, epoch=2), applied([5], t=10.0)))
    found = [(point.t, point.value) for point in series(record) if point.name == "server/updates"]
    assert found == [(10.2, 6)]


def test_without_a_schedule_there_is_none() -> None:
    assert rates(toy_events("none"), None) == []


def test_a_rule_that_is_not_installed_here_has_none() -> None:
    events = toy_events("none")
    assert rates(events, {"kind": "of-another-package"}) == []
