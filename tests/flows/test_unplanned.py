"""Losses that no fault asked for make a trial invalid."""

from __future__ import annotations

import pytest

from dps.events import (
    Detected,
    Disturbed,
    Event,
    Killed,
    TrainingStarted,
    TrialEnded,
    TrialStarted,
    WorkerJoined,
    WorkerLeft,
)
from flows.outcome import outcome
from flows.record import Record
from flows.unplanned import first_unplanned
from tests.flows.records import PRICES, acked

KILLED = Killed(20.0, 0, "server-0", 1, 50, True)


def record(*events: Event) -> Record:
    within = [
        TrialStarted(0.0, "a", {"trial": "a"}, {}),
        TrainingStarted(10.0, 1, 1, 100),
        WorkerJoined(10.0, "worker-0", 1, "worker-0-b"),
        *events,
        acked([1], t=60.0),
        TrialEnded(70.0, "valid", ""),
    ]
    return Record(tuple(sorted(within, key=lambda event: event.t)))


def lost(node: str, t: float = 30.0) -> Detected:
    return Detected(t, 0, 1, node, True, "lease")


def test_a_control_that_lost_a_node_is_none() -> None:
    done = outcome(record(lost("replica-0-1")), PRICES)
    assert done.status == "invalid"
    assert "replica-0-1 was given up 20.0 s after the start though no fault" in done.reason


@pytest.mark.parametrize(
    "events",
    [
        pytest.param((KILLED, lost("server-0")), id="killed before"),
        pytest.param((lost("server-0", 65.0),), id="after the training"),
        pytest.param((lost("server-0", 5.0),), id="before the training"),
        pytest.param(
            (Disturbed(20.0, 0, "cut", "server-0", 5, "", True), lost("server-1")),
            id="beyond a cut",
        ),
        pytest.param((WorkerLeft(30.0, "worker-0", 1, "finished"),), id="a worker that was done"),
        pytest.param((WorkerLeft(30.0, "worker-7", 1, "lost"),), id="from before a resumption"),
    ],
)
def test_what_was_asked_for_is_none(events: tuple[Event, ...]) -> None:
    assert first_unplanned(record(*events)) is None


@pytest.mark.parametrize(
    "events",
    [
        pytest.param((KILLED, lost("server-1")), id="another node than the killed one"),
        pytest.param((KILLED, lost("server-0", 15.0)), id="before the kill"),
        pytest.param(
            (Disturbed(20.0, 0, "slow", "server-0", 5, "", True), lost("server-1")), id="slow"
        ),
    ],
)
def test_what_no_fault_struck_is(events: tuple[Event, ...]) -> None:
    assert first_unplanned(record(*events)) is not None


def test_a_worker_is_told_by_its_node() -> None:
    found = first_unplanned(record(WorkerLeft(30.0, "worker-0", 1, "lost")))
    assert found is not None
    assert found.node == "worker-0-b"
