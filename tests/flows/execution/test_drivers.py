"""Drivers as processes: whatever becomes of one, its trial has an end and the others go on."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from distributed.client import FutureCancelledError
from rich.console import Console

from dps.cluster.backends.fork_server import ENVIRONMENT
from dps.cluster.backends.processes import is_gone
from dps.events import TrialEnded
from flows.config.cluster import VirtualSection
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, expand
from flows.execution.attempt import Attempt, end_unfinished
from flows.execution.drivers import MARK, Drivers
from flows.execution.trial import reason_of
from flows.monitor.progress import PlainView
from flows.records.record import EVENTS_FILE, end_record, read_record
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

GRACE = 5.0


def trials(seeds: int) -> tuple[Trial, ...]:
    settings = {
        "experiment": "small",
        "workload": {"kind": "softmax"},
        "dataset": {"kind": "digits"},
        "training": {"workers": 1, "updates": 20},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "server": {"shards": 1},
        "seeds": list(range(seeds)),
    }
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


def signal_when_set_up(folder: Path, number: int) -> None:
    """Send a signal to the driver of a trial that has just begun to set up its cluster."""
    eventually((folder / EVENTS_FILE).exists, 30)
    os.kill(driver_pid(), number)


@pytest.mark.slow
def test_whatever_becomes_of_a_trial_the_next_ones_run(tmp_path: Path) -> None:
    broken, whole, hung, lost, last = trials(5)
    # What no check of a configuration foresees.
    unforeseen = broken.config.model_copy(update={"evaluation": None})
    planned = [
        replace(broken, config=unforeseen),
        whole,
        replace(hung, config=hung.config.model_copy(update={"time_limit": 0.5})),
        lost,
        last,
    ]
    sent = {lost.name: signal.SIGKILL, hung.name: signal.SIGSTOP}
    threads = []

    def attempts() -> Iterator[Attempt]:
        for trial in planned:
            view.started(trial)
            folder = tmp_path / trial.name
            if trial.name in sent:
                arguments = (folder, sent[trial.name])
                threads.append(threading.Thread(target=signal_when_set_up, args=arguments))
                threads[-1].start()
            yield Attempt(trial, folder)

    out = io.StringIO()
    view = PlainView(Console(file=out))
    view.begin("small", planned, [])
    with Drivers(grace=GRACE) as drivers:
        over = [attempt.trial.name for attempt in drivers.run(attempts(), view)]
        pid = driver_pid()
    assert is_gone(pid, 0)
    for thread in threads:
        thread.join()
    assert over == [trial.name for trial in planned]
    ends = {name: read_record(tmp_path / name / EVENTS_FILE).ended for name in over}
    told = {name: (end.status, end.reason) for name, end in ends.items() if end is not None}
    assert told[whole.name] == told[last.name] == ("valid", "")
    assert {told[trial.name][0] for trial in (broken, lost, hung)} == {"failed"}
    assert told[broken.name][1].startswith("AttributeError: 'NoneType' object has no attribute")
    assert "AttributeError" in (tmp_path / broken.name / "traceback.txt").read_text()
    assert told[lost.name][1].startswith("its driver was lost: ended by SIGKILL, ")
    assert "dmesg" in told[lost.name][1]
    assert told[hung.name][1].startswith("it hung: not over 5.5 s after its start")


def test_a_driver_that_is_lost_when_its_record_has_an_end_is_not_tried_again(
    tmp_path: Path,
) -> None:
    [trial] = trials(1)
    folder = tmp_path / trial.name
    path = folder / EVENTS_FILE

    def end() -> None:
        eventually(lambda: path.exists() and read_record(path).events, 30)
        pid = driver_pid()
        os.kill(pid, signal.SIGSTOP)
        end_record(path, TrialEnded(time.time(), "valid", ""))
        os.kill(pid, signal.SIGKILL)

    lost: list[str] = []

    def again(attempt: Attempt, reason: str) -> None:
        lost.append(reason)

    ending = threading.Thread(target=end)
    ending.start()
    view = PlainView(Console(file=io.StringIO()))
    view.begin("small", [trial], [])
    with Drivers() as drivers:
        over = list(drivers.run(iter([Attempt(trial, folder)]), view, again))
    ending.join()
    assert [attempt.trial for attempt in over] == [trial]
    assert not lost
    ended = read_record(path).ended
    assert ended is not None
    assert ended.status == "valid"


@pytest.mark.slow
def test_what_a_lost_driver_leaves_is_ended_before_another_attempt(tmp_path: Path) -> None:
    [trial] = trials(1)
    folder = tmp_path / trial.name
    left: list[subprocess.Popen[bytes]] = []

    def lose() -> None:
        eventually((folder / EVENTS_FILE).exists, 30)
        driver = psutil.Process(driver_pid())
        # As of a program that the code of a trial has started, and that nothing ends by itself.
        environment = {**os.environ, MARK: driver.environ()[MARK]}
        left.append(subprocess.Popen(["sleep", "600"], env=environment))
        driver.kill()

    found: list[bool] = []

    def again(attempt: Attempt, reason: str) -> None:
        found.extend(is_gone(each.pid, 0) for each in left)
        end_unfinished(attempt, reason)

    losing = threading.Thread(target=lose)
    losing.start()
    view = PlainView(Console(file=io.StringIO()))
    view.begin("small", [trial], [])
    with Drivers() as drivers:
        over = list(drivers.run(iter([Attempt(trial, folder)]), view, again))
    losing.join()
    for each in left:
        each.kill()
        each.wait()
    assert len(over) == 1
    assert found == [True]


def test_a_trial_on_virtual_time_has_one_core_and_a_limit_of_real_time(tmp_path: Path) -> None:
    whole, endless = virtual(1)[0], virtual(2, patience=0.01)[1]
    # Its limit is in seconds of its own clock, and says nothing of the time that it takes.
    long = endless.config.training.model_copy(update={"updates": 10**6})
    endless = replace(
        endless, config=endless.config.model_copy(update={"training": long, "time_limit": 1e9})
    )
    view = PlainView(Console(file=io.StringIO()))
    view.begin("small", [whole, endless], [])
    planned = (Attempt(trial, tmp_path / trial.name) for trial in (whole, endless))
    with Drivers(grace=GRACE) as drivers:
        for attempt in drivers.run(planned, view):
            if attempt.trial is whole:
                limits = psutil.Process(driver_pid()).environ()
    assert limits.items() >= ENVIRONMENT.items()
    ends = [read_record(tmp_path / trial.name / EVENTS_FILE).ended for trial in (whole, endless)]
    assert [end.status for end in ends if end is not None] == ["valid", "failed"]
    assert ends[1] is not None
    assert ends[1].reason.startswith(
        "it hung: not over 5.01 s after its start (0.01 s of computing, by cluster.patience"
    )


def test_a_driver_on_virtual_time_goes_on_while_what_is_over_is_read(tmp_path: Path) -> None:
    first, second = virtual(2)
    view = PlainView(Console(file=io.StringIO()))
    view.begin("small", [first, second], [])
    planned = (Attempt(trial, tmp_path / trial.name) for trial in (first, second))
    with Drivers(grace=GRACE) as drivers:
        running = drivers.run(planned, view)
        assert next(running).trial is first
        log = tmp_path / second.name / EVENTS_FILE
        eventually(lambda: log.exists() and read_record(log).ended is not None, 30)
        assert [attempt.trial for attempt in running] == [second]


def test_a_lost_scheduler_is_told_as_such_and_not_as_unforeseen(tmp_path: Path) -> None:
    lost = FutureCancelledError("dps-worker-0", "scheduler-connection-lost", "Client lost it")
    assert reason_of(lost, tmp_path) == "Dask's scheduler was lost, and the coordinator with it"
    cancelled = FutureCancelledError("dps-worker-0", "cancelled by somebody")
    assert "unforeseen" in reason_of(cancelled, tmp_path)
