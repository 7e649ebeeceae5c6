"""Events as lines of Python's logging: what they say, where they go, and that nobody sees them."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from dps.events import (
    Detected,
    Evaluated,
    Event,
    Promoted,
    WorkerLeft,
    line_of,
    log,
)
from flows.records.events import TrialEnded, TrialStarted
from tests.support.records import acked, applied

LABELS = {"trial": "chain.kill.seed-0", "group": "ab12"}
PROMOTED = Promoted(12.5, 0, 3, "replica-0-1", 120)


def test_a_line_says_what_happened_where_and_in_which_epoch() -> None:
    line = line_of(PROMOTED, LABELS)
    assert line.getMessage() == (
        "event=Promoted trial=chain.kill.seed-0 group=ab12 shard=0 epoch=3 node=replica-0-1 "
        "version=120"
    )
    assert (line.name, line.levelname, line.created) == ("dps.shard", "INFO", 12.5)
    assert vars(line)["fields"]["version"] == 120


def test_texts_are_quoted_where_they_must_be_and_tables_are_left_out() -> None:
    ended = TrialEnded(1.0, "failed", 'it "hung": 100% of it\nfor ever')
    assert line_of(ended, {}).getMessage() == (
        'event=TrialEnded status=failed reason="it \\"hung\\": 100% of it\\nfor ever"'
    )
    started = TrialStarted(1.0, "seed-0", {"config": {"a": 1}}, {"numpy": "2"})
    assert line_of(started, {}).getMessage() == "event=TrialStarted trial=seed-0"


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (PROMOTED, logging.INFO),
        (Detected(1.0, 0, 2, "server-0", False, "lease"), logging.WARNING),
        (WorkerLeft(1.0, "worker-0", 1, "lost"), logging.WARNING),
        (WorkerLeft(1.0, "worker-0", 1, "finished"), logging.INFO),
        (TrialEnded(1.0, "invalid", "no fault came"), logging.WARNING),
        (Evaluated(1.0, 1.0, 0.5, 0.9), logging.DEBUG),
        (applied([1]), logging.NOTSET),
        (acked([1]), logging.NOTSET),
    ],
)
def test_what_is_wrong_stands_out_and_what_comes_with_every_update_makes_no_line(
    event: Event, level: int
) -> None:
    assert event.level == level


def test_lines_go_to_the_logger_of_their_subject_as_far_as_they_are_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log(PROMOTED, LABELS)
    assert caplog.records == []
    with caplog.at_level(logging.INFO, "dps"):
        log(PROMOTED, LABELS)
        log(applied([1]), LABELS)
    (line,) = caplog.records
    assert line.name == "dps.shard"


def test_not_even_a_warning_is_shown_unless_somebody_asks() -> None:
    script = (
        "from dps.events import Detected, log\n"
        "log(Detected(1.0, 0, 2, 'server-0', False, 'lease'), {})\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert (run.stdout, run.stderr) == (b"", b"")
