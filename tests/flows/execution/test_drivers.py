"""Drivers as processes: whatever becomes of one, its trial has an end and the others go on."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from distributed.client import FutureCancelledError
from rich.console import Console

from dps.cluster.backends.processes import ENVIRONMENT, is_gone
from flows.config.cluster import VirtualSection
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, expand
from flows.execution.attempt import Again, Attempt, end_unfinished
from flows.execution.drivers import MARK, Drivers
from flows.execution.trial import reason_of
from flows.monitor.progress import PlainView
from flows.records.events import TrialEnded
from flows.records.record import EVENTS_FILE, end_record, read_record
from tests.flows.execution.test_run import CONFIG
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

GRACE = 5.0


def trials(seeds: int) -> tuple[Trial, ...]:
    training = {"workers": 1, "updates": 20}
    settings = {**CONFIG, "training": training, "seeds": list(range(seeds))}
    return expand(ExperimentConfig.model_validate(settings))


def virtual(seeds: int, **cluster: float) -> list[Trial]:
    """The same trials on virtual time."""
    section = VirtualSection.model_validate({"kind": "virtual", **cluster})
    return [
        replace(trial, config=trial.config.model_copy(update={"cluster": section}))
        for trial in trials(seeds)
    ]


def driver_pid() -> int:
    (pid,) = (
        child.pid
        for child in psutil.Process().children()
        if "spawn_main" in " ".join(child.cmdline())
    )
    return pid


def run(
    folder: Path,
    planned: Sequence[Trial],
    begun: Callable[[Trial], object] = lambda trial: None,
    again: Again = end_unfinished,
    over: Callable[[Trial], object] = lambda trial: None,
) -> list[tuple[str, str]]:
    """Run trials; return the status and reason of each.

    `begun` is called in a thread of its own when the record of a trial is there, and `over` when
    the trial is over.
    """
    threads, ends = [], []

    def begin(trial: Trial) -> None:
        eventually((folder / trial.name / EVENTS_FILE).exists, 30)
        begun(trial)

    def attempts() -> Iterator[Attempt]:
        for trial in planned:
            view.started(trial)
            threads.append(threading.Thread(target=begin, args=(trial,)))
            threads[-1].start()
            yield Attempt(trial, folder / trial.name)

    view = PlainView(Console(file=io.StringIO()))
    view.begin("small", planned, [])
    with Drivers(grace=GRACE) as drivers:
        for attempt in drivers.run(attempts(), view, again):
            over(attempt.trial)
            ended = read_record(attempt.folder / EVENTS_FILE).ended
            assert ended is not None
            ends.append((attempt.trial.name, ended.status, ended.reason))
    for thread in threads:
        thread.join()
    assert [name for name, *_ in ends] == [trial.name for trial in planned]
    return [(status, reason) for _, status, reason in ends]


@pytest.mark.slow
def test_whatever_becomes_of_a_trial_the_next_ones_run(tmp_path: Path) -> None:
    broken, whole, hung, lost, last = trials(5)
    # What no check of a configuration foresees.
    unforeseen = broken.config.model_copy(update={"evaluation": None})
    broken = replace(broken, config=unforeseen)
    hung = replace(hung, config=hung.config.model_copy(update={"time_limit": 0.5}))
    sent = {lost.name: signal.SIGKILL, hung.name: signal.SIGSTOP}

    def begun(trial: Trial) -> None:
        if trial.name in sent:
            os.kill(driver_pid(), sent[trial.name])

    ends = run(tmp_path, [broken, whole, hung, lost, last], begun)
    assert [status for status, _ in ends] == ["failed", "valid", "failed", "failed", "valid"]
    assert ends[0][1].startswith("AttributeError: 'NoneType' object has no attribute")
    assert "AttributeError" in (tmp_path / broken.name / "traceback.txt").read_text()
    assert ends[2][1].startswith(
        "it hung: still running 5.5 s after its start (0.5 s for time_limit, 5 "
    )
    assert ends[3][1].startswith("its driver was lost: killed by SIGKILL; ")
    assert "dmesg" in ends[3][1]


def test_a_driver_that_is_lost_when_its_record_has_an_end_is_not_tried_again(
    tmp_path: Path,
) -> None:
    def begun(trial: Trial) -> None:
        path = tmp_path / trial.name / EVENTS_FILE
        eventually(lambda: read_record(path).events, 30)
        pid = driver_pid()
        os.kill(pid, signal.SIGSTOP)
        end_record(path, TrialEnded(time.time(), "valid", ""))
        os.kill(pid, signal.SIGKILL)

    def again(attempt: Attempt, reason: str) -> None:
        raise AssertionError(reason)

    assert run(tmp_path, trials(1), begun, again) == [("valid", "")]


@pytest.mark.slow
def test_what_a_lost_driver_leaves_is_ended_before_another_attempt(tmp_path: Path) -> None:
    left: list[subprocess.Popen[bytes]] = []
    found: list[bool] = []

    def begun(trial: Trial) -> None:
        driver = psutil.Process(driver_pid())
        # As of a program that the code of a trial has started, and that nothing ends by itself.
        environment = {**os.environ, MARK: driver.environ()[MARK]}
        left.append(subprocess.Popen(["sleep", "600"], env=environment))
        driver.kill()

    def again(attempt: Attempt, reason: str) -> None:
        found.extend(is_gone(each.pid, 0) for each in left)
        end_unfinished(attempt, reason)

    run(tmp_path, trials(1), begun, again)
    for each in left:
        each.kill()
        each.wait()
    assert found == [True]


def test_a_trial_on_virtual_time_has_one_core_and_a_limit_of_real_time(tmp_path: Path) -> None:
    whole, endless = virtual(1)[0], virtual(2, patience=0.01)[1]
    # Its limit is in seconds of its own clock, and says nothing of the time that it takes.
    long = endless.config.training.model_copy(update={"updates": 10**6})
    changes = {"training": long, "time_limit": 1e9}
    endless = replace(endless, config=endless.config.model_copy(update=changes))

    def over(trial: Trial) -> None:
        if trial is whole:
            assert psutil.Process(driver_pid()).environ().items() >= ENVIRONMENT.items()

    ends = run(tmp_path, [whole, endless], over=over)
    assert [status for status, _ in ends] == ["valid", "failed"]
    assert ends[1][1].startswith(
        "it hung: still running 5.01 s after its start (0.01 s for cluster.patience, 5 s for"
    )


def test_a_driver_on_virtual_time_goes_on_while_what_is_over_is_read(tmp_path: Path) -> None:
    first, second = virtual(2)

    def over(trial: Trial) -> None:
        if trial is first:
            log = tmp_path / second.name / EVENTS_FILE
            eventually(lambda: log.exists() and read_record(log).ended is not None, 30)

    run(tmp_path, [first, second], over=over)


def test_a_lost_scheduler_is_told_as_such_and_not_as_unforeseen(tmp_path: Path) -> None:
    lost = FutureCancelledError("dps-worker-0", "scheduler-connection-lost", "Client lost it")
    assert reason_of(lost, tmp_path) == "Dask's scheduler was lost, and the coordinator with it"
    cancelled = FutureCancelledError("dps-worker-0", "cancelled by somebody")
    assert "unforeseen" in reason_of(cancelled, tmp_path)


def test_a_traceback_is_named_only_if_it_was_written(tmp_path: Path) -> None:
    error = ValueError("no number")
    told = "ValueError: no number (unforeseen; see traceback.txt beside the record)"
    assert reason_of(error, tmp_path) == told
    assert (tmp_path / "traceback.txt").exists()
    assert reason_of(error, tmp_path / "missing") == "ValueError: no number (unforeseen)"
