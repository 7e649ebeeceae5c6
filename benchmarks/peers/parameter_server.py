"""dps itself: a parameter server with one shard, and a worker that pushes and pulls.

The training function stays for all turns, as the other systems' callers do: it takes orders from
the measuring process over a socket.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial
from typing import Literal

import numpy as np

from benchmarks.peers.peer import LEARNING_RATE, Timed, Turn, repeat
from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.errors import DpsError
from dps.protocol.transport import TransportChoice

NODES = (NodeSpec("server-0", "server"), NodeSpec("worker-0", "worker"))
TABLE = "weights"
PATIENCE = 120.0


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
            notify=_warn,
        ) as cluster,
        ParameterServer(
            cluster.client, params, optimizer=SGD(LEARNING_RATE), transport=transport
        ) as ps,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        listener.settimeout(PATIENCE)
        (future,) = ps.run(partial(_obey, listener.getsockname()), workers=1)
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            if future.done():
                future.result()  # raises what the training function did
            raise DpsError(f"no worker began within {PATIENCE:g} s") from None

        def timed(calls: int) -> Turn:
            with contextlib.suppress(OSError):  # that it has ended is seen when it is to answer
                orders.write(f"{calls}\n")
                orders.flush()
            told = orders.readline()
            if not told:
                future.result()  # raises what the training function did
                raise DpsError("the training function has ended")
            return Turn(**json.loads(told))

        with sock, sock.makefile("rw") as orders:
            yield timed
        future.result()


def _obey(driver: tuple[str, int], worker: Worker) -> None:
    """Take turns with a gradient that is made once, until the driver closes the connection."""
    gradient = {TABLE: np.ones_like(worker.pull()[TABLE])}
    with socket.create_connection(driver) as sock, sock.makefile("rw") as orders:
        for calls in orders:
            turn = repeat(lambda: worker.push_pull(gradient)[TABLE], int(calls))
            orders.write(json.dumps(asdict(turn)) + "\n")
            orders.flush()


@cache  # a cluster is made for each size and transport: once will do
def _warn(line: str) -> None:
    print(f"dps: warning: {line}", file=sys.stderr)
