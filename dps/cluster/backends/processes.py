"""Processes of this machine: how they are started, observed, signalled and ended.

The system reuses the number of an ended process. A process is therefore looked up while it is known
to run, and identified by its number and start time from then on: no other process is taken for it,
or receives its signals. Nothing here imports Dask, so that the fork server can start before its
parent has imported it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from typing import Literal

import psutil

from dps.errors import ConfigurationError

# Set while the fork server starts, because each of its libraries reads them only once.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # If set later, the arenas that exist stay in use (see `dps.cluster.platform`).
    "MALLOC_ARENA_MAX": "1",
}

State = Literal["running", "stopped", "gone"]


def process_of(pid: int) -> psutil.Process | None:
    """Return the process that has this number now; None if there is none."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def state_of(process: psutil.Process | int | None) -> State:
    """Return the state of a process; a zombie is gone, as is one that was not found (None).

    A number stands for the process that has it now.
    """
    try:
        known = psutil.Process(process) if isinstance(process, int) else process
        status = known.status() if known is not None and known.is_running() else None
    except psutil.NoSuchProcess:
        status = None
    if status in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status == psutil.STATUS_STOPPED else "running"


def is_gone(process: psutil.Process | int | None, deadline: float) -> bool:
    """Whether a process ends within `deadline` seconds; arguments as for `state_of`."""
    known = process_of(process) if isinstance(process, int) else process
    return holds(lambda: state_of(known) == "gone", deadline)


def holds(condition: Callable[[], bool], deadline: float, pause: float = 0.001) -> bool:
    """Whether a condition, evaluated after each `pause`, holds within `deadline` seconds."""
    until = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True


def scratch_prefix(pid: int) -> str:
    """Return the prefix of a process's temporary folders, by which another process finds them."""
    return f"dps-{pid}-"


def fork_context(preload: Sequence[str]) -> ForkServerContext:
    """Return the context that forks processes from a server that has imported `preload`.

    The first call starts the server without waiting for it. All clusters of this process share it,
    so later calls cannot change what it imports. `ConfigurationError`: it cannot be started.
    """
    context = multiprocessing.get_context("forkserver")
    # "preload" before the user's modules: it switches garbage collection off for them.
    context.set_forkserver_preload(["__main__", "dps.cluster.backends.preload", *preload])
    with environment(ENVIRONMENT), without_interrupts():
        try:
            forkserver.ensure_running()
        except OSError as error:
            # Most often its name is too long for the socket that is opened there.
            where = os.environ.get("TMPDIR", "/tmp")
            raise ConfigurationError(
                f"cannot start processes with temporary files in {where}: {error}. Set TMPDIR to a "
                "folder with a shorter path."
            ) from error
    return context


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in the context."""
    before = {key: os.environ[key] for key in settings if key in os.environ}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key in settings.keys() - before.keys():
            del os.environ[key]
        os.environ.update(before)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C; handle one that arrives during the start afterwards."""
    # They inherit the signal mask. The signal is blocked, not ignored, so that it reaches the
    # driver in the end. The mask applies to this thread alone: if numpy has threads, the system
    # delivers the signal to one of them, and Python calls the handler at once. So the handler is
    # replaced too.
    # Otherwise it starts with the first process, and resets the mask just before that starts.
    resource_tracker.ensure_running()
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    replaced = threading.current_thread() is threading.main_thread() and callable(handler)
    if replaced:
        signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if replaced:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def end_with_parent(before: Callable[[], None]) -> None:
    """Call `before`, in a thread, when the parent of this process ends, and end this process."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        before()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
