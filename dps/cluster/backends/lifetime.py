"""How the life of a process depends on the one that started it, for all that start processes.

Nothing here imports Dask, for those that only start others have no need of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import FrameType


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from processes that are started meanwhile: it is the driver's to handle.

    They inherit the mask. One that comes now reaches the driver when this is over: ignored, it
    would be lost.
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
