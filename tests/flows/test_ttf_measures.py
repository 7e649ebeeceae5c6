"""What is measured on one trial for the claims of the first paper, and which trials cannot tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dps.events import (
    Event,
    Killed,
    NodeJoined,
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
)
from flows.outcome import outcome
from flows.record import Record
from flows.results import Finished
from flows.ttf.figures import COLUMNS
from flows.ttf.findings import study, write
from flows.ttf.measures import Measured, measure
from tests.flows.records import PRICES, acked, scores

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
    text = write({"(b)": study("(b)", finished, 3)}, [], tmp_path, None, "dps")
    assert "**Only 2 of 3 trials are recorded.** (b): 2 of 3 trials, 1 left out." in text
    assert "Left out, 1 of 2: late (resumed: its record begins in the middle)" in text


def test_why_nothing_of_a_study_could_be_measured_is_told(tmp_path: Path) -> None:
    whole, late = record(faults=[KILL]), TrialResumed(10.0, "checkpoints", 100)
    none = [record(late, trial=name, faults=[KILL]) for name in ("one", "two")]
    studies = {
        title: study(title, [Finished(tmp_path, r, outcome(r, PRICES)) for r in records], 2)
        for title, records in {"(a)": [whole], "(b)": none}.items()
    }
    text = write(studies, [], tmp_path, None, "dps")
    assert "### (b)\n\nLeft out, 2 of 2: one (resumed" in text
    alone = write({"(b)": studies["(b)"]}, [], tmp_path, None, "dps")
    assert "### Claims\n\nNo trial could be measured.\n\n### (b)\n\nLeft out, 2 of 2" in alone


def test_published_curves_are_drawn_where_there_are_any(tmp_path: Path) -> None:
    whole, curves = record(faults=[KILL]), tmp_path / "curves.csv"
    row = "kill30_recover20,SYNC_CHECKPOINTING,1,{},0.1"
    curves.write_text("\n".join([",".join(COLUMNS), row.format(0), row.format(9)]))
    done = Finished(tmp_path, whole, outcome(whole, PRICES))
    text = write({"(b)": study("(b)", [done], 1)}, [], tmp_path, curves, "dps")
    assert "(accuracy-1.svg)" in text
    assert "(accuracy-2.svg)" not in text
