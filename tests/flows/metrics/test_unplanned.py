"""Losses that no fault asked for make a trial invalid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dps.events import (
    Detected,
    Disturbed,
    Evaluated,
    EvaluationMissed,
    Event,
    Killed,
    NodeJoined,
    Paused,
    Resumed,
    Undisturbed,
    WorkerJoined,
    WorkerLeft,
)
from flows.metrics.faults import first_unplanned
from flows.metrics.outcome import outcome
from flows.records.events import TrainingStarted, TrialEnded, TrialStarted
from flows.records.record import Record
from tests.support.records import PRICES, acked

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
    assert "replica-0-1 was evicted 20.0 s after the start, without a planned" in done.reason


def test_a_process_that_ended_by_itself_is_no_busy_machine() -> None:
    crashed = Detected(30.0, 0, 1, "server-0", True, "scheduler")
    done = outcome(record(crashed), PRICES)
    assert done.status == "failed"
    assert "without a planned fault: its process ended" in done.reason


@pytest.mark.parametrize(
    ("reason", "status"), [("lost", "failed"), ("silent", "invalid"), ("finished", "valid")]
)
def test_a_workers_end_and_its_silence_are_told_apart(reason: str, status: str) -> None:
    assert outcome(record(WorkerLeft(30.0, "worker-0", 1, reason)), PRICES).status == status


BEGUN = Disturbed(20.0, 0, "cut", "worker-0-b", 5, "", True)
ENDED = Undisturbed(20.5, 0, "worker-0-b", "")
STOPPED, CONTINUED = Paused(20.0, 0, "server-1", 1, 5, True), Resumed(20.2, 0, "server-1", 1, True)


@pytest.mark.parametrize(
    ("events", "asked_for"),
    [
        pytest.param((KILLED, lost("server-0")), True, id="killed before"),
        pytest.param((lost("server-0", 65.0),), True, id="after the training"),
        pytest.param((lost("server-0", 5.0),), True, id="before the training"),
        pytest.param((WorkerLeft(30.0, "worker-7", 1, "silent"),), True, id="before a resumption"),
        pytest.param((KILLED, lost("server-1")), False, id="another node than the killed one"),
        pytest.param((KILLED, lost("server-0", 15.0)), False, id="before the kill"),
        pytest.param((replace(BEGUN, kind="slow"), lost("server-1")), False, id="only slow"),
        pytest.param((BEGUN, ENDED, lost("server-1", 22.0)), True, id="just after a cut"),
        pytest.param((BEGUN, ENDED, lost("server-1", 50.0)), False, id="long after a cut"),
        pytest.param((BEGUN, lost("server-1", 50.0)), True, id="in a cut that does not end"),
        pytest.param((STOPPED, CONTINUED, lost("server-1", 21.5)), True, id="just after a pause"),
        pytest.param((STOPPED, CONTINUED, lost("server-1", 50.0)), False, id="long after a pause"),
    ],
)
def test_a_loss_is_explained_by_a_fault_that_struck_it_and_is_not_over(
    events: tuple[Event, ...], asked_for: bool
) -> None:
    assert (first_unplanned(record(*events)) is None) == asked_for


EVALUATOR = NodeJoined(5.0, "evaluator", "evaluator", 7, "here")


@pytest.mark.parametrize(
    ("events", "status"),
    [
        pytest.param((Evaluated(61.0, 9, 0.1, 0.9),), "valid", id="scored after the training"),
        pytest.param((Evaluated(50.0, 9, 0.1, 0.9),), "failed", id="not scored any more"),
        pytest.param(
            (Evaluated(50.0, 9, 0.1, 0.9), Killed(51.0, 0, "evaluator", 7, 9, True)),
            "valid",
            id="killed on purpose",
        ),
        pytest.param((EvaluationMissed(61.0, "a shard is down"),), "valid", id="could not read"),
    ],
)
def test_a_trial_without_its_last_score_is_none(events: tuple[Event, ...], status: str) -> None:
    assert outcome(record(EVALUATOR, *events), PRICES).status == status


def test_a_score_that_raises_fails_the_trial() -> None:
    missed = EvaluationMissed(61.0, "the score raised KeyError('w')", score_failed=True)
    done = outcome(record(EVALUATOR, missed), PRICES)
    assert (done.status, done.reason) == (
        "failed",
        f"evaluations failed, 1 in all: {missed.reason}",
    )
