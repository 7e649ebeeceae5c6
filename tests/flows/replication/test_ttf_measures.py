"""What is measured on one trial for the claims of the first paper, and which trials cannot tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dps.events import (
    Acked,
    Detected,
    Evaluated,
    Event,
    Killed,
    NodeJoined,
    Restored,
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
)
from flows.analysis.finished import Finished
from flows.analysis.outcome import outcome
from flows.records.record import Record
from flows.replication.ttf.figures import COLUMNS
from flows.replication.ttf.findings import study, write
from flows.replication.ttf.measures import Change, Measured, changes, measure
from flows.replication.version import Version
from tests.support.records import PRICES, acked, scores

KILL = {"kind": "kill", "at_updates": 130, "target": {"shard": 0, "position": "head"}}


def record(*more: Event, trial: str = "chain", **config: Any) -> Record:
    settings = {
        "trial": trial,
        "labels": {"recovery": "chain", "faults": "k"},
        "seed": 0,
        "config": config,
    }
    return Record(
        (
            TrialStarted(9.0, trial, settings, {}),
            NodeJoined(9.0, "server-0", "server", 1, "h"),
            TrainingStarted(10.0, 1, 1, 100),
            *more,
            acked([1, 2, 3], t=100.0),
            *scores(0.5, 0.6),
            TrialEnded(101.0, "valid", ""),
        )
    )


def measured(of: Record) -> Measured | None:
    return measure(of, outcome(of, PRICES))


def test_the_kills_are_those_that_the_configuration_asks_for() -> None:
    full = {"kind": "disk_full", "target": "server-0"}
    real = measured(record(faults=[full, KILL, KILL]))
    both_at_once = [Killed(50.0, 0, node, 7, 2, True) for node in ("store-0", "server-0")]
    one = measured(record(*both_at_once, faults=[KILL]))
    emulated = measured(record(kills=1, faults=[]))
    assert real is not None
    assert one is not None
    assert emulated is not None
    assert (real.kills, one.kills, emulated.kills) == (2, 1, 1)


def test_a_resumed_trial_is_left_out_and_counted(tmp_path: Path) -> None:
    whole = record(faults=[KILL])
    resumed = record(TrialResumed(10.0, "checkpoints", 100), trial="late", faults=[KILL])
    assert measured(resumed) is None
    finished = [Finished(tmp_path, each, outcome(each, PRICES)) for each in (whole, resumed)]
    text = write({"(b)": study("(b)", finished, 3)}, [], [], tmp_path, None, Version())
    assert "**Only 2 of 3 trials are recorded.** (b): 2 of 3 trials, 1 left out." in text
    assert "Left out, 1 of 2: late (resumed: its record begins in the middle)" in text


def test_why_nothing_of_a_study_could_be_measured_is_told(tmp_path: Path) -> None:
    whole, late = record(faults=[KILL]), TrialResumed(10.0, "checkpoints", 100)
    none = [record(late, trial=name, faults=[KILL]) for name in ("one", "two")]
    studies = {
        title: study(title, [Finished(tmp_path, r, outcome(r, PRICES)) for r in records], 2)
        for title, records in {"(a)": [whole], "(b)": none}.items()
    }
    text = write(studies, [], [], tmp_path, None, Version())
    assert "### (b)\n\nLeft out, 2 of 2: one (resumed" in text
    alone = write({"(b)": studies["(b)"]}, [], [], tmp_path, None, Version())
    claims = "### Claims as they were published\n\nNo trial could be measured.\n\n"
    assert f"{claims}### (b)\n\nLeft out, 2 of 2" in alone


def test_published_curves_are_drawn_where_there_are_any(tmp_path: Path) -> None:
    whole, curves = record(faults=[KILL]), tmp_path / "curves.csv"
    row = "kill30_recover20,SYNC_CHECKPOINTING,1,{},0.1"
    curves.write_text("\n".join([",".join(COLUMNS), row.format(0), row.format(9)]))
    done = Finished(tmp_path, whole, outcome(whole, PRICES))
    text = write({"(b)": study("(b)", [done], 1)}, [], [], tmp_path, curves, Version())
    assert "(accuracy-1.svg)" in text
    assert "(accuracy-2.svg)" not in text


# -- against a control -------------------------------------------------------------------------


PACE, KILLED_AT = 100, 200  # gradients per second; gradients at the kill


def even(seconds: float) -> float:
    """A tenth for each second at full pace."""
    return 0.1 * seconds


def flattening(seconds: float) -> float:
    return 1 - math.exp(-seconds / 2)


def training(
    slow: float = 1.0,
    drop: float = 0.0,
    curve: Callable[[float], float] = even,
    *,
    kills: int = 0,
    **config: Any,
) -> Record:
    """A training that is evaluated four times a second, at an accuracy that `curve` tells.

    The machine is `slow` times slower until 200 gradients are pushed. Then, with a kill, the shard
    is down for 1.5 s, and accuracy is lower by `drop` from there on. A second kill is 2.5 s later.
    """
    start, killed = 10.0, KILLED_AT * slow / PACE

    def pushed_at(number: int) -> float:
        late = max(0, number - KILLED_AT)
        return start + (number - late) * slow / PACE + late / PACE

    def accuracy(t: float) -> float:
        at_full_pace = min(t, killed) / slow + max(0.0, t - killed)
        return curve(at_full_pace) - (drop if kills and t > killed else 0.0)

    numbers = tuple(range(1, KILLED_AT + 500))
    times = tuple(map(pushed_at, numbers))
    n = len(numbers)
    events: list[Event] = [
        TrialStarted(
            9.0,
            "chain",
            {
                "trial": f"chain.k={kills}",
                "labels": {"recovery": "chain", "faults": f"k={kills}"},
                "seed": 0,
                "config": {"faults": [KILL] * kills, **config},
            },
            {},
        ),
        TrainingStarted(start, 1, 1, 100),
        Acked(times[-1], "w", 1, times, (0,) * n, numbers, numbers, ("applied",) * n),
        *(
            Evaluated(start + t, 0, 1.0, accuracy(t))
            for t in (number / 4 for number in range(40))
            if not (kills and killed < t < killed + 1.5)
        ),
    ]
    for number in range(kills):
        t = start + killed + 2.5 * number
        events += [
            Killed(t, number, "server-0", 7, KILLED_AT, True),
            Detected(t + 0.1, 0, 2 + number, "server-0", False, "scheduler"),
            Restored(t + 1.5, 0, 2 + number, "server-0", KILLED_AT, "checkpoint"),
        ]
    events.append(TrialEnded(start + 20.0, "valid", ""))
    return Record(tuple(events))


def test_the_effect_of_a_kill_is_its_change_minus_that_of_the_control() -> None:
    """By hand: killed at 2 s, evaluated at 1.25, 1.5 and 1.75 s before it, and at 3.5 s after it.

    In the 2 s from their mean the control gains 0.2, and the trial that much less.
    """
    hurt, calm = training(drop=0.2, kills=1), training()
    (alone,) = changes(hurt)
    assert alone.control is None
    assert alone.effect is None
    (change,) = changes(hurt, calm)
    assert change.points == pytest.approx(0.0)
    assert change.control == pytest.approx(0.2)
    assert change.effect == pytest.approx(-0.2)


def test_a_kill_that_does_nothing_has_no_effect_however_much_is_learnt_meanwhile() -> None:
    (change,) = changes(training(kills=1), training())
    assert change.points == pytest.approx(0.2)
    assert change.effect == pytest.approx(0.0)


@pytest.mark.parametrize(("mine", "other"), [(2.0, 1.0), (1.0, 2.0)])
def test_a_control_is_met_where_it_had_as_many_gradients(mine: float, other: float) -> None:
    """By seconds from the start, a kill at 4 s would meet a control that had gone twice as far."""
    hurt, calm = training(mine, curve=flattening, kills=1), training(other, curve=flattening)
    (change,) = changes(hurt, calm)
    assert change.points > 0.15
    assert change.effect == pytest.approx(0.0, abs=0.01)


def test_only_the_first_kill_has_a_control() -> None:
    """After it the two are not the same training any more."""
    first, second = changes(training(drop=0.2, kills=2), training())
    assert first.effect == pytest.approx(-0.2)
    assert second.control is None


def test_a_control_that_ended_before_the_kill_tells_nothing() -> None:
    short = [e for e in training().events if not isinstance(e, Acked)]
    (change,) = changes(training(kills=1), Record((*short, acked([1, 2, 3], t=11.0))))
    assert change == Change(change.before, change.after, change.gap, None)


def test_controls_are_found_by_configuration_workers_and_seed(tmp_path: Path) -> None:
    one, four = ({"training": {"workers": workers}} for workers in (1, 4))
    records = [
        training(drop=0.2, kills=1, **one),
        training(**one),
        training(drop=0.3, kills=1, **four),
        training(faults=[{"kind": "slow"}], **four),  # no control: something happened to it
    ]
    finished = [Finished(tmp_path, each, outcome(each, PRICES)) for each in records]
    found = study("(b)", finished, 4)
    effects = [change.effect for trial in found.trials for change in trial.changes]
    assert effects == [pytest.approx(-0.2), None]
    text = write({"(b)": found}, [], [], tmp_path, None, Version())
    assert "| 1st kill, minus control: points |" in text
    assert "| chain | k=1 | 2 | 0.150→" in text
    assert "| -20.0 |" in text
    assert "ordinary learning included" in text
    assert "**not judged**" in text
