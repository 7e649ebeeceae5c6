"""A Ray actor, where Ray is installed; arrays travel through its object store in shared memory."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.peers.peer import LEARNING_RATE, Call, Peer, apart

STORE_BYTES = 1 << 30  # for gradients and weights that are not let go of yet


class Actor:
    """Holds the weights. What a call returns is copied into the object store."""

    def __init__(self, elements: int) -> None:
        self.weights = np.zeros(elements, np.float32)

    def push_pull(self, gradient: np.ndarray) -> np.ndarray:
        """Apply a gradient and return the weights."""
        self.weights -= LEARNING_RATE * gradient
        return self.weights


@contextlib.contextmanager
def caller(nbytes: int) -> Iterator[Call]:
    """Start Ray, on this machine alone, and the actor."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would tell its makers that it runs
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex()  # else it leaves one in the home folder
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=STORE_BYTES,
    )
    try:
        actor = ray.remote(Actor).remote(nbytes // 4)
        gradient = np.ones(nbytes // 4, np.float32)
        yield lambda: ray.get(actor.push_pull.remote(gradient))
    finally:
        ray.shutdown()


ray_actor: Peer = partial(apart, caller)
