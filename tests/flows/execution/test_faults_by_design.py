"""Drawn faults and equal budgets, in trials on virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dps.events import FaultSkipped, Killed, Paused
from dps.faults import AtSeconds, AtUpdates
from flows.config.experiment import TrialConfig
from flows.records.events import TrainingStarted
from flows.statistics.finished import Finished
from tests.support.virtual_trials import BASE, virtual_trial

STRATEGIES = ["none", "checkpoint", "chain", "stateless"]
KILL = {"kind": "kill", "target": {"role": "server"}, "back_after": 0.2}
FORMS: dict[str, dict[str, Any]] = {
    "updates": {"at_updates": {"between": [20, 100]}},
    "seconds": {"at_seconds": {"between": [0.1, 0.4]}},
    "weibull": {"every": {"mtbf": 0.3, "shape": 0.7, "until": 60}},
    "by gradients": {"every": {"updates": 40, "until": 1000}},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_strategy_meets_the_moments_that_its_seed_draws(tmp_path: Path, form: str) -> None:
    fault = {**KILL, **FORMS[form]}
    drawn = TrialConfig.model_validate({**BASE, "faults": [fault]}).fault_plan
    met = set()
    for strategy in STRATEGIES:
        done = virtual_trial(tmp_path / strategy, recovery=strategy, faults=[fault])
        assert done.outcome.status == "valid", done.outcome.reason
        (began,) = done.record.of(TrainingStarted)
        killed = done.record.of(Killed)
        met.update(event.fault for event in killed)
        for event in (*killed, *done.record.of(FaultSkipped)):
            when = drawn[event.fault].when
            if isinstance(when, AtSeconds):
                assert event.t - began.t == pytest.approx(when.seconds, abs=0.15)
            if isinstance(when, AtUpdates) and isinstance(event, Killed):
                assert event.updates >= when.updates
    assert met


def test_a_process_that_finds_nobody_leaves_the_trial_valid(tmp_path: Path) -> None:
    """Else strategies that recover slowly would have fewer valid trials."""
    pause = {"kind": "pause", "target": "server-0", "seconds": 0.3}
    every = {"kind": "kill", "target": "server-1", "back_after": 5.0}
    done = virtual_trial(
        tmp_path / "trial",
        recovery="chain",
        faults=[
            {**pause, "every": {"updates": 15, "until": 1000}},
            {**every, "every": {"updates": 30, "until": 1000}},
        ],
    )
    assert done.outcome.status == "valid", done.outcome.reason
    skipped = done.record.of(FaultSkipped)
    assert skipped
    assert {event.reason for event in skipped} == {"no such node was running"}
    assert len(done.record.of(Killed)) == 1
    assert done.record.of(Paused)


def money_per_second(done: Finished) -> float:
    seconds = done.outcome.row()["training_seconds"]
    assert seconds
    return done.outcome.row()["cost_nodes_usd"] / seconds


@pytest.mark.slow
def test_equal_budgets_are_recorded_used_and_paid_for(tmp_path: Path) -> None:
    kill = {**KILL, "target": "server-0", "at_updates": 60, "back_after": None}
    hours = {}
    for strategy in STRATEGIES:
        changes: dict[str, Any] = {"recovery": strategy, "budget": {"nodes": 4}}
        quiet = virtual_trial(tmp_path / strategy / "quiet", **changes)
        assert quiet.record.started is not None
        assert quiet.record.started.settings["config"]["budget"] == {"nodes": 4}
        hours[strategy] = money_per_second(quiet)
        # A node that is never replaced has a spare to go on, or a replica.
        broken = virtual_trial(tmp_path / strategy / "kill", **changes, faults=[kill])
        assert broken.outcome.status == "valid", broken.outcome.reason
    without = virtual_trial(tmp_path / "without", recovery="checkpoint")
    less = money_per_second(without)
    for strategy in STRATEGIES:  # six nodes each, the two workers' among them, against four
        assert hours[strategy] == pytest.approx(1.5 * less, rel=0.05), strategy
