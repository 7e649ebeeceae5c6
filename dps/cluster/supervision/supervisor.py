"""The supervisor of a program: restart it when its driver or its scheduler is lost.

Each incarnation of the program is a process in a separate operating-system session, which
identifies all processes that it starts. The supervisor does not import Dask.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, TypeVar

import psutil

from dps.cluster.backends.processes import (
    end_with_parent,
    fork_context,
    is_gone,
    process_of,
    scratch_prefix,
    without_interrupts,
)
from dps.cluster.supervision.messages import ClusterLost, Finished, Past, Raised, Serving
from dps.core.arguments import check_function
from dps.core.ranges import argument_above_zero, integer_argument, refused
from dps.errors import DeadlineExceeded, ProgramFailed, ReturnedWarning, TooManyReturns
from dps.events import Returned, log

T = TypeVar("T")

EXIT_SECONDS = 10.0
GRACE_SECONDS = 3.0  # for nodes of a `LocalCluster`, which end and clean up after their driver
INTERRUPT_SECONDS = 5.0
END_SECONDS = 30.0  # for killed processes, on a busy machine
LOOK_SECONDS = 0.02


def supervise(
    program: Callable[[Any], T],
    *,
    returns: int = 5,
    within: float = 600.0,
    on_return: Callable[[Returned], None] | None = None,
    standby: bool = False,
    preload: Sequence[str] | None = None,
) -> T:
    """Run a program, and restart it when its driver or its scheduler is lost; return its result.

    It is restarted when a signal ends its process, and when the connection to Dask's scheduler
    breaks while a parameter server is open or starts; after a return, also when it finds no
    cluster. All other processes of its session on this machine are ended first, except those that
    it started in a new session (`start_new_session=True`). Parameter servers resume from
    their newest complete checkpoints; `Worker.done` is the number of updates that a worker has in
    them. Each return is a `ReturnedWarning` (never raised), a `Returned` event and a line in the
    log.

    Parameters
    ----------
    program
        Called with a `Session` in a separate process, which is the driver: it creates a Dask
        client and calls `Session.parameter_server`. A function of a module, or a
        `functools.partial` of one, as for `multiprocessing`.
    returns, within
        It is restarted at most `returns` times within `within` seconds.
    on_return
        Called in this process with a `Returned` for each parameter server that is up again. Its
        errors do not end the program; they are raised when the program has returned.
    standby
        Whether to keep a process with Dask imported ready for a return. Returns are then faster,
        at the cost of about 100 MB of memory.
    preload
        The `preload` of the program's `LocalCluster`: the process that its nodes are forked from
        then starts beside the program, and is kept ready by `standby` too, with about 100 MB more.

    Raises
    ------
    TooManyReturns
        The program was lost more often than it may be restarted.
    ProgramFailed
        Its process exited before the program returned, or its result or error cannot be sent.
    Exception
        Any error that the program raises, with its traceback; the program is not restarted.
    ExceptionGroup
        The errors of `on_return`, after the program has returned.
    DeadlineExceeded
        Processes of the program cannot be ended, so it cannot be restarted.
    """
    check_function("program", program, ["session"])
    integer_argument("returns", returns, 0, "returns")
    argument_above_zero("within", within)
    if on_return is not None:
        check_function("on_return", on_return, ["returned"])
    if isinstance(preload, str):
        raise refused("preload", preload, "a list of names of modules")
    start = partial(Incarnation, program, preload)
    result: T = _Supervisor(start, _Limit(returns, within), on_return, standby).run()
    return result


@dataclass(slots=True)
class _Limit:
    most: int
    within: float
    _times: list[float] = field(default_factory=list)

    def allows(self, now: float) -> bool:
        """Count one more return, and return whether it is within the limit."""
        self._times = [each for each in (*self._times, now) if each > now - self.within]
        return len(self._times) <= self.most

    def __str__(self) -> str:
        return f"{self.most} returns within {self.within:g} s"


@dataclass(slots=True)
class _Supervisor:
    start: Callable[[], Incarnation]
    limit: _Limit
    on_return: Callable[[Returned], None] | None
    standby: bool
    past: Past = field(default_factory=Past)
    alive: list[Incarnation] = field(default_factory=list)  # the current one, and perhaps the next
    failures: list[Exception] = field(default_factory=list)  # of on_return

    def run(self) -> Any:
        """Return the program's result."""
        try:
            self._start()
            while True:
                current = self.alive[0]
                current.begin(self.past)
                if self.standby:
                    self._start()
                while isinstance(last := current.message(), Serving):
                    self.past.known[last.call] = last
                    if last.returned is not None:
                        self._report(last.returned)
                if isinstance(last, Finished | Raised):
                    current.join(EXIT_SECONDS)
                    break
                self._replace(current, last)
        except KeyboardInterrupt:
            if self.alive:
                self.alive[0].interrupt()
            raise
        finally:
            with ExitStack() as ends:  # also end the second if the first cannot be ended
                for each in self.alive:
                    ends.callback(each.end)
        if isinstance(last, Raised):
            error = _error_of(last)
            for failure in self.failures:
                error.add_note(f"on_return also raised {failure!r}")
            raise error
        if self.failures:
            raise ExceptionGroup("the program returned, but on_return raised", self.failures)
        return last.result

    def _start(self) -> None:
        # An interrupt waits until the process is known, or nothing would end it.
        with without_interrupts():
            self.alive.append(self.start())

    def _replace(self, incarnation: Incarnation, last: ClusterLost | None) -> None:
        """End an incarnation; the next one begins its program later."""
        noticed = time.monotonic()
        cause = incarnation.cause_of_death() if last is None else last.cause
        if not self.limit.allows(noticed):
            folders = ", ".join(known.folder for known in self.past.known.values())
            advice = f"; ParameterServer.resume continues from {folders}" if folders else ""
            raised = last.raised if last is not None else None
            raise TooManyReturns(f"{cause}; not restarted after {self.limit}{advice}") from (
                _error_of(raised) if raised is not None else None
            )
        if len(self.alive) < 2:
            self._start()  # it imports Dask while the other one ends
        incarnation.end()
        self.alive.remove(incarnation)
        returns = self.past.returns + 1
        self.past = replace(self.past, returns=returns, cause=cause, noticed=noticed)

    def _report(self, returned: Returned) -> None:
        log(returned, {})
        text = f"dps: {returned} (return {returned.returns}; the limit is {self.limit})"
        # A filter that turns warnings into errors would end the training that has just returned.
        with suppress(ReturnedWarning):
            warnings.warn(text, ReturnedWarning, stacklevel=4)
        if self.on_return is not None:
            try:
                self.on_return(returned)
            except Exception as error:  # noqa: BLE001 (raised when the program has ended)
                self.failures.append(error)


def _error_of(raised: Raised) -> BaseException:
    """Return what a program has raised, with its traceback there as the cause."""
    if raised.error is None:
        return ProgramFailed(f"the program's result or error cannot be sent:\n{raised.trace}")
    raised.error.__cause__ = ProgramFailed(f"in the program:\n{raised.trace}")
    return raised.error


class Incarnation:
    """A process that runs a program once it is sent the past. Not thread-safe."""

    def __init__(self, program: Callable[[Any], Any], preload: Sequence[str] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, remote = context.Pipe()
        self._process = context.Process(
            target=run_program, args=(remote, program, preload), name="dps-program"
        )
        self._process.start()
        remote.close()
        self._pid = self._process.pid or 0
        self._leader = process_of(self._pid)
        self._ended = os.pidfd_open(self._pid)
        self._scratch: str | None = None  # its folder for files, which remain if it is killed

    def begin(self, past: Past) -> None:
        """Start the program, unless its process has ended."""
        with suppress(EOFError, OSError):
            if self._link in wait([self._link, self._ended]):
                self._scratch = self._link.recv()
                self._link.send(past)

    def message(self) -> Any | None:
        """Wait for the next message of the process; None if it has ended."""
        while True:
            wait([self._link, self._ended])
            try:
                if self._link.poll():
                    return self._link.recv()
            except (EOFError, OSError):
                wait([self._ended])
            if wait([self._ended], 0):
                return None

    def cause_of_death(self) -> str:
        """Return why the process has ended; raises `ProgramFailed` if no signal ended it."""
        self._process.join()
        code = self._process.exitcode or 0
        if code < 0:
            known = {each.value: each.name for each in signal.Signals}  # not real-time signals
            name = known.get(-code, f"signal {-code}")
            return f"the driver's process was ended by {name}"
        raise ProgramFailed(
            f"the program's process exited with code {code} before the program returned: see its "
            "output. The program must be a function of an importable module, as for multiprocessing"
        )

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the process to end."""
        self._process.join(seconds)

    def interrupt(self) -> None:
        """Interrupt the program as Ctrl-C does, and give it a moment to end."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGINT)
        self.join(INTERRUPT_SECONDS)

    def end(self) -> None:
        """End every process of the session; raises `DeadlineExceeded` if one cannot be ended."""
        if self._link.closed:
            return
        try:
            self._process.kill()
            self._process.join(GRACE_SECONDS)
            self._end_members()
            with suppress(EOFError, OSError):
                if self._scratch is None and self._link.poll():  # the program has not begun
                    self._scratch = self._link.recv()
            if self._scratch is not None:
                scratch = Path(self._scratch)
                # And folders of its cluster that it could not remove, or that nodes wrote to again.
                for left in (scratch, *scratch.parent.glob(f"{scratch_prefix(self._pid)}*")):
                    shutil.rmtree(left, ignore_errors=True)
        finally:
            self._link.close()
            os.close(self._ended)

    def _end_members(self) -> None:
        """End the remaining processes of the session."""
        until = time.monotonic() + GRACE_SECONDS
        while self._members() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        until = time.monotonic() + END_SECONDS
        while members := self._members():
            if time.monotonic() > until:
                pids = ", ".join(str(process.pid) for process in members)
                raise DeadlineExceeded(
                    f"processes of the program still run {END_SECONDS:g} s after SIGKILL, or "
                    f"belong to another user: {pids}; end them, and continue with "
                    "ParameterServer.resume"
                )
            for process in members:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.kill()
            for process in members:
                is_gone(process, END_SECONDS / 10)

    def _members(self) -> list[psutil.Process]:
        # The system may have reused the number after the last one ended.
        other = psutil.pid_exists(self._pid)
        if other and (self._leader is None or not self._leader.is_running()):
            return []
        members = []
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if os.getsid(pid) == self._pid and not is_gone(process, 0.0):
                    members.append(process)
        return members


def run_program(
    link: Connection, program: Callable[[Any], Any], preload: Sequence[str] | None
) -> None:
    """Run a program in this new process, once the earlier incarnation has ended."""
    os.setsid()  # identifies all processes that come from this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the supervisor sends it
    # Spawned processes inherit the name of their parent's folder, which they must not remove.
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    scratch = get_temp_dir()  # multiprocessing's own, also for the sockets of a fork server
    end_with_parent(partial(shutil.rmtree, scratch, ignore_errors=True))
    link.send(scratch)
    if preload is not None:
        fork_context(preload)  # its imports run beside those of this process
    # Not above: this module must not import Dask.
    from dps.cluster.supervision.session import Session

    try:
        past: Past = link.recv()
    except EOFError:
        return
    session = Session(link, past)
    try:
        result = program(session)
    except BaseException as error:  # noqa: BLE001 (all of them are raised by the supervisor)
        session.finish(Raised(error, traceback.format_exc()))
    else:
        session.finish(Finished(result))
