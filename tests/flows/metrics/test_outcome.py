"""Every figure of a trial, on plausible records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dps.events import FaultMissed, Killed
from flows.metrics import BY_KEY, METRICS, TRACKED
from flows.metrics.outcome import Outcome, outcome
from flows.records.events import TrialResumed
from flows.records.record import Record
from tests.support.records import PRICES
from tests.support.synthetic import BACK_AFTER, KILL_AT, STRATEGIES, UPDATES, toy_events


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


def test_every_figure_has_a_definition_and_every_definition_a_figure() -> None:
    assert toy("chain", "kill").row().keys() == BY_KEY.keys()
    assert len(BY_KEY) == len(METRICS)
    assert all(BY_KEY[key].number for key in TRACKED)
    assert len({*TRACKED.values()}) == len(TRACKED)
    first = sorted(name for name in TRACKED.values() if name < "t")
    assert len(first) == 10, "the most important metrics, before all others in MLflow"


@pytest.mark.parametrize(
    ("strategy", "lost"), [("none", KILL_AT), ("checkpoint", 17), ("chain", 0), ("stateless", 0)]
)
def test_what_each_strategy_loses(strategy: str, lost: int) -> None:
    result = toy(strategy, "kill")
    assert result.row()["updates_lost"] == lost
    assert result.row()["updates_applied"] == 2 * UPDATES - lost
    assert toy(strategy, "no fault").row()["updates_lost"] == 0


def test_identity_comes_from_the_settings() -> None:
    identity = toy("chain", "kill", 1).identity
    assert (identity.strategy, identity.condition, identity.seed) == ("chain", "kill", 1)
    labels = {**identity.labels, "training.workers": "8", "filters": "top-k"}
    assert replace(identity, labels=labels).condition == "kill · workers 8 · top-k"
    assert identity.trial == "chain.kill.seed-1"
    assert len(identity.digest) == 12
