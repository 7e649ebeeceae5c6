"""One incarnation of a supervised program: a process, and all those that come from it.

They have an operating system's session of their own, by which they are known however they were
started, unless the program gives one of them another session. Nothing here imports Dask.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from dps.cluster.backends.processes import is_gone, process_of, scratch_prefix, without_interrupts
from dps.cluster.supervision.messages import Past, Scratch
from dps.cluster.supervision.program import run_program
from dps.errors import DeadlineExceeded

# The processes of a `LocalCluster` end by themselves with their driver, and remove their files.
GRACE_SECONDS = 3.0
INTERRUPT_SECONDS = 5.0
END_SECONDS = 30.0  # for what was killed, on a machine that is busy
LOOK_SECONDS = 0.02


class Incarnation:
    """A process that runs a program once it is told of the past. Not thread-safe.

    Parameters
    ----------
    program
        Called with a `Session` there.
    preload
        What nodes of its `LocalCluster` need imported; None: it has none.
    """

    def __init__(self, program: Callable[[Any], Any], preload: Sequence[str] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(
            target=run_program, args=(theirs, program, preload), name="dps-program"
        )
        with without_interrupts():
            self._process.start()
        theirs.close()
        self._pid = self._process.pid or 0
        self._leader = process_of(self._pid)
        self._ended = os.pidfd_open(self._pid)
        self._is_over = False
        self._scratch: str | None = None

    def begin(self, past: Past) -> None:
        """Have the program begin; one whose process has ended meanwhile does not."""
        with contextlib.suppress(OSError):
            self._link.send(past)

    def said(self) -> Any | None:
        """Return what the process says next, as soon as it does; None: it has ended."""
        while True:
            wait([self._link, self._ended])
            try:
                if self._link.poll():
                    if (message := self._received()) is not None:
                        return message
                    continue
            except (EOFError, OSError):
                wait([self._ended])
            if wait([self._ended], 0):
                return None

    @property
    def exit_code(self) -> int:
        """The exit code of the process, which has ended; for a signal, its number below zero."""
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code

    def join(self, seconds: float) -> None:
        """Wait for the process to end, for so long at most."""
        self._process.join(seconds)

    def interrupt(self) -> None:
        """Have the program end as by Ctrl-C, if it does so soon."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGINT)
        self.join(INTERRUPT_SECONDS)

    def end(self) -> None:
        """End every process of the incarnation; when this returns, none can do anything.

        Processes of the program's that have an operating system's session of their own are not of
        the incarnation, and go on.

        Raises
        ------
        DeadlineExceeded
            Processes cannot be ended, which the message names.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            self._process.kill()
            self._process.join(GRACE_SECONDS)
            self._end_members()
            with contextlib.suppress(EOFError, OSError):
                while self._scratch is None and self._link.poll():
                    self._received()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                # What its cluster was about to remove when it was killed, or nodes still wrote to.
                for left in Path(self._scratch).parent.glob(f"{scratch_prefix(self._pid)}*"):
                    shutil.rmtree(left, ignore_errors=True)
        finally:
            self._link.close()
            os.close(self._ended)

    def _end_members(self) -> None:
        """End what is left of the session."""
        until = time.monotonic() + GRACE_SECONDS
        while self._members() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        until = time.monotonic() + END_SECONDS
        while members := self._members():
            if time.monotonic() > until:
                pids = ", ".join(str(process.pid) for process in members)
                raise DeadlineExceeded(
                    f"processes of the program are still there {END_SECONDS:g} s after SIGKILL, or "
                    f"belong to another user: {pids}; end these, and begin again with "
                    "ParameterServer.resume"
                )
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.kill()
            for process in members:
                is_gone(process, END_SECONDS / 10)

    def _received(self) -> Any | None:
        """Return what the process has said for its supervisor; None: that was for this object."""
        message = self._link.recv()
        if not isinstance(message, Scratch):
            return message
        self._scratch = message.folder
        return None

    def _members(self) -> list[psutil.Process]:
        """The processes of the session that can still do something."""
        # The system may have given the number to another process when nobody was left.
        other = psutil.pid_exists(self._pid)
        if other and (self._leader is None or not self._leader.is_running()):
            return []
        return list(_of_session(self._pid))


def _of_session(session: int) -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == session and not is_gone(process := psutil.Process(pid), 0.0):
                yield process
