"""A plain Dask actor, the least that a parameter server on Dask can be; all at Dask's defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import distributed
import numpy as np

from benchmarks.peers.peer import LEARNING_RATE, Timed, Turn, repeat
from dps.cluster.backends.tls import LOOPBACK


class PlainActor:
    """Holds the weights."""

    def __init__(self, elements: int) -> None:
        self.weights = np.zeros(elements, np.float32)

    def push_pull(self, gradient: np.ndarray) -> np.ndarray:
        """Apply a gradient and return a copy of the weights."""
        self.weights -= LEARNING_RATE * gradient
        return self.weights.copy()


@contextlib.contextmanager
def dask_actor(nbytes: int) -> Iterator[Timed]:
    """Two Dask workers: one with the actor, and one whose tasks call it."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=f"{LOOPBACK}:0", host=LOOPBACK
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        server, worker = sorted(client.scheduler_info()["workers"])
        # The actor lives for as long as somebody has its future.
        future_actor = client.submit(PlainActor, nbytes // 4, actor=True, workers=[server])
        actor = future_actor.result()

        def timed(calls: int) -> Turn:
            future = client.submit(_turn, actor, nbytes // 4, calls, workers=[worker], pure=False)
            turn: Turn = future.result()
            return turn

        yield timed


def _turn(actor: Any, elements: int, calls: int) -> Turn:
    gradient = np.ones(elements, np.float32)
    return repeat(lambda: actor.push_pull(gradient).result(), calls)
