"""What a running experiment shows."""

from __future__ import annotations

import io
import re
from functools import partial
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from dps.events import (
    CheckpointRefused,
    FaultMissed,
    ReplicaAdded,
    Restored,
    TrainingStarted,
    TrialEnded,
)
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.monitor.progress import Course, Follower, LiveView, PlainView, view_for
from flows.records.record import read_record
from tests.support.synthetic import demo_trials, toy_events, write_events

TRIALS = demo_trials()
CHAIN = next(trial for trial in TRIALS if trial.name == "chain.kill.seed-0")
NONE = next(trial for trial in TRIALS if trial.name == "none.kill.seed-0")


def play(view: PlainView, folder: Path, strategy: str = "chain") -> None:
    trial = {"chain": CHAIN, "none": NONE}[strategy]
    record = read_record(write_events(folder, toy_events(strategy, "kill", 0)))
    with view:
        view.begin("demo", TRIALS, TRIALS[:2])
        view.started(trial)
        told, moved = partial(view.told, trial), partial(view.moved, trial)
        follower = Follower(trial.config.server.shards, told, moved)
        for event in record.events:
            follower(event)
        view.ended(trial, outcome(record, load_prices()))


def test_plain_lines_tell_the_story_in_order(tmp_path: Path) -> None:
    out = io.StringIO()
    play(PlainView(Console(file=out, width=80)), tmp_path)
    lines = out.getvalue().splitlines()
    assert lines[0] == "demo: 16 trials, 14 to run"
    assert lines[1] == "about 2 min (a guess)"
    assert lines[2] == f"recorded already, skipped: {TRIALS[0].name}, {TRIALS[1].name}"
    assert lines[3] == "[3/16] chain.kill.seed-0"
    told = [
        "server-0 killed after ",
        "server-0 found lost by the",
        "shard 0 goes on at replica-0-1, at version",
        "is up in the place of the lost node",
        "shard 0 has a new replica at",
    ]
    positions = [next(i for i, line in enumerate(lines) if part in line) for part in told]
    assert positions == sorted(positions)
    assert "valid, accuracy 9" in lines[-1]
    assert re.search(r"; \d:\d\d in all, about \d+ (s|min) left$", lines[-1])
    assert not any("at version 0" in line for line in lines)


def test_lines_say_what_a_shard_went_on_from(tmp_path: Path) -> None:
    out = io.StringIO()
    play(PlainView(Console(file=out, width=80)), tmp_path, "none")
    assert "shard 0 restored from initial values at" in out.getvalue()


def test_what_a_durability_of_another_maker_calls_its_source_is_told() -> None:
    course = Course(shards=1, started=0.0)
    line = course.take(Restored(1.0, 0, 2, "server-0", 5, "shelf"))
    assert line == "  1.00 s  shard 0 restored from shelf at server-0, at version 5"


def test_live_view_shows_the_same_lines_and_a_bar(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    play(LiveView(console), tmp_path)
    text = out.getvalue()
    assert "server-0 killed after " in text
    assert "chain · kill · seed 0" in text
    assert "/800 updates" in text


def test_updates_count_what_every_shard_has_and_go_back_with_a_loss() -> None:
    course = Course(shards=2)
    seen = []
    for event in toy_events("none", "kill", 0):
        course.take(event)
        seen.append(course.updates)
    assert seen[0] == 0
    assert any(after < before for before, after in pairwise(seen))
    assert course.accuracy is not None


def test_a_shard_is_shown_as_down_until_it_serves_again() -> None:
    course = Course(shards=2)
    states = []
    for event in sorted(toy_events("none", "kill", 0), key=lambda event: event.t):
        course.take(event)
        states.append(course.text())
    down = [index for index, state in enumerate(states) if "shard 0 is down" in state]
    assert down == list(range(down[0], down[-1] + 1))
    assert "down" not in states[-1]


def test_a_fault_that_did_not_happen_is_told() -> None:
    course = Course(shards=1)
    course.take(TrainingStarted(100.0, 2, 1, 10))
    told = course.take(FaultMissed(101.5, 0, "server-0", "the training ended first"))
    assert told == "  1.50 s  the fault on server-0 did not happen: the training ended first"


def test_lines_come_in_the_order_of_their_moments_whenever_they_arrive() -> None:
    told: list[str] = []
    follow = Follower(1, told.append, lambda updates, state: None)
    follow(TrainingStarted(100.0, 2, 1, 10))
    follow(FaultMissed(101.1, 0, "server-1", "later"))
    follow(FaultMissed(101.0, 0, "server-0", "earlier"))
    assert told == []
    follow(TrainingStarted(101.35, 2, 1, 10))
    assert [line.split()[-1] for line in told] == ["earlier"]
    follow(TrialEnded(101.4, "valid", ""))
    assert [line.split()[-1] for line in told] == ["earlier", "later"]


def test_a_damaged_checkpoint_is_named() -> None:
    course = Course(shards=1)
    course.take(TrainingStarted(100.0, 2, 1, 10))
    told = course.take(CheckpointRefused(100.0, 0, "e1.json", "e1.json: the data do not match"))
    assert told is not None
    assert told.endswith(
        "shard 0: a damaged checkpoint is passed over: e1.json: the data do not match"
    )


def test_what_happened_before_the_training_is_no_news() -> None:
    course = Course(shards=1)
    course.take(TrainingStarted(100.0, 2, 1, 10))
    assert course.take(ReplicaAdded(99.9, 0, 2, "replica-0-1", 0)) is None


def test_a_view_suits_where_the_output_goes() -> None:
    assert isinstance(view_for(Console(file=io.StringIO(), force_terminal=True)), LiveView)
    assert type(view_for(Console(file=io.StringIO()))) is PlainView
