"""The processes that drive trials: each has its own cluster and runs one trial at a time.

The main process only assigns trials, enforces time limits and records what a driver cannot: a trial
that hangs, also in its set-up or tear-down, ends with its driver. If a driver or the scheduler of
its cluster is lost, the caller decides whether to start another attempt. Drivers end with the main
process, however that ends, and the processes that they started end with them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from tempfile import gettempdir
from types import FrameType
from typing import NamedTuple, NoReturn

import psutil

from dps.cluster.backends.processes import (
    ENVIRONMENT,
    end_with_parent,
    environment,
    fork_context,
    is_gone,
    scratch_prefix,
    without_interrupts,
)
from dps.errors import ConfigurationError, StoreUnavailable
from flows.config.trials import Trial
from flows.execution.attempt import Again, Attempt, end_unfinished, preload_of, recorded
from flows.monitor.course import Follower
from flows.monitor.progress import PlainView

# Time of a trial in addition to its training, which has the time limit of its configuration.
GRACE_SECONDS = 90.0
STOP_SECONDS = 5.0
LOOK_SECONDS = 0.02
KILLED_SECONDS = 30.0  # for what was killed, on a machine that is busy
MARK = "DPS_DRIVER"  # in the environment of a driver, and so of all that comes from it
# No process waits for a driver whose main process was killed: it only has to leave no files.
ORPHAN_SECONDS = 20.0


class LogLine(NamedTuple):
    """A line about a trial, for the user."""

    line: str


class Progress(NamedTuple):
    """The updates of a trial so far, and the state of its training."""

    updates: int
    state: str


class Finished(NamedTuple):
    """The attempt is over, and its record whole; or its end could not be written: `failure`."""

    failure: str


class SchedulerIsLost(NamedTuple):
    """The attempt is about to be over, with no end to its record, for this reason."""

    how: str


class Drivers:
    """Drivers for a number of trials at once; use as a context manager.

    Parameters
    ----------
    parallel
        Number of trials that run at once.
    grace
        Seconds that a trial may take for its set-up and tear-down together.
    """

    def __init__(self, parallel: int = 1, grace: float = GRACE_SECONDS) -> None:
        self.parallel = parallel
        self._drivers = [_Driver(grace) for _ in range(parallel)]

    def __enter__(self) -> Drivers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for driver in self._drivers:
            driver.ask_to_end()
        for driver in self._drivers:
            driver.end()

    def start(self, trials: Sequence[Trial]) -> None:
        """Start the processes for trials that are about to run, without waiting for them."""
        for driver, trial in zip(self._drivers, trials, strict=False):
            driver.start(trial)

    def run(
        self, attempts: Iterator[Attempt], view: PlainView, again: Again = end_unfinished
    ) -> Iterator[Attempt]:
        """Run attempts; yield each when it is over.

        The next attempt is taken from the iterator when a driver is free for it. Each leaves a
        record with an end, even if its driver is lost. While the caller is busy with one that is
        over, no other begins that it would disturb.

        If the driver of an attempt is lost, or the scheduler of its cluster, `again` is called with
        the attempt and the reason when nothing of it is left on this machine. A returned attempt
        runs in its place and is not yielded; None: the attempt is over, and `again` has put an end
        to its record. One that hung is not tried again.
        """
        while True:
            self._begin(attempts)
            busy = [driver for driver in self._drivers if driver.attempt is not None]
            if not busy:
                return
            left = min(driver.deadline for driver in busy) - time.monotonic()
            wait([driver.connection for driver in busy], max(0.0, left))
            for driver in busy:
                if (over := driver.listen(view, again)) is not None:
                    if not over.trial.config.cluster.shares_cores:
                        self._begin(attempts)
                    yield over

    def _begin(self, attempts: Iterator[Attempt]) -> None:
        for driver in self._drivers:
            if driver.attempt is None and (attempt := next(attempts, None)) is not None:
                driver.begin(attempt)


class _Driver:
    """One driver process, started when it is first needed and again after its loss."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._process: SpawnProcess | None = None
        self.connection: Connection
        self.attempt: Attempt | None = None
        self.deadline = 0.0
        self._mark = ""

    def start(self, trial: Trial) -> None:
        """Start the process, if there is none, for a trial that will be its first."""
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        get_temp_dir()  # shared with the driver, and removed here even if the driver is lost
        self.connection, remote = context.Pipe()
        preload = preload_of(trial.config) if trial.config.cluster.kind == "local" else ()
        self._process = context.Process(target=drive, args=(remote, preload), name="dps-driver")
        # A trial that does not share the cores computes in its driver, on one of them.
        limits = {} if trial.config.cluster.shares_cores else ENVIRONMENT
        self._mark = uuid.uuid4().hex
        # In this order: the former starts processes of this process, which must not be marked.
        with without_interrupts(), environment({**limits, MARK: self._mark}):
            self._process.start()
        remote.close()

    def begin(self, attempt: Attempt) -> None:
        self.start(attempt.trial)
        self.attempt = attempt
        config = attempt.trial.config
        limit = config.cluster.real_limit(config.time_limit)
        self.deadline = time.monotonic() + limit + self._grace
        with suppress(BrokenPipeError):  # it has just died, which `listen` will find
            self.connection.send(attempt)

    def listen(self, view: PlainView, again: Again) -> Attempt | None:
        """Show the driver's messages; return its attempt if that is over and not retried."""
        attempt = self.attempt
        assert attempt is not None
        try:
            while self.connection.poll():
                match self.connection.recv():
                    case LogLine(line):
                        view.show_line(attempt.trial, line)
                    case Progress(updates, state):
                        view.moved(attempt.trial, updates, state)
                    case Finished(failure):
                        self.attempt = None
                        if failure:
                            end_unfinished(attempt, failure)
                        return attempt
                    case SchedulerIsLost(how):
                        self.ask_to_end()  # with the jobs and the files of its cluster
                        self.end()
                        return self._lost(attempt, f"Dask's scheduler was lost: {how}", again)
        except (EOFError, OSError):  # the latter in the middle of a message
            return self._lost(attempt, f"its driver was lost: {self._ending()}", again)
        if time.monotonic() < self.deadline:
            return None
        config = attempt.trial.config
        limit = config.cluster.real_limit(config.time_limit)
        by = [] if config.cluster.kind == "virtual" else ["time_limit"]
        by += ["cluster.patience"] * hasattr(config.cluster, "patience")
        reason = (
            f"it hung: still running {limit + self._grace:g} s after its start ({limit:g} s for "
            f"{' and '.join(by)}, {self._grace:g} s for set-up and tear-down)"
        )
        self._end_at_once()
        end_unfinished(attempt, reason)
        self.attempt = None
        return attempt

    def ask_to_end(self) -> None:
        """Ask the driver to end its cluster, if any, and itself, and to remove its files."""
        if self._process is not None and self._process.pid:  # None if interrupted during its start
            self._process.terminate()

    def end(self) -> None:
        if self._process is not None and self._process.pid:
            self._process.join(STOP_SECONDS)
            self._process.kill()
            self._process.join()

    def _lost(self, attempt: Attempt, reason: str, again: Again) -> Attempt | None:
        """Start another attempt, or return this one if there is none."""
        self.attempt = None
        if left := self._end_at_once():
            pids = ", ".join(str(process.pid) for process in left)
            end_unfinished(attempt, f"{reason}; its processes cannot be ended: {pids}")
            return attempt
        if recorded(attempt.folder).ended is not None:
            return attempt  # though it could not report that any more
        if (following := again(attempt, reason)) is None:
            return attempt
        self.begin(following)
        return None

    def _end_at_once(self) -> list[psutil.Process]:
        """End the process and all its descendants; return those that cannot be ended.

        Leftover processes must not write to the files of the next attempt or take its cores. They
        usually end with the driver, and then leave no files.
        """
        assert self._process is not None
        self._process.kill()  # its nodes notice, also if they are stopped
        self._process.join()
        self.connection.close()
        began = time.monotonic()
        while left := list(_started_with(MARK, self._mark)):
            waited = time.monotonic() - began
            if waited > KILLED_SECONDS:
                break
            if waited > STOP_SECONDS:
                for process in left:
                    with suppress(psutil.Error):
                        process.kill()
            time.sleep(LOOK_SECONDS)
        for scratch in Path(gettempdir()).glob(f"{scratch_prefix(self._process.pid or 0)}*"):
            shutil.rmtree(scratch, ignore_errors=True)
        return left

    def _ending(self) -> str:
        assert self._process is not None
        self._process.join(STOP_SECONDS)
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return "killed by SIGKILL; if memory ran out, dmesg shows it"
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"exit code {code}"


def _started_with(variable: str, value: str) -> Iterator[psutil.Process]:
    """Yield the living processes that had this environment variable when they started.

    A child inherits it, so all descendants of a process are found, even after it has ended.
    Processes of other users are left out.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.environ().get(variable) == value and not is_gone(process, 0.0):
                yield process


# -- in the driver -------------------------------------------------------------------------------


def drive(connection: Connection, preload: Sequence[str] = ()) -> None:
    """Run incoming attempts until the other end closes the connection or asks to stop.

    `preload` are the modules that nodes of the first attempt need, if they run on this machine.
    """
    with suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, _interrupt)
        end_with_parent(_end_as_orphan)
        if preload:
            with suppress(ConfigurationError):  # the cluster reports it
                fork_context(preload)  # its imports run beside those of this process
        with suppress(EOFError, ConnectionError):
            _run_attempts(connection)
        signal.pause()  # the main process is ending; a signal arrives when it has ended
    _leave()


def _run_attempts(connection: Connection) -> NoReturn:
    gc.disable()  # modules last as long as the process: there is nothing to find in them
    from flows.execution.trial import run_trial

    gc.freeze()
    gc.enable()
    lock = threading.Lock()

    def send(message: LogLine | Progress | Finished | SchedulerIsLost) -> None:
        # Events come from several threads, the last ones when the main process has ended already.
        with lock, suppress(BrokenPipeError):
            connection.send(message)

    while True:
        attempt: Attempt = connection.recv()
        follower = Follower(
            lambda line: send(LogLine(line)),
            lambda updates, state: send(Progress(updates, state)),
        )
        failure = ""
        try:
            run_trial(
                attempt.trial,
                attempt.folder,
                follower,
                attempt.path,
                attempt.circumstances,
                follower.show_line,
                lost=lambda how: send(SchedulerIsLost(how)),
            )
        except StoreUnavailable as error:
            failure = f"StoreUnavailable: {error}"
        send(Finished(failure))


def _end_as_orphan() -> None:
    """Ask the main thread to end its cluster, which leaves no files then; exit if it does not."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    _leave()


def _leave() -> NoReturn:
    """End this process, and tidy up after a main process that cannot; its nodes end when it has.

    The interpreter would first close a client that was interrupted while it connected. That takes
    two minutes, for the client needs a thread, and none runs any more by then.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        shutil.rmtree(get_temp_dir(), ignore_errors=True)
    os._exit(0)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: it is ending
    raise KeyboardInterrupt
