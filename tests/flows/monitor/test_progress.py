"""What a running experiment shows."""

from __future__ import annotations

import io
import re
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from dps.events import Detected, Killed
from flows.metrics.outcome import outcome
from flows.metrics.prices import load_prices
from flows.monitor.course import Course, Follower
from flows.monitor.progress import PlainView
from flows.records.record import read_record
from tests.support.synthetic import demo_trials, toy_events, write_events

TRIALS = demo_trials()
CHAIN = next(trial for trial in TRIALS if trial.name == "chain.kill.seed-0")


def play(view: PlainView, folder: Path) -> None:
    trial = CHAIN
    record = read_record(write_events(folder, toy_events("chain", "kill", 0)))
    with view:
        view.begin("demo", TRIALS, TRIALS[:2])
        view.started(trial)
        told, moved = partial(view.show_line, trial), partial(view.moved, trial)
        follower = Follower(told, moved)
        for event in record.events:
            follower(event)
        view.ended(trial, outcome(record, load_prices()))


def test_plain_lines_tell_the_story_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    out = io.StringIO()
    play(PlainView(Console(file=out, width=80)), tmp_path)
    lines = out.getvalue().splitlines()
    assert lines[0] == "demo: 16 trials, 14 to run"
    assert lines[1] == "about 2 min (a guess)"
    assert lines[2] == f"recorded already, skipped: {TRIALS[0].name}, {TRIALS[1].name}"
    assert lines[3] == "[3/16] chain.kill.seed-0"
    told = [
        "server-0 killed after ",
        "server-0 detected as lost by the",
        "shard 0 continues at replica-0-1, at version",
        "is up and replaces the lost node",
        "shard 0 has a new replica at",
    ]
    positions = [next(i for i, line in enumerate(lines) if part in line) for part in told]
    assert positions == sorted(positions)
    assert "valid, accuracy 9" in lines[-1]
    assert re.search(r"; \d:\d\d:\d\d in all, about \d+ (s|min) left$", lines[-1])
    assert not any("at version 0" in line for line in lines)


def test_lines_have_the_order_of_their_moments_though_events_arrive_late() -> None:
    events = sorted(toy_events("none", "kill", 0), key=lambda event: event.t)
    (detected,) = (event for event in events if isinstance(event, Detected))
    (killed,) = (event for event in events if isinstance(event, Killed))
    events.remove(killed)
    events.insert(events.index(detected) + 1, killed)
    told = list[str]()
    follower = Follower(told.append, lambda updates, state: None)
    for event in events:
        follower(event)
    moments = [float(line.split(" s  ")[0]) for line in told]
    assert len(moments) > 2
    assert moments == sorted(moments)
    assert "killed after" in told[0]


def test_a_terminal_has_the_same_lines_and_a_bar(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, _environ={"TERM": "xterm"})
    play(PlainView(console), tmp_path)
    text = out.getvalue()
    assert "server-0 killed after " in text
    assert "chain · kill · seed 0" in text
    assert "/800 updates" in text


def test_updates_count_what_every_shard_has_and_go_back_with_a_loss() -> None:
    course = Course()
    seen, states = [], []
    for event in sorted(toy_events("none", "kill", 0), key=lambda event: event.t):
        course.take(event)
        seen.append(course.updates)
        states.append(" ".join(course.view().remarks()))
    assert seen[0] == 0
    assert any(after < before for before, after in pairwise(seen))
    assert "evaluated accuracy 0.9" in states[-1]
    down = [index for index, state in enumerate(states) if "shard 0 is down" in state]
    assert down == list(range(down[0], down[-1] + 1)), "until it serves again"
    assert "down" not in states[-1]
