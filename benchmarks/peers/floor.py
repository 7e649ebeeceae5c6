"""The floor of shared memory: a copy in, an update in place, a copy out, and a socket as doorbell.

Nothing that shares memory and keeps a gradient apart from the weights can do with less: there are
no checks, no messages, no event loop, and memory that is there already is used again.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import socket
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.peers.peer import LEARNING_RATE, Call, Peer, apart

CHUNK = 1 << 15  # elements, of which gradient, weights and step together fit into a core's cache
BELL = b"!"


@contextlib.contextmanager
def caller(nbytes: int) -> Iterator[Call]:
    """Make the memory, start the other process and pass it the memory."""
    memory = os.memfd_create("floor")
    os.ftruncate(memory, 2 * nbytes)
    shared_gradient, shared_weights = _arrays(memory, nbytes)
    bell, theirs = socket.socketpair()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(theirs, nbytes))
    server.start()
    theirs.close()
    socket.send_fds(bell, [BELL], [memory])
    os.close(memory)
    gradient = np.ones(nbytes // 4, np.float32)
    weights = np.empty_like(gradient)

    def call() -> np.ndarray:
        np.copyto(shared_gradient, gradient)
        bell.sendall(BELL)
        bell.recv(1)
        np.copyto(weights, shared_weights)
        return weights

    try:
        yield call
    finally:
        bell.close()
        server.join()


floor: Peer = partial(apart, caller)


def _arrays(memory: int, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """The gradient and the weights in the memory."""
    gradient, weights = np.frombuffer(mmap.mmap(memory, 2 * nbytes), np.float32).reshape(2, -1)
    return gradient, weights


def _serve(bell: socket.socket, nbytes: int) -> None:
    """Be the other process: apply the gradient whenever the bell rings, until the end."""
    _, (memory,), _, _ = socket.recv_fds(bell, len(BELL), 1)
    gradient, weights = _arrays(memory, nbytes)
    step = np.empty(CHUNK, np.float32)
    with bell:
        while bell.recv(1):
            for start in range(0, len(weights), CHUNK):
                part = gradient[start : start + CHUNK]
                np.multiply(part, LEARNING_RATE, out=step[: len(part)])
                weights[start : start + CHUNK] -= step[: len(part)]
            bell.sendall(BELL)
