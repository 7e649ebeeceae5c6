"""The effect of faults, on curves and records in which it was planted, and on the toy server's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dps.events import (
    CapacityRestored,
    Detected,
    Disturbed,
    Evaluated,
    EvaluationMissed,
    Event,
    Killed,
    NodeJoined,
    Restored,
)
from flows.metrics import BY_KEY
from flows.metrics.effects import Curve, accuracy_points, difference
from flows.metrics.faults import FaultTimes
from flows.metrics.outcome import Outcome
from flows.metrics.trial import Trial as Recorded
from flows.records.events import TrainingStarted, TrialEnded, TrialResumed, TrialStarted
from flows.records.record import Record
from flows.statistics.finished import finished, with_effects
from tests.support.records import PRICES, acked, applied

FAULT = {"kind": "kill", "target": "server-0", "at_updates": 100}
START, LENGTH, STRUCK, RATE = 1000.0, 40, 10, 10  # seconds, and gradients a second
ACCURACY = {key for key in BY_KEY if key.startswith("effect_") and BY_KEY[key].unit == "points"}

Learnt = Callable[[float], float]


# -- planted effects ---------------------------------------------------------------------------


def rising(t: float) -> float:
    return 0.1 + 0.02 * t


def started(*, seed: int = 0, faults: Sequence[Any] = (), **changes: Any) -> TrialStarted:
    config = {
        "experiment": "planted",
        "training": {"updates": LENGTH * RATE, "batch_size": 8},
        "recovery": {"name": "chain"},
        "faults": list(faults),
        "time_limit": 60.0,
        "seed": seed,
    }
    kept = {key: value for key, value in changes.items() if key in ("labels", "circumstances")}
    config |= {key: value for key, value in changes.items() if key not in kept}
    name = "faulted" if faults else "control"
    settings = {"trial": name, "experiment": "planted", "seed": seed, "digest": "d", **kept}
    settings |= {"config": config}
    return TrialStarted(START - 5, name, settings, {})


def trial(
    learnt: Learnt,
    *,
    length: int = LENGTH,
    halt: tuple[int, int] | None = None,
    struck: int | None = None,
    opened: TrialStarted | None = None,
    **settings: Any,
) -> Record:
    """A training of one server and one worker, scored each second; it pushes `RATE` a second.

    `halt` are seconds from which and until which its shard is down, so that it lasts as much
    longer; with `struck` messages of its server are delayed from then on, which does no more.
    """
    down = range(*halt) if halt else range(0)
    faulted = halt is not None or struck is not None
    events: list[Event] = [
        opened or started(**{"faults": [FAULT] if faulted else [], **settings}),
        NodeJoined(START - 1, "server-0", "server", 1, "here"),
        NodeJoined(START - 1, "worker-0", "worker", 2, "here"),
        TrainingStarted(START, 1, 1, 10),
    ]
    pushed = 0
    for second in range(length + len(down) + 1):
        t = START + second
        if halt and second == halt[0]:
            events.append(Killed(t, 0, "server-0", 1, pushed, True))
            events.append(Detected(t, 0, 2, "server-0", False, "scheduler"))
        if halt and second == halt[1]:
            events.append(NodeJoined(t, "server-0-b", "server", 3, "here"))
            events.append(CapacityRestored(t, 0, "server-0-b"))
            events.append(Restored(t, 0, 2, "server-0-b", pushed, "store"))
        if second == struck:
            events.append(Disturbed(t, 0, "delay", "server-0", pushed, "seen", True))
        # What happens at the very moment of the kill, or of the return, was there already.
        if second in down and second != (halt or (0,))[0]:
            events.append(EvaluationMissed(t, "down"))
        else:
            events.append(Evaluated(t, pushed, 1.0, learnt(float(second))))
        if second < length + len(down) and second not in down:
            seqs = range(pushed + 1, pushed + RATE + 1)
            epoch = 2 if halt and second >= halt[1] else 1
            events += [acked([seq], t=t + (seq - pushed) / RATE) for seq in seqs]
            events.append(applied(list(seqs), t=t + 0.05, epoch=epoch))
            pushed += RATE
    return Record((*events, TrialEnded(t + 1, "valid", "")))


def effects_of(*records: Record) -> list[Outcome]:
    found = [finished(Path(f"{i}"), record, PRICES) for i, record in enumerate(records)]
    return [done.outcome for done in with_effects(found, PRICES)]


def row_of(faulted: Record, control: Record) -> Any:
    return effects_of(faulted, control)[0].row()


def area_of(row: Any) -> float:
    return float(row["effect_time_mean"] * row["effect_time_span"])


def test_of_a_fault_that_changed_nothing_every_effect_is_zero() -> None:
    row = row_of(trial(rising, struck=STRUCK), trial(rising))
    assert {key: row[key] for key in ACCURACY} == dict.fromkeys(ACCURACY, 0.0)
    assert row["gradients_deficit"] == 0.0
    assert row["effect_training_seconds"] == 0.0
    assert (row["control"], row["faults"], row["outages"]) == ("control", 1, 0)
    assert row["effect_time_span"] == LENGTH - STRUCK


def test_five_points_less_from_the_fault_on_are_five_points_by_every_measure() -> None:
    def lower(t: float) -> float:
        return rising(t) - (0.05 if t >= STRUCK else 0.0)

    # Scored again just before the fault, so that the curve falls in no time.
    record = trial(lower, struck=STRUCK)
    just_before = Evaluated(START + STRUCK, STRUCK * RATE, 1.0, rising(STRUCK))
    where = record.events.index(next(e for e in record.events if isinstance(e, Disturbed)))
    record = Record((*record.events[:where], just_before, *record.events[where:]))
    row = row_of(record, trial(rising))
    assert {key: row[key] for key in ACCURACY} == pytest.approx(dict.fromkeys(ACCURACY, -0.05))
    assert area_of(row) == pytest.approx(-0.05 * (LENGTH - STRUCK))
    assert row["gradients_deficit"] == 0.0


def test_an_outage_that_loses_nothing_costs_time_and_no_gradients() -> None:
    """What was learnt goes by gradients: a halt of 8 s puts the curve off by as much."""
    halt = (STRUCK, STRUCK + 8)

    def halted(t: float) -> float:
        return rising(t if t <= STRUCK else max(STRUCK, t - 8))

    row = row_of(trial(halted, halt=halt), trial(rising))
    # Over 30 s: the gap opens to 0.02 × 8 within the halt, and stays.
    assert row["effect_time_span"] == LENGTH - STRUCK
    assert row["effect_time_end"] == pytest.approx(-0.16)
    assert area_of(row) == pytest.approx(-0.16 * (8 / 2 + 22))
    assert row["effect_gradients_mean"] == pytest.approx(0.0, abs=1e-12)
    assert row["effect_gradients_end"] == pytest.approx(0.0, abs=1e-12)
    assert row["gradients_deficit"] == 8 * RATE
    assert (row["effect_training_seconds"], row["downtime_seconds"]) == (8.0, 8.0)
    # PRICES: a dollar a second for each node. Worker and server; in the halt the worker alone.
    assert row["effect_cost_usd"] == pytest.approx(8.0)
    # From 20 to 80 dollars: 8 are paid for nothing, in which 0.01 a dollar would be learnt.
    assert row["effect_money_end"] == pytest.approx(-0.08)
    assert row["effect_money_mean"] == pytest.approx(-0.08 * (8 / 2 + 52) / 60)


def test_what_an_outage_loses_is_lost_from_the_fault_on() -> None:
    """All that was learnt is lost: the curve is at the start during the outage already."""
    halt = (STRUCK, STRUCK + 8)

    def lost(t: float) -> float:
        return rising(t if t <= STRUCK else max(0.0, t - 18))

    row = row_of(trial(lost, halt=halt), trial(rising))
    during = -0.02 * (STRUCK + 8 / 2) * 8  # the control goes on learning for 8 s
    after = -0.02 * 18 * 22
    assert area_of(row) == pytest.approx(during + after)
    assert row["effect_gradients_mean"] == pytest.approx(-0.02 * STRUCK)
    assert row["effect_gradients_end"] == pytest.approx(-0.02 * STRUCK)


def test_an_outage_that_begins_while_the_model_is_scored_is_level_up_to_the_score() -> None:
    """What comes after it is told by the scores that follow: a curve never goes back."""

    def lost(began: float, serving: float) -> FaultTimes:
        return FaultTimes("kill", "server-0", 1, began, shard=0, serving=serving)

    scores = [
        Evaluated(0.0, 0, 1.0, 0.1),
        Evaluated(6.0, 60, 1.0, 0.4),
        Evaluated(9.0, 90, 1.0, 0.5),
    ]
    record = Record((TrainingStarted(0.0, 1, 1, 10), EvaluationMissed(3.0, "down"), *scores))
    trial = Recorded(record, PRICES)
    trial.__dict__["faults"] = (lost(2.0, 4.0), lost(5.9, 8.0))
    assert accuracy_points(trial) == [(0.0, 0.1), (6.0, 0.1), (6.0, 0.4), (6.0, 0.4), (9.0, 0.5)]


@pytest.mark.filterwarnings("error")
def test_there_is_no_effect_where_a_curve_is_not_finite() -> None:
    whole, wild = Curve([(0.0, 1.0), (9.0, 1.0)]), Curve([(0.0, 1.0), (5.0, math.inf), (9.0, 1.0)])
    assert difference(whole, whole, 1.0, 8.0) == (7.0, 0.0, 0.0)
    assert difference(wild, whole, 1.0, 8.0) is None
    opposite = Curve([(0.0, 1.0), (3.0, math.inf), (6.0, -math.inf), (9.0, 1.0)])
    assert difference(opposite, whole, 1.0, 8.0) is None
    jump = Curve([(0.0, 1.0), (5.0, 1.0), (5.0, math.inf), (9.0, math.inf)])
    assert difference(jump, whole, 1.0, 8.0) is None


def test_a_plan_that_struck_nothing_had_no_effect() -> None:
    planned = trial(lambda t: rising(t) + 0.1, faults=[{**FAULT, "every": {"mtbf": 1e6}}])
    [found, _] = effects_of(planned, trial(rising))
    assert {found.row()[key] for key in ACCURACY} == {0.0}
    assert found.effects.lacking == ""


def test_a_fault_after_the_end_of_the_control_has_no_span_of_time() -> None:
    row = row_of(trial(rising, struck=30), trial(lambda t: rising(2 * t), length=20))
    assert row["control"] == "control"
    assert row["effect_time_mean"] is None
    assert row["gradients_deficit"] is None
    assert row["effect_training_seconds"] == 20


# -- which trial is the control ----------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"recovery": {"name": "none"}},
        {"server": {"spares": 1}},
        {"circumstances": {"parallel": 2}},
    ],
)
def test_what_differs_by_more_than_its_faults_is_no_control(changes: dict[str, Any]) -> None:
    [found, _] = effects_of(trial(rising, struck=STRUCK), trial(rising, **changes))
    assert found.row()["control"] is None
    assert found.effects.lacking == "it has no control"
    assert all(found.row()[key] is None for key in ACCURACY)


def test_a_control_that_is_invalid_or_was_resumed_is_none() -> None:
    control = trial(rising)
    invalid = Record((*control.events[:-1], TrialEnded(START + 99, "invalid", "busy")))
    resumed = Record((control.events[0], TrialResumed(START, "there", 5), *control.events[1:]))
    for unfit, why in ((invalid, "is invalid"), (resumed, "was resumed")):
        [found, _] = effects_of(trial(rising, struck=STRUCK), unfit)
        assert found.effects.lacking == f"its control control {why}"
