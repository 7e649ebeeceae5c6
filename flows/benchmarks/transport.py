"""`dps bench transport`: push and pull between two processes, beside what else could carry it.

All systems do the same: a gradient goes to the other process, is applied to the weights there, and
the new weights come back. They take turns in short rounds, so that whatever else the machine does
meanwhile falls on all of them; what counts are the ratios.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import distributed
import numpy as np

from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.tls import LOOPBACK
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD

LEARNING_RATE = 0.1
ROUNDS = 8
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """A size of the parameters, how often it is sent in a round, and what the ratio may be."""

    name: str
    nbytes: int
    calls: int
    target: float


SIZES = (
    Size("1 KB", 1024, 100, 1.1),
    Size("4 MB", 4 * MEBIBYTE, 20, 0.75),
    Size("64 MB", 64 * MEBIBYTE, 4, 0.75),
)

# Makes a number of calls and returns the seconds that each took.
Timed = Callable[[int], list[float]]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one size, in milliseconds."""

    size: Size
    raw: float
    actor: float
    dps: float
    tls: float

    @property
    def ratio(self) -> float:
        """Time of dps over that of the plain actor, both without TLS."""
        return self.dps / self.actor


def transport() -> str:
    """Measure, and return the table as text."""
    rows = [measure(size) for size in SIZES]
    lines = [
        "push + pull between two processes, float32, median of "
        f"{ROUNDS} rounds in turn; every system applies the gradient (SGD), the last one over TLS",
        "",
        f"{'size':>6} {'raw TCP':>10} {'Dask actor':>11} {'dps':>9} "
        f"{'dps/raw':>8} {'dps/actor':>10} {'target':>14} {'dps, TLS':>11} {'TLS/dps':>8}",
    ]
    for row in rows:
        verdict = "met" if row.ratio <= row.size.target else "missed"
        lines.append(
            f"{row.size.name:>6} {row.raw:>7.2f} ms {row.actor:>8.2f} ms {row.dps:>6.2f} ms "
            f"{row.dps / row.raw:>8.2f} {row.ratio:>10.2f} ≤ {row.size.target:<5g}{verdict:>7} "
            f"{row.tls:>8.2f} ms {row.tls / row.dps:>8.2f}"
        )
    return "\n".join(lines)


def measure(size: Size) -> Row:
    """Time the systems in turn on one size."""
    with contextlib.ExitStack() as stack:
        systems = {
            "raw": stack.enter_context(_raw(size.nbytes)),
            "actor": stack.enter_context(_actor(size.nbytes)),
            "dps": stack.enter_context(_dps(size.nbytes, "off")),
            "tls": stack.enter_context(_dps(size.nbytes, None)),
        }
        times: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(ROUNDS + 1):
            for name, timed in systems.items():
                times[name].append(statistics.median(timed(size.calls)))
    # The first round warms up: connections are made and memory is mapped.
    return Row(size, **{name: 1e3 * statistics.median(t[1:]) for name, t in times.items()})


def _repeat(call: Callable[[], Any], calls: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


# -- dps -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _dps(nbytes: int, security: Literal["off"] | None) -> Iterator[Timed]:
    params = {"weights": np.zeros(nbytes // 4, np.float32)}
    nodes = [NodeSpec("server-0", "server"), NodeSpec("worker-0", "worker")]
    with (
        LocalCluster(
            nodes, ("dps.cluster.driver.parameter_server", __name__), security=security, tell=_warn
        ) as cluster,
        ParameterServer(cluster.client, params, optimizer=SGD(LEARNING_RATE)) as ps,
    ):

        def timed(calls: int) -> list[float]:
            (future,) = ps.run(partial(_push_pull, calls), workers=1)
            seconds: list[float] = future.result()
            return seconds

        yield timed


def _warn(line: str) -> None:
    print(f"dps: warning: {line}", file=sys.stderr)


def _push_pull(calls: int, worker: Worker) -> list[float]:
    gradient = {name: np.ones_like(array) for name, array in worker.pull().items()}
    return _repeat(lambda: worker.push_pull(gradient), calls)


# -- a plain Dask actor, everything at Dask's defaults ---------------------------------------------


class PlainActor:
    """The least that a parameter server on a Dask actor can be."""

    def __init__(self, elements: int) -> None:
        self.weights = np.zeros(elements, np.float32)

    def push_pull(self, gradient: np.ndarray) -> np.ndarray:
        """Apply a gradient and return a copy of the weights."""
        self.weights -= LEARNING_RATE * gradient
        return self.weights.copy()


@contextlib.contextmanager
def _actor(nbytes: int) -> Iterator[Timed]:
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=f"{LOOPBACK}:0", host=LOOPBACK
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        server, worker = sorted(client.scheduler_info()["workers"])
        kept = client.submit(PlainActor, nbytes // 4, actor=True, workers=[server])
        actor = kept.result()

        def timed(calls: int) -> list[float]:
            future = client.submit(_call, actor, nbytes // 4, calls, workers=[worker], pure=False)
            seconds: list[float] = future.result()
            return seconds

        yield timed


def _call(actor: Any, elements: int, calls: int) -> list[float]:
    gradient = np.ones(elements, np.float32)
    return _repeat(lambda: actor.push_pull(gradient).result(), calls)


# -- raw sockets -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _raw(nbytes: int) -> Iterator[Timed]:
    listener = socket.create_server((LOOPBACK, 0))
    context = multiprocessing.get_context("spawn")
    peer = context.Process(target=_serve, args=(listener.getsockname(), nbytes), daemon=True)
    peer.start()
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradient = np.ones(nbytes // 4, np.float32)
    weights = np.empty_like(gradient)

    def exchange() -> None:
        connection.sendall(gradient.data)
        _receive(connection, weights)

    try:
        yield partial(_repeat, exchange)
    finally:
        connection.close()
        listener.close()
        peer.join()


def _serve(address: tuple[str, int], nbytes: int) -> None:
    """Be the other process: apply each gradient and send the weights back, until the end."""
    weights = np.zeros(nbytes // 4, np.float32)
    gradient = np.empty_like(weights)
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(connection, gradient):
            gradient *= LEARNING_RATE
            weights -= gradient
            connection.sendall(weights.data)


def _receive(connection: socket.socket, into: np.ndarray) -> bool:
    """Fill the array; return False if the other end has closed."""
    view = into.data.cast("B")
    while view:
        count = connection.recv_into(view)
        if count == 0:
            return False
        view = view[count:]
    return True
