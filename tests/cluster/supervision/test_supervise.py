"""Automatic return: SIGKILL of the driver and of the scheduler in the middle of a training.

The supervisor is this process. Whatever was acknowledged is noted in files by the workers, so what
comes after can be compared with it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import psutil
import pytest

import dps
from dps import Recovery, Timings
from dps.cluster.supervision.supervisor import _Limit
from dps.errors import ConfigurationError, ProgramFailed, ReturnedWarning, TooManyReturns
from dps.events import Returned
from dps.recovery.partial import PartialCheckpoint
from tests.support import supervised
from tests.support.deployment import deployed, workers
from tests.support.supervised import (
    EVERY,
    SHARDS,
    WORKERS,
    Outcome,
    acked,
    beginning,
    beginning_file,
)
from tests.support.training import PRELOAD, SECONDS
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

LIMIT_SECONDS = 3 * SECONDS  # for what waits for whole incarnations on a busy machine


@pytest.fixture(autouse=True)
def nothing_left(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that what was supervised leaves no temporary file, and nobody who waits to begin."""
    monkeypatch.setenv("TMPDIR", str(scratch))
    yield
    assert [each for each in psutil.Process().children() if runs(each)] == []
    # Dask's own folder is that of a deployment, and stays with it.
    assert {path.name for path in scratch.iterdir()} <= {"dask-scratch-space"}


def of_session(session: int) -> list[int]:
    """The processes of an incarnation, which has the session of its driver."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.NoSuchProcess):
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if os.getsid(process.pid) == session and not zombie:
                found.append(process.pid)
    return found


def kill_at(folder: Path, moments: list[tuple[str, int]]) -> None:
    """Kill processes of a supervised program, in a thread of its own.

    Parameters
    ----------
    moments
        Whom to kill in each incarnation, and after how many acknowledged updates of each worker.
    """

    def kill() -> None:
        for number, (whom, after) in enumerate(moments):
            eventually(beginning_file(folder, number).exists, LIMIT_SECONDS)
            begun = beginning(folder, number)
            eventually(partial(far_enough, number, after), LIMIT_SECONDS)
            os.kill(begun.scheduler if whom == "scheduler" else begun.driver, signal.SIGKILL)

    def far_enough(number: int, after: int) -> bool:
        return min(acked(folder, number)) >= after

    threading.Thread(target=kill, daemon=True).start()


def check(folder: Path, outcome: Outcome, told: list[Returned], scope: str, steps: int) -> None:
    """Each update is applied once; no return has cost more than one interval, and all is told."""
    assert outcome.versions == outcome.counts
    assert outcome.versions == [sum(applied.values()) for applied in outcome.applied]
    assert outcome.returns == len(told)
    versions, done = [0] * SHARDS, [0] * WORKERS
    for number, returned in enumerate(told):
        had = [version + sum(acked(folder, number)) for version in versions]
        begun = beginning(folder, number + 1)
        versions, done = begun.versions, begun.of_workers
        assert returned.returns == number + 1
        assert list(returned.versions) == versions
        for shard, version in enumerate(versions):
            # Workers had noted all that was acknowledged, but perhaps the last of each.
            assert had[shard] - version <= EVERY
            assert returned.lost[shard] <= max(0, had[shard] + WORKERS - version)
        if scope == "all":
            assert len(set(versions)) == 1
        assert of_session(beginning(folder, number).driver) == []
    # What no shard had is computed again; what one shard had is not, and is missing on others.
    last = acked(folder, len(told))
    assert [d + n for d, n in zip(done, last, strict=True)] == [steps] * WORKERS
    assert outcome.versions == [version + sum(last) for version in versions]
    if scope == "all":
        assert outcome.counts == [steps * WORKERS] * SHARDS
    assert of_session(beginning(folder, len(told)).driver) == []


def train(
    folder: Path,
    scope: str,
    moments: list[tuple[str, int]],
    address: str | None = None,
    standby: bool = False,
) -> list[Returned]:
    """Supervise a training whose processes are killed, check it, and return what was told."""
    told: list[Returned] = []
    steps = 150 + 2 * sum(after for _, after in moments)
    kill_at(folder, moments)
    run = partial(supervised.program, folder, scope, steps)
    if address is not None:
        run = partial(supervised.program_there, folder, address, steps)
    ready: dict[str, Any] = {"standby": True, "preload": PRELOAD} if standby else {}
    with pytest.warns(ReturnedWarning) as warned:
        outcome = dps.supervise(run, returns=len(moments), on_return=told.append, **ready)
    ours = [str(each.message) for each in warned if each.category is ReturnedWarning]
    assert len(ours) == len(told) == len(moments)
    for text, returned in zip(ours, told, strict=True):
        assert str(returned) in text
    check(folder, outcome, told, scope, steps)
    return told


@pytest.mark.parametrize(("whom", "standby"), [("driver", True), ("scheduler", False)])
def test_a_training_goes_on_after_a_kill(tmp_path: Path, whom: str, standby: bool) -> None:
    (returned,) = train(tmp_path, "shard", [(whom, 60)], standby=standby)
    cause = "ended by SIGKILL" if whom == "driver" else "connection to Dask's scheduler"
    assert cause in returned.cause
    assert 0 < returned.seconds < LIMIT_SECONDS


@pytest.mark.slow
def test_a_training_goes_on_after_kills_at_any_moment(tmp_path: Path) -> None:
    train(tmp_path, "all", [("scheduler", 17), ("driver", 0), ("driver", 60)])


@pytest.mark.slow
def test_what_is_killed_while_it_returns_goes_on_from_the_same_checkpoints(tmp_path: Path) -> None:
    told: list[Returned] = []
    kill_at(tmp_path, [("driver", 60)])
    run = partial(supervised.killed_as_it_returns, tmp_path, 200)
    with pytest.warns(ReturnedWarning):
        outcome = dps.supervise(run, on_return=told.append)
    (returned,) = told
    assert returned.returns == outcome.returns == 2
    begun = beginning(tmp_path, 2)
    assert list(returned.versions) == begun.versions
    assert max(sum(acked(tmp_path, 0)) - version for version in begun.versions) <= EVERY
    pushed = sum(acked(tmp_path, 2))
    assert outcome.counts == outcome.versions == [n + pushed for n in begun.versions]


@pytest.mark.slow
def test_a_deployment_whose_processes_outlive_the_driver_is_used_again(tmp_path: Path) -> None:
    with deployed(tmp_path, workers(4)) as address:
        (returned,) = train(tmp_path, "shard", [("driver", 60)], address)
    assert returned.seconds >= Timings().lease


def test_what_is_lost_too_often_is_given_up() -> None:
    with pytest.raises(TooManyReturns, match="SIGKILL; not restarted after 0 ret"):
        dps.supervise(supervised.killing, returns=0)
    limit = _Limit(2, within=10.0)
    assert [limit.allows(now) for now in (0.0, 1.0, 2.0, 10.5, 10.6, 30.0)] == [
        *(True, True, False),
        *(False, False, True),
    ]


@pytest.mark.slow
def test_a_scheduler_that_is_lost_before_anything_is_up_is_a_loss(tmp_path: Path) -> None:
    lost = partial(supervised.scheduler_lost_at_first, tmp_path)
    with pytest.warns(ReturnedWarning, match="the training starts over"):
        cause = dps.supervise(lost, returns=1)
    assert re.fullmatch(r"the connection to Dask's scheduler at tls://\S+ broke", cause)


def test_a_cluster_that_is_not_back_yet_is_looked_for_again() -> None:
    cause = dps.supervise(supervised.no_cluster_at_first, returns=2)
    assert re.match(r"the program found no cluster \(OSError: Timed out trying to connect", cause)
    with pytest.raises(TooManyReturns, match="found no cluster") as raised:
        dps.supervise(supervised.no_cluster_at_first, returns=1)
    assert isinstance(error := raised.value.__cause__, OSError)
    assert "in no_cluster_at_first" in str(error.__cause__)


@pytest.mark.slow
def test_neither_a_filter_of_warnings_nor_on_return_ends_the_training(tmp_path: Path) -> None:
    told: list[Returned] = []

    def fail(returned: Returned) -> None:
        told.append(returned)
        raise RuntimeError("nobody to tell")

    run = partial(supervised.killed_at_first, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dps.supervise(run, on_return=told.append) == 1
        with pytest.raises(ExceptionGroup, match="the program returned") as raised:
            dps.supervise(run, on_return=fail)
    assert [str(each) for each in raised.value.exceptions] == ["nobody to tell"]
    assert len(told) == 2


def test_a_file_that_is_missing_after_a_return_is_the_error_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dps.supervise(partial(supervised.opening_a_file, tmp_path / "train.csv"), returns=2)


def test_an_error_of_the_program_is_raised_and_not_tried_again() -> None:
    """The supervisor keeps its folder of temporary files, whose name the program inherits."""
    own = Path(get_temp_dir())
    with pytest.raises(ValueError, match="no luck in start 0") as raised:
        dps.supervise(supervised.failing)
    assert "in failing" in str(raised.value.__cause__)
    assert own.is_dir()


def test_a_program_that_exits_or_returns_what_cannot_be_sent_says_so() -> None:
    with pytest.raises(ProgramFailed, match="exited with code 3"):
        dps.supervise(supervised.exiting)
    with pytest.raises(ProgramFailed, match="cannot pickle 'generator'"):
        dps.supervise(supervised.returning)


def test_a_parameter_server_that_is_left_open_is_no_lost_scheduler(tmp_path: Path) -> None:
    assert dps.supervise(partial(supervised.left_open, tmp_path), returns=0) == 0


def test_what_cannot_be_supervised_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"program=1, expected a function: .*\(session\)"):
        dps.supervise(1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="returns=-1"):
        dps.supervise(supervised.failing, returns=-1)
    with pytest.raises(ConfigurationError, match="within=0"):
        dps.supervise(supervised.failing, within=0)


def test_a_recovery_that_cannot_be_gone_on_from_whole_is_refused() -> None:
    recovery = Recovery(PartialCheckpoint(path="never-written"))
    said = r"PartialCheckpoint.* restores blocks of different age"
    with pytest.raises(ConfigurationError, match=said):
        dps.supervise(partial(supervised.recovering, recovery))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_program_ends_with_its_supervisor(tmp_path: Path, number: signal.Signals) -> None:
    flag = tmp_path / "interrupted"
    script = f"""
import dps
from functools import partial
from pathlib import Path
from tests.support import supervised
if __name__ == "__main__":
    dps.supervise(partial(supervised.waiting, Path({str(flag)!r})), standby=True)
"""
    file = tmp_path / "script.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(file)], env=environment, stderr=subprocess.PIPE, text=True
    ) as user:
        eventually(flag.with_suffix(".began").exists, LIMIT_SECONDS)
        programs = [each.pid for each in psutil.Process(user.pid).children() if runs(each)]
        user.send_signal(number)
        _, errors = user.communicate(timeout=SECONDS)
    assert user.returncode == -number
    if number == signal.SIGINT:  # the program had the time to end in its own way
        assert flag.exists()
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
    eventually(lambda: not any(of_session(program) for program in programs), SECONDS)


def runs(process: psutil.Process) -> bool:
    """Whether it is a program's process, and not one of multiprocessing's own."""
    return os.getsid(process.pid) == process.pid


def test_the_supervisor_has_no_need_of_dask() -> None:
    loaded = "import sys, dps; dps.supervise; sys.exit('distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded]).returncode == 0
