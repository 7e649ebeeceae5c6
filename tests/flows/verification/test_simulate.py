"""`dps simulate`: many schedules, one again, and errors for people."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
from typer.testing import CliRunner

from dps.errors import ConfigurationError
from dps.sim.broken.hunt import VARIANTS
from dps.sim.patches import patched
from dps.sim.schedules.draw import named
from dps.sim.schedules.shrink import shrink
from dps.sim.simulate import simulate
from flows.cli import app
from tests.support.waiting import eventually

ENDLESS = """
import signal, time
from flows.cli import _interrupt
from flows.verification.simulate import _in_processes

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started it may ignore it
signal.signal(signal.SIGTERM, _interrupt)
list(_in_processes(time.sleep, [3600.0, 3600.0]))
"""


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.output


@pytest.mark.slow
def test_schedules_are_counted() -> None:
    code, output = run("--schedules", "5")
    assert code == 0
    assert "5 schedules" in output
    assert "0 violations" in output


@pytest.mark.slow
def test_a_replay_prints_faults_and_trace_and_is_the_same_again() -> None:
    code, output = run("--replay", "chain(2):3:0,1:calm")
    assert code == 0
    assert "No promise is broken" in output
    assert "EnterWorker" in output
    assert (code, output) == run("--replay", "chain(2):3:0,1:calm")


@pytest.mark.parametrize("name", ["chain(2", "chain(2):x", "chain(2):1:99", "chain(2)"])
def test_a_schedule_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        named(name)


@pytest.mark.slow
def test_a_violation_is_shrunk_to_what_it_takes_and_replays() -> None:
    with patched(*VARIANTS["mailbox left"].patches):
        record = simulate(named("stateless:1"))
        assert record.violation is not None
        less = shrink(record)
        assert len(less.schedule.faults) <= len(record.schedule.faults)
        assert less.violation is not None
        assert less.violation.kind == record.violation.kind
        again = simulate(named(less.schedule.name))
        assert again.trace == less.trace
        assert str(again.violation) == str(less.violation)
    assert simulate(named(less.schedule.name)).violation is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_from_outside_it_ends_its_processes_and_leaves_no_semaphores(number: int) -> None:
    it = subprocess.Popen([sys.executable, "-c", ENDLESS], stderr=subprocess.PIPE, text=True)
    children: list[psutil.Process] = []
    try:
        parent = psutil.Process(it.pid)
        eventually(lambda: len(parent.children()) >= 3, 60)  # one keeps track of semaphores
        children = parent.children()
        it.send_signal(number)
        _, said = it.communicate(timeout=60)
        assert "leaked" not in said
        assert it.returncode != 0
        assert not psutil.wait_procs(children, timeout=10)[1]
    finally:
        for process in (it, *children):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.slow
def test_a_fresh_series_is_that_of_a_commit_and_says_how_to_repeat_it() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    code, output = run("--fresh", commit, "--schedules", "2")
    assert code == 0
    assert "dps simulate --schedules 2 --seed 19088743" in output
    assert output.count("2 schedules") == 1


@pytest.mark.parametrize("commit", ["", "HEAD", "0123"])
def test_a_commit_is_a_hash(commit: str) -> None:
    code, output = run("--fresh", commit, "--schedules", "2")
    assert code == 2
    assert "expected the hash of a commit" in output
