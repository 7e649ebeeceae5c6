"""Processes of this machine: what the system says of one, and when that changes.

The system gives the number of an ended process to another one in time. So a process is looked up
while it is known to run, and known from then on by its number and its start: another one of the
same number is never taken for it, nor sent its signals.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from types import FrameType

import psutil

# The states of a process that has ended: until its parent has read its exit code, while it is
# being removed, and after that.
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, None)


def process_of(pid: int) -> psutil.Process | None:
    """The process of this number, known by its start as well; None if there is none."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def scratch_prefix(pid: int) -> str:
    """How the names of the temporary folders begin that a process makes for a `LocalCluster`.

    So whoever has seen the process end can remove them.
    """
    return f"dps-{pid}-"


def is_gone(process: psutil.Process | int | None, deadline: float) -> bool:
    """Whether a process ends (or is a zombie) within `deadline` seconds.

    Parameters
    ----------
    process
        None, one of which nothing was found, is gone. A number stands for the process that has it
        now.
    """
    return _becomes(process, lambda status: status in ENDED, deadline)


def is_stopped(process: psutil.Process | int | None, deadline: float) -> bool:
    """Whether a process is stopped by a signal within `deadline` seconds."""
    return _becomes(process, lambda status: status == psutil.STATUS_STOPPED, deadline)


def is_running(process: psutil.Process | int | None, deadline: float) -> bool:
    """Whether a process is there and not stopped within `deadline` seconds."""
    halted = (*ENDED, psutil.STATUS_STOPPED)
    return _becomes(process, lambda status: status not in halted, deadline)


def send(process: psutil.Process | None, name: str, number: int) -> int:
    """Send a signal to the process of a node; return its pid.

    Raises
    ------
    ProcessLookupError
        It is gone already.
    """
    # The system may know an ended process still, until its parent has taken note.
    if process is None or is_gone(process, 0.0):
        raise ProcessLookupError(f"the process of {name} is gone already")
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"the process of {name} is gone already") from error
    return process.pid


def started_with(variable: str, value: str) -> Iterator[psutil.Process]:
    """The living processes in whose environment a variable had this value when they started.

    Those of other users are left out. Children have what their parent had, so that all that comes
    from a process is found, also when it has ended.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.environ().get(variable) == value and not is_gone(process, 0.0):
                yield process


def _becomes(
    process: psutil.Process | int | None, wanted: Callable[[str | None], bool], deadline: float
) -> bool:
    if isinstance(process, int):
        process = process_of(process)
    until = time.monotonic() + deadline
    while not wanted(_status(process)):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _status(process: psutil.Process | None) -> str | None:
    """What the system says of a process; None if there is no such process any more."""
    try:
        return str(process.status()) if process is not None and process.is_running() else None
    except psutil.NoSuchProcess:
        return None


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which the driver handles.

    They inherit the signal mask. The signal is blocked, not ignored, so that a Ctrl-C during the
    start reaches the driver afterwards.
    """
    # It starts with the first process, and would undo the mask just before that does.
    resource_tracker.ensure_running()
    with _interrupts_held_back():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Handle Ctrl-C when this is over.

    The mask is this thread's alone: where numpy has threads, the system gives the signal to one of
    them, and Python raises it here at once.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, held[0])


def end_with_parent(before: Callable[[], None]) -> None:
    """Have this process end when the one that asked for it does, however that ends.

    Parameters
    ----------
    before
        Is called first, in a thread.
    """
    threading.Thread(target=_exit_with_parent, args=(before,), daemon=True).start()


def _exit_with_parent(before: Callable[[], None]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    before()
    os._exit(1)
