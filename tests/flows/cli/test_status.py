"""`dps status`: what is done, running and waiting, from files alone, beside real processes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dps.errors import ConfigurationError
from dps.events import Event
from flows.monitor.status import State, Status, running, show, status_of, statuses
from flows.records.events import DashboardServed, TrialEnded
from flows.records.owner import LOCK_FILE, exclusive, owner_of
from flows.records.record import EVENTS_FILE, EventWriter, write_grid
from tests.support.synthetic import missed, toy_events, write_events

DONE, FAILED, GOING, WAITING = "none.kill.seed-0", "none.kill.seed-1", "chain.kill.seed-0", "last"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An experiment of four trials: one is valid, one failed, one has no end yet."""
    folder = tmp_path / "results" / "demo"
    write_events(folder / DONE, toy_events("none"))
    *events, end = toy_events("none", seed=1)
    write_events(folder / FAILED, [*events, TrialEnded(end.t, "failed", "the store burnt down")])
    go_on(folder)
    write_grid(folder, [GOING, WAITING, DONE, FAILED], 0)
    return folder


def states(status: Status) -> dict[str, State]:
    return {trial.trial: trial.state for trial in status.trials}


def go_on(folder: Path, *events: Event) -> None:
    """Write a record that has a beginning and no end, as a trial does that runs."""
    started, *rest, _ = toy_events("chain")
    rest.sort(key=lambda event: event.t)
    with EventWriter(folder / GOING / EVENTS_FILE) as write:
        for event in (replace(started, t=time.time()), *events, *rest[: len(rest) // 2]):
            write(event)


def shown(here: Path) -> str:
    out = io.StringIO()
    show(running(here), Console(file=out, width=120))
    return out.getvalue()


@contextmanager
def at_work(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder, as `dps run` does."""
    script = (
        "import sys, pathlib\n"
        "from flows.records.owner import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])):\n"
        "    print('at work', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_what_was_left_before_is_waiting_and_what_is_written_now_is_running(
    folder: Path, tmp_path: Path
) -> None:
    assert states(status_of(folder)) == {
        GOING: "interrupted",
        WAITING: "missing",
        DONE: "valid",
        FAILED: "failed",
    }
    old = time.time() - 100
    for name in (GOING, DONE, FAILED):
        os.utime(folder / name / EVENTS_FILE, (old, old))
    with at_work(folder):
        before = states(status_of(folder))
        assert (before[GOING], before[FAILED], before[DONE]) == ("waiting", "waiting", "valid")
        assert before[WAITING] == "waiting"
        assert "it is getting ready, or writes its report" in shown(tmp_path)
        go_on(folder, DashboardServed(time.time(), "http://127.0.0.1:8787/status"))
        (status,) = running(tmp_path)
        assert states(status) == {**before, GOING: "running"}
        training = status.trials[0].training
        assert training is not None
        assert 0 < (training.done or 0) < 800
        told = shown(tmp_path)
        assert f"{training.done}/800" in told
        assert f"{GOING}: Dask dashboard: http://127.0.0.1:8787/status" in told
        assert "4 trials: 1 done, 1 running, 2 waiting" in told


def test_one_that_was_killed_is_not_running(folder: Path, tmp_path: Path) -> None:
    with at_work(folder) as process:
        assert owner_of(folder) is not None
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ConfigurationError, match="no experiment is running"):
            running(tmp_path)  # it has ended, and nobody has waited for it
        process.wait(10)
        with pytest.raises(ConfigurationError) as caught:
            running(tmp_path, "demo")
    assert str(caught.value) == (
        "demo: 4 trials: 2 done, 1 interrupted, 1 missing; it does not run"
    )


def test_a_process_of_the_same_number_is_not_taken_for_it(folder: Path, tmp_path: Path) -> None:
    with exclusive(folder):
        note = json.loads((folder / LOCK_FILE).read_text())
        assert running(tmp_path, "demo")
    assert owner_of(folder) is None
    (folder / LOCK_FILE).write_text(json.dumps({**note, "began": note["began"] - 100}))
    with pytest.raises(ConfigurationError, match=r"demo: .* it does not run"):
        running(tmp_path, "demo")


def test_one_on_another_host_is_judged_by_its_files(folder: Path, tmp_path: Path) -> None:
    began = time.time() - 1000
    note = {"host": "elsewhere", "pid": 1, "began": began, "since": began}
    (folder / LOCK_FILE).write_text(json.dumps(note))
    told = shown(tmp_path)
    assert "by process 1 on elsewhere" in told
    assert "nothing was heard" not in told
    old = time.time() - 120
    os.utime(folder / GOING / EVENTS_FILE, (old, old))
    assert f"{GOING}: nothing was heard of it for 2 min" in shown(tmp_path)


def test_experiments_that_do_not_run_are_listed_with_what_is_left_of_them(
    folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "results" / "other"
    write_events(other / DONE, missed(toy_events("none")))
    write_events(other / FAILED, toy_events("none", seed=1))
    damaged = other / FAILED / EVENTS_FILE
    damaged.write_text(damaged.read_text().replace("TrialEnded", "TrialBegun", 1))
    write_grid(folder, [GOING, WAITING, DONE, FAILED], 0, command="dps run mine.yaml")
    out = io.StringIO()
    show(statuses(tmp_path), Console(file=out, width=120))
    assert out.getvalue().splitlines() == [
        "demo: 4 trials: 2 done, 1 interrupted, 1 missing; it does not run",
        "  3 missing or failed: dps run mine.yaml",
        "other: 2 trials: 1 done, 1 damaged; it does not run",
        "  1 missing or failed: dps run CONFIG",
        "  1 invalid: dps run CONFIG --retry-invalid",
    ]
    with at_work(other):
        assert [status.experiment for status in statuses(tmp_path)] == ["other", "demo"]
    (one,) = statuses(tmp_path, "demo")
    out = io.StringIO()
    show([one], Console(file=out, width=120))
    assert f"{WAITING}" in out.getvalue()


def test_where_nothing_is_recorded_it_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no experiment is running in .*; demo: 4 trials"):
        running(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no experiment 'dmo' .* did you mean 'demo'"):
        statuses(tmp_path, "dmo")
    with pytest.raises(ConfigurationError, match=r"is running in .*; nothing is recorded there"):
        running(tmp_path / "nowhere")
    (folder / LOCK_FILE).write_text("{")
    with pytest.raises(ConfigurationError, match="does not name the process that writes"):
        statuses(tmp_path)
