"""The effect of faults, on curves and records in which it was planted, and on the toy server's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
)
from flows.analysis.effects.controls import setup
from flows.analysis.effects.course import Curve, accuracy_points
from flows.analysis.effects.difference import Effect, difference
from flows.analysis.faults import FaultTimes
from flows.analysis.finished import (
    Finished,
    finished,
    read_experiment,
    with_effects,
)
from flows.analysis.outcome import Outcome
from flows.analysis.prices import load_prices
from flows.metrics import BY_KEY
from flows.records.record import Record
from tests.support.records import PRICES, acked, applied
from tests.support.synthetic import STRATEGIES, write_experiment

FAULT = {"kind": "kill", "target": "server-0", "at_updates": 100}
START, LENGTH, STRUCK, RATE = 1000.0, 40, 10, 10  # seconds, and gradients a second
ACCURACY = {key for key in BY_KEY if key.startswith("effect_") and BY_KEY[key].unit == "points"}

Learnt = Callable[[float], float]


# -- curves ------------------------------------------------------------------------------------


def test_a_curve_is_straight_between_its_points_and_jumps_where_two_are_at_one_place() -> None:
    curve = Curve([(0.0, 0.0), (2.0, 1.0), (2.0, 0.2), (4.0, 0.2)])
    assert [curve.at(x) for x in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.0, 0.5, 0.2, 0.2, 0.2]
    assert [curve.before(x) for x in (1.0, 2.0, 4.0)] == [0.5, 1.0, 0.2]
    assert curve.area(0.0, 4.0) == pytest.approx(1.0 + 0.4)
    assert curve.area(1.0, 2.0) == pytest.approx(0.75)
    assert curve.area(2.0, 3.0) == pytest.approx(0.2)


@pytest.mark.parametrize("seed", range(5))
def test_the_difference_is_that_of_two_curves_on_a_fine_grid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    xs = [np.sort(rng.uniform(0, 10, 30)) for _ in range(2)]
    ys = [rng.uniform(0, 1, 30) for _ in range(2)]
    curves = [
        Curve(list(zip(x.tolist(), y.tolist(), strict=True))) for x, y in zip(xs, ys, strict=True)
    ]
    found = difference(curves[0], curves[1], 2.0, 8.0)
    grid = np.union1d(np.linspace(2.0, 8.0, 1001), [x for each in xs for x in each if 2 < x < 8])
    apart = np.interp(grid, xs[0], ys[0]) - np.interp(grid, xs[1], ys[1])
    assert found is not None
    assert found.area == pytest.approx(np.trapezoid(apart, grid))
    assert found.mean == pytest.approx(np.trapezoid(apart, grid) / 6)
    assert found.end == pytest.approx(apart[-1])


def test_nothing_is_said_beyond_what_both_curves_have() -> None:
    long, short = Curve([(0.0, 1.0), (10.0, 1.0)]), Curve([(3.0, 0.5), (5.0, 0.5)])
    assert difference(long, short, 0.0, 10.0) == Effect(2.0, 0.5, 0.5)
    assert difference(short, long, 4.0, 10.0) == Effect(1.0, -0.5, -0.5)
    assert difference(long, short, 5.0, 10.0) is None


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


def test_of_a_fault_that_changed_nothing_every_effect_is_zero() -> None:
    row = row_of(trial(rising, struck=STRUCK), trial(rising))
    assert {key: row[key] for key in ACCURACY} == dict.fromkeys(ACCURACY, 0.0)
    assert row["effect_time_area"] == row["gradients_deficit"] == 0.0
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
    assert row["effect_time_area"] == pytest.approx(-0.05 * (LENGTH - STRUCK))
    assert row["gradients_deficit"] == 0.0


def test_five_points_less_over_a_part_of_the_span_count_by_its_share() -> None:
    def dip(t: float) -> float:
        return rising(t) - (0.05 if 15 <= t <= 25 else 0.0)

    row = row_of(trial(dip, struck=STRUCK), trial(rising))
    # A trapezoid: 5 points for 10 s, and slopes of a second, between two evaluations, beside it.
    area = -0.05 * (10 + 0.5 + 0.5)
    assert row["effect_time_area"] == pytest.approx(area)
    assert row["effect_time_mean"] == pytest.approx(area / (LENGTH - STRUCK))
    assert row["effect_gradients_mean"] == pytest.approx(area / (LENGTH - STRUCK))
    assert row["effect_time_end"] == row["effect_gradients_end"] == pytest.approx(0.0)


def test_an_outage_that_loses_nothing_costs_time_and_no_gradients() -> None:
    """What was learnt goes by gradients: a halt of 8 s puts the curve off by as much."""
    halt = (STRUCK, STRUCK + 8)

    def halted(t: float) -> float:
        return rising(t if t <= STRUCK else max(STRUCK, t - 8))

    row = row_of(trial(halted, halt=halt), trial(rising))
    # Over 30 s: the gap opens to 0.02 × 8 within the halt, and stays.
    assert row["effect_time_span"] == LENGTH - STRUCK
    assert row["effect_time_end"] == pytest.approx(-0.16)
    assert row["effect_time_area"] == pytest.approx(-0.16 * (8 / 2 + 22))
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
    assert row["effect_time_area"] == pytest.approx(during + after)
    assert row["effect_gradients_mean"] == pytest.approx(-0.02 * STRUCK)
    assert row["effect_gradients_end"] == pytest.approx(-0.02 * STRUCK)


@pytest.mark.parametrize("loses", [True, False])
def test_a_longer_outage_never_costs_less(loses: bool) -> None:
    def effect(seconds: int) -> float:
        def course(t: float) -> float:
            kept = 0.0 if loses else STRUCK
            return rising(t if t <= STRUCK else max(kept, kept + t - STRUCK - seconds))

        halt = (STRUCK, STRUCK + seconds)
        return float(row_of(trial(course, halt=halt), trial(rising))["effect_time_mean"])

    effects = [effect(seconds) for seconds in (2, 3, 6, 12, 20)]
    assert effects == sorted(effects, reverse=True)


def test_an_outage_that_begins_while_the_model_is_scored_is_level_up_to_the_score() -> None:
    """What comes after it is told by the scores that follow: a curve never goes back."""

    def lost(began: float, serving: float) -> FaultTimes:
        return FaultTimes(0, "kill", "server-0", 1, began, shard=0, serving=serving)

    scores = [
        Evaluated(0.0, 0, 1.0, 0.1),
        Evaluated(6.0, 60, 1.0, 0.4),
        Evaluated(9.0, 90, 1.0, 0.5),
    ]
    record = Record((TrainingStarted(0.0, 1, 1, 10), EvaluationMissed(3.0, "down"), *scores))
    found = accuracy_points(record, [lost(2.0, 4.0), lost(5.9, 8.0)])
    assert found == [(0.0, 0.1), (6.0, 0.1), (6.0, 0.4), (6.0, 0.4), (9.0, 0.5)]


def test_what_an_outage_loses_of_a_loss_is_lost_from_the_fault_on_too() -> None:
    """A loss that is higher after the outage was lost with the fault, one that is lower learnt."""
    down = [FaultTimes(0, "kill", "server-0", 1, 2.0, shard=0, serving=4.0)]
    config = {"config": {"evaluation": {"metric": "loss"}}}

    def points(after: float) -> list[tuple[float, float]]:
        events = (
            TrialStarted(0.0, "t", config, {}),
            EvaluationMissed(3.0, "down"),
            Evaluated(1.0, 0, 0.5, 0.5),
            Evaluated(6.0, 0, after, after),
        )
        return accuracy_points(Record(events), down)

    assert points(0.9) == [(1.0, 0.5), (2.0, 0.5), (2.0, 0.9), (6.0, 0.9)]
    assert points(0.4) == [(1.0, 0.5), (4.0, 0.5), (4.0, 0.4), (6.0, 0.4)]


def test_there_is_no_effect_where_a_curve_is_not_finite() -> None:
    whole, wild = Curve([(0.0, 1.0), (9.0, 1.0)]), Curve([(0.0, 1.0), (5.0, math.inf), (9.0, 1.0)])
    assert difference(whole, whole, 1.0, 8.0) == Effect(7.0, 0.0, 0.0)
    assert difference(wild, whole, 1.0, 8.0) is None


def test_the_span_ends_where_the_shorter_training_does() -> None:
    row = row_of(trial(rising, struck=STRUCK), trial(rising, length=25))
    assert row["effect_time_span"] == 15
    assert (row["effect_time_mean"], row["effect_gradients_mean"]) == (0.0, 0.0)
    assert row["effect_training_seconds"] == 15


def test_a_plan_that_struck_nothing_had_no_effect() -> None:
    planned = trial(lambda t: rising(t) + 0.1, faults=[{**FAULT, "every": {"mtbf": 1e6}}])
    [found, _] = effects_of(planned, trial(rising))
    assert found.effects.time == Effect(0.0, 0.0, 0.0)
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


def test_limits_that_change_no_result_and_names_do_not_matter() -> None:
    other = started(labels={"faults": "kill"}, time_limit=600.0, cluster={"patience": 1.0})
    mine = started(faults=[FAULT], labels={"faults": "no fault"}, cluster={"patience": 9.0})
    [found, control] = effects_of(
        trial(rising, struck=STRUCK, opened=mine), trial(rising, opened=other)
    )
    assert found.effects.control == "control"
    assert control.effects.control is None


def test_of_several_controls_it_is_the_one_with_the_most_labels_in_common() -> None:
    def opened(name: str, group: str, faults: Sequence[Any] = ()) -> TrialStarted:
        event = started(labels={"group": group, "faults": name}, faults=faults)
        return replace(event, settings={**event.settings, "trial": f"{group}.{name}"})

    records = [
        trial(rising, opened=opened("quiet", "a")),
        trial(rising, opened=opened("quiet", "b")),
        trial(rising, struck=STRUCK, opened=opened("kill", "a", [FAULT])),
        trial(rising, struck=STRUCK, opened=opened("kill", "b", [FAULT])),
    ]
    found = [outcome.effects.control for outcome in effects_of(*records)]
    assert found == [None, None, "a.quiet", "b.quiet"]


def test_a_control_that_is_invalid_or_was_resumed_is_none() -> None:
    control = trial(rising)
    invalid = Record((*control.events[:-1], TrialEnded(START + 99, "invalid", "busy")))
    resumed = Record((control.events[0], TrialResumed(START, "there", 5), *control.events[1:]))
    for unfit, why in ((invalid, "is invalid"), (resumed, "was resumed")):
        [found, _] = effects_of(trial(rising, struck=STRUCK), unfit)
        assert found.effects.lacking == f"its control control {why}"


def test_the_toy_server_s_trials_have_the_effects_of_their_strategies(tmp_path: Path) -> None:
    found: list[Finished] = read_experiment(write_experiment(tmp_path), load_prices())
    rows = {done.outcome.identity.trial: done.outcome.row() for done in found}
    for strategy in STRATEGIES:
        for seed in (0, 1):
            row = rows[f"{strategy}.kill.seed-{seed}"]
            assert row["control"] == f"{strategy}.no-fault.seed-{seed}"
            assert rows[row["control"]]["effect_time_mean"] is None
    none, chain = rows["none.kill.seed-0"], rows["chain.kill.seed-0"]
    for over in ("time", "gradients", "money"):
        assert none[f"effect_{over}_mean"] < -0.02 < chain[f"effect_{over}_mean"]
    assert none["gradients_deficit"] > 150 > chain["gradients_deficit"]


@pytest.mark.parametrize("key", ["config", "labels", "circumstances"])
@pytest.mark.parametrize("damaged", [0, [], "odd", None])
def test_settings_that_are_damaged_tell_nothing_and_fail_nothing(key: str, damaged: Any) -> None:
    whole = {"config": {"faults": [1]}, "labels": {"a": "b"}, "circumstances": {"parallel": 2}}
    found = setup({**whole, key: damaged})
    assert found.plans_faults == (key != "config")
    assert found.labels == ({"a": "b"} if key == "circumstances" else {})
