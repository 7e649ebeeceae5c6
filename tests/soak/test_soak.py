"""The soak: a short one, and what it says when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dps.core.replay import Continue
from dps.events import CheckpointWritten, Decided, Restored
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.layered import Layered
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from flows.records.record import Record
from tests.soak.counting import Violation
from tests.soak.pool import MEBIBYTE, Sample, _growth
from tests.soak.round import Case, require_newest, restorations_of

SECONDS = 110


@pytest.mark.slow
@pytest.mark.cluster
def test_a_short_soak_keeps_every_promise(tmp_path: Path) -> None:
    strategies = ("chain(2)", "checkpoint", "stateless")
    only = [word for name in strategies for word in ("--only", name)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--minutes=0", "--faults=3", *only],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for number, name in enumerate(strategies, 1):
        assert f"round   {number}  {name}" in ended.stdout
    assert "No process and no file is left behind." in ended.stdout


@pytest.mark.parametrize(
    ("recovery", "both", "interval", "kept"),
    [
        (Recovery(), False, float("inf"), 0),
        (Recovery(Checkpoint(every=7)), False, 7, 0),
        (Recovery(Chain()), False, 0, 0),
        (Recovery(Chain(), Continue(limit=5, buffer="worker")), False, 0, 5),
        (Recovery(SharedStore(), Continue()), False, 0, 0),
        (Recovery(SharedStore(), Continue()), True, float("inf"), 0),
        (Recovery(Layered(Chain())), False, 0, 0),
        (Recovery(Layered(Chain())), True, float("inf"), 0),
    ],
)
def test_what_a_strategy_may_lose(
    recovery: Recovery, both: bool, interval: float, kept: int
) -> None:
    case = Case("a case", recovery, both=both)
    assert (case.interval, case.kept_by_worker) == (interval, kept)


def test_growth_is_found_after_the_first_third() -> None:
    def samples(memory: list[int], files: list[int]) -> list[Sample]:
        return [Sample(m * MEBIBYTE, f) for m, f in zip(memory, files, strict=True)]

    assert _growth(samples([50, 90, 90, 100, 100, 100, 100, 105, 110], [9] * 9)) == ""
    grown = _growth(samples([100, 100, 100, 100, 110, 120, 130, 140, 150], [9] * 9))
    assert grown == "memory grew from 110 to 140 MiB"
    leaky = _growth(samples([100] * 9, [10, 20, 30, 40, 50, 60, 70, 80, 90]))
    assert leaky == "open files grew from 50 to 80"


def test_the_start_of_a_shard_is_no_restoration_even_if_it_was_not_told_of() -> None:
    start = Restored(0.0, 0, 1, "server-0", 0, "initial")
    later = Restored(0.1, 0, 3, "spare-0", 0, "initial")
    of_another = Restored(0.1, 1, 3, "spare-1", 0, "initial")
    assert restorations_of(0, [start, of_another, later]) == {3}
    assert restorations_of(0, [of_another, later]) == {3}


def test_a_restoration_counts_once_also_if_its_host_was_killed_before_it_could_tell() -> None:
    decided = [Decided(0.0, 0, epoch, "spare-0", "restore") for epoch in (1, 3, 5)]
    chosen = Decided(0.1, 0, 7, "replica-0-1", "reconfigure")
    told = Restored(0.1, 0, 3, "spare-0", 30, "checkpoint")
    assert restorations_of(0, [*decided, chosen, told]) == {3, 5}


@pytest.mark.parametrize(
    ("written", "older"),
    [((0.4, 3, 40), True), ((0.6, 3, 40), False), ((0.4, 5, 40), False), ((0.4, 2, 40), False)],
    ids=["complete before", "complete too late", "of the new epoch", "of an epoch before"],
)
def test_a_layer_is_not_gone_back_further_than_to_its_newest_checkpoint(
    written: tuple[float, int, int], older: bool
) -> None:
    at, epoch, version = written
    record = Record(
        (
            CheckpointWritten(0.2, 0, 3, 20, 100, 0.1),
            CheckpointWritten(at, 0, epoch, version, 100, 0.1),
            CheckpointWritten(0.3, 1, 3, 90, 100, 0.1),
            Decided(0.5, 0, 5, "spare-0", "restore"),
            Restored(0.7, 0, 5, "spare-0", 20, "checkpoint"),
        )
    )
    if older:
        with pytest.raises(Violation, match="went back to version 20 in epoch 5, though 40"):
            require_newest(0, record)
    else:
        require_newest(0, record)
