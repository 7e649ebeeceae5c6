"""The process that the nodes of this machine are forked from, with what they need imported.

Nothing here imports Dask, so that the server can be started before its parent has imported what it
needs itself: the two take as long.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from dps.cluster.backends.processes import without_interrupts
from dps.errors import ConfigurationError

# Set while the fork server starts, because each of its libraries reads them only once.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Set later, it leaves the arenas that are there already in use (see `dps.cluster.platform`).
    "MALLOC_ARENA_MAX": "1",
}

# The server leaves out what is not installed, and Dask's processes import prometheus_client if it
# is; those after it are what they import late, when they start or send the first array.
OF_EVERY_NODE = (
    "dps.cluster.backends.uncollected",  # first, so that it holds for the others
    "distributed",
    "dps.cluster.backends.local",
    "prometheus_client",
    "distributed.http.prometheus",
    "distributed.protocol.numpy",
    "email.policy",
    "tornado.platform.asyncio",
)


def fork_context(preload: Sequence[str]) -> ForkServerContext:
    """Return what starts processes, which are forked from a server that has imported `preload`.

    The first call starts that server, one for all clusters of this process, and does not wait until
    it is ready; it keeps to what it was told first.

    Raises
    ------
    ConfigurationError
        It cannot be started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", *OF_EVERY_NODE, *preload])
    with environment(ENVIRONMENT), without_interrupts():
        try:
            forkserver.ensure_running()
        except OSError as error:
            # Most often its name is too long for the socket that is opened there.
            where = os.environ.get("TMPDIR", "/tmp")
            raise ConfigurationError(
                f"no processes can be started with temporary files in {where}: {error}. Set TMPDIR "
                "to another folder, of a short name."
            ) from error
    return context


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment for those that it starts meanwhile."""
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
