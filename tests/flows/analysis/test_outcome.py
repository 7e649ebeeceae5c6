"""Every figure of a trial, on plausible records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dps.events import FaultMissed, Killed, TrialEnded, TrialResumed
from flows.analysis.outcome import Outcome, outcome
from flows.metrics import BY_KEY, COLUMNS
from flows.records.record import Record
from tests.support.records import PRICES
from tests.support.synthetic import (
    BACK_AFTER,
    KILL_AT,
    LIMIT,
    STRATEGIES,
    UPDATES,
    missed,
    toy_events,
)


def test_a_record_without_an_end_is_failed() -> None:
    result = outcome(Record(tuple(toy_events()[:-1])), PRICES)
    assert result.status == "failed"
    assert "no end" in result.reason


def test_a_missed_fault_makes_a_trial_invalid_whatever_its_end_says() -> None:
    events = toy_events("chain", "no fault")
    record = Record((*events[:-1], FaultMissed(1.0, 0, "server-0", "too late"), events[-1]))
    result = outcome(record, PRICES)
    assert (result.status, result.valid) == ("invalid", False)
    assert "too late" in result.reason


def test_status_and_reason_are_those_of_the_end() -> None:
    result = outcome(Record(tuple(missed(toy_events("chain", "no fault")))), PRICES)
    assert (result.status, result.reason) == ("invalid", "the training ended first")


def test_an_empty_record_still_has_every_figure() -> None:
    row = outcome(Record(()), PRICES).row()
    assert row.keys() == BY_KEY.keys()
    assert row["status"] == "failed"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_trial_tells_what_its_end_shows_and_nothing_of_the_whole(strategy: str) -> None:
    """Its record begins in the middle: no figure may take that part for all of it."""
    events = toy_events(strategy, "kill")
    middle = next(event.t for event in events if isinstance(event, Killed)) + 2 * BACK_AFTER
    resumed = [
        events[0],
        TrialResumed(middle, "checkpoints", UPDATES // 2),
        *(event for event in events[1:] if event.t > middle),
    ]
    whole, row = (outcome(Record(tuple(each)), PRICES).row() for each in (events, resumed))
    assert {key for key in row if row[key] is not None and BY_KEY[key].whole} == set()
    told = {key: value for key, value in row.items() if not BY_KEY[key].whole}
    assert told == {key: whole[key] for key in told}
    assert told["accuracy_final"] is not None


def toy(strategy: str, fault: str, seed: int = 0) -> Outcome:
    return outcome(Record(tuple(toy_events(strategy, fault, seed))), PRICES)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", ["no fault", "kill"])
def test_every_row_has_the_same_names_and_is_ready_for_json(strategy: str, fault: str) -> None:
    row = toy(strategy, fault).row()
    assert list(row) == list(toy("none", "no fault").row())
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_every_figure_has_a_definition_and_every_definition_a_figure() -> None:
    assert toy("chain", "kill").row().keys() == BY_KEY.keys()
    assert len(BY_KEY) == len(COLUMNS)
    metrics = [column.metric for column in COLUMNS if column.metric]
    assert len(set(metrics)) == len(metrics)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_applied_twice_and_the_audit_agrees(strategy: str) -> None:
    counts = toy(strategy, "kill").ledger
    assert (counts.applied_twice, counts.replica_conflicts, counts.audit_mismatches) == (0, 0, 0)


@pytest.mark.parametrize(
    ("strategy", "lost"), [("none", KILL_AT), ("checkpoint", 17), ("chain", 0), ("stateless", 0)]
)
def test_what_each_strategy_loses(strategy: str, lost: int) -> None:
    result = toy(strategy, "kill")
    assert result.ledger.lost == lost
    assert result.ledger.applied == 2 * UPDATES - lost
    assert toy(strategy, "no fault").ledger.lost == 0


def test_gradients_of_the_outage_are_replayed_under_stateless() -> None:
    result = toy("stateless", "kill")
    assert (result.ledger.buffered, result.ledger.replayed) == (LIMIT, LIMIT)
    assert result.pace.pushed == UPDATES


def test_recovery_times_of_a_trial() -> None:
    chain, none = toy("chain", "kill").row(), toy("none", "kill").row()
    assert chain["recovered_from"] == "promoted"
    assert chain["rto_seconds"] < 0.1
    assert none["recovered_from"] == "initial"
    assert none["rto_seconds"] > BACK_AFTER
    assert none["wait_capacity_seconds"] == pytest.approx(BACK_AFTER, abs=0.05)
    assert none["accuracy_drop"] > 0.1 > chain["accuracy_drop"]
    assert none["regain_seconds"] > none["rto_seconds"]


def test_identity_comes_from_the_settings() -> None:
    identity = toy("chain", "kill", 1).identity
    assert (identity.strategy, identity.condition, identity.seed) == ("chain", "kill", 1)
    labels = {**identity.labels, "training.workers": "8", "filters": "top-k"}
    assert replace(identity, labels=labels).condition == "kill · workers 8 · top-k"
    assert identity.trial == "chain.kill.seed-1"
    assert len(identity.digest) == 12


def test_the_end_of_a_failed_trial_is_told() -> None:
    events = [*toy_events()[:-1], TrialEnded(1.0, "failed", "worker-0 ran out of memory")]
    result = outcome(Record(tuple(events)), PRICES)
    assert (result.status, result.reason) == ("failed", "worker-0 ran out of memory")
