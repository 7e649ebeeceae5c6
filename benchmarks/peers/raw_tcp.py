"""Raw TCP: two processes and a connection; bytes as they are, into memory that is there already."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.peers.peer import LEARNING_RATE, Call, Peer, apart
from dps.cluster.backends.tls import LOOPBACK


@contextlib.contextmanager
def caller(nbytes: int) -> Iterator[Call]:
    """Start the other process and connect to it."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        context = multiprocessing.get_context("spawn")
        server = context.Process(target=_serve, args=(listener.getsockname(), nbytes))
        server.start()
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gradient = np.ones(nbytes // 4, np.float32)
    weights = np.empty_like(gradient)

    def call() -> np.ndarray:
        connection.sendall(gradient.data)
        _receive(connection, weights)
        return weights

    try:
        yield call
    finally:
        connection.close()
        server.join()


raw_tcp: Peer = partial(apart, caller)


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
