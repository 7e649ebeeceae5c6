"""The process in which a supervised program runs: what it does before and after the program.

It imports Dask while the incarnation before is still being ended, or still runs, and begins when it
is told that this is over.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from typing import Any

from dps.cluster.backends.processes import end_with_parent, fork_context
from dps.cluster.supervision.messages import Finished, Past, Raised, Scratch


def run_program(
    link: Connection, program: Callable[[Any], Any], preload: Sequence[str] | None
) -> None:
    """Run a program as its supervisor wants it; called in a process of its own.

    Parameters
    ----------
    preload
        What the nodes of a `LocalCluster` need imported; None: there will be none.
    """
    os.setsid()  # by which all processes that come from this one are known
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which is the supervisor's to send
    # What is spawned inherits the name of its parent's, which is not its own to remove.
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    scratch = get_temp_dir()  # of multiprocessing's own, also for the sockets of a fork server
    end_with_parent(partial(shutil.rmtree, scratch, ignore_errors=True))
    link.send(Scratch(scratch))
    if preload is not None:
        fork_context(preload)  # which imports what it needs while this process does so
    # Not above: the supervisor imports this module, and has no need of Dask.
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
