"""dps itself: a parameter server with one shard, and a worker that pushes and pulls."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import numpy as np

from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.errors import ConfigurationError
from flows.benchmarks.peers.peer import LEARNING_RATE, Timed, Turn, repeat

NODES = (NodeSpec("server-0", "server"), NodeSpec("worker-0", "worker"))
TABLE = "weights"


@contextlib.contextmanager
def parameter_server(
    nbytes: int, transport: str, security: Literal["off"] | None = "off"
) -> Iterator[Timed]:
    """Two nodes and a group; with `security` None, they have TLS."""
    params = {TABLE: np.zeros(nbytes // 4, np.float32)}
    with (
        LocalCluster(
            NODES,
            ("dps.cluster.driver.parameter_server", __name__),
            security=security,
            tell=_warn,
        ) as cluster,
        ParameterServer(
            cluster.client, params, optimizer=SGD(LEARNING_RATE), **chosen(transport)
        ) as ps,
    ):

        def timed(calls: int) -> Turn:
            (future,) = ps.run(partial(_turn, calls), workers=1)
            turn: Turn = future.result()
            return turn

        yield timed


def available() -> tuple[str, ...]:
    """The transports that a parameter server can be told to use."""
    if "transport" in inspect.signature(ParameterServer).parameters:
        return ("shared_memory", "stream", "dask")
    return ("dask",)


def chosen(transport: str) -> dict[str, Any]:
    """What a parameter server is to be given for it.

    Raises
    ------
    ConfigurationError
        It cannot be told to use this one.
    """
    known = "auto", *available()
    if transport not in known:
        raise ConfigurationError(f"transport {transport!r} is unknown, expected {', '.join(known)}")
    return {"transport": transport} if len(available()) > 1 else {}


def _turn(calls: int, worker: Worker) -> Turn:
    gradient = {TABLE: np.ones_like(worker.pull()[TABLE])}
    return repeat(lambda: worker.push_pull(gradient)[TABLE], calls)


def _warn(line: str) -> None:
    print(f"dps: warning: {line}", file=sys.stderr)
