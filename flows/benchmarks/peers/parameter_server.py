"""dps itself: a parameter server with one shard, and a worker that pushes and pulls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Literal

import numpy as np

from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.protocol.transport import TransportChoice
from flows.benchmarks.peers.peer import LEARNING_RATE, Timed, Turn, repeat

NODES = (NodeSpec("server-0", "server"), NodeSpec("worker-0", "worker"))
TABLE = "weights"


@contextlib.contextmanager
def parameter_server(
    nbytes: int, transport: TransportChoice, security: Literal["off"] | None = "off"
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
            cluster.client, params, optimizer=SGD(LEARNING_RATE), transport=transport
        ) as ps,
    ):

        def timed(calls: int) -> Turn:
            (future,) = ps.run(partial(_turn, calls), workers=1)
            turn: Turn = future.result()
            return turn

        yield timed


def _turn(calls: int, worker: Worker) -> Turn:
    gradient = {TABLE: np.ones_like(worker.pull()[TABLE])}
    return repeat(lambda: worker.push_pull(gradient)[TABLE], calls)


def _warn(line: str) -> None:
    print(f"dps: warning: {line}", file=sys.stderr)
