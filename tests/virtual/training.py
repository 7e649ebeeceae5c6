"""A training on virtual time that counts: every weight says how many updates it has seen."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass

import numpy as np
from distributed import KilledWorker

from dps import SGD, ParameterServer, Recovery, Worker
from dps.events import Event
from dps.faults import Fault
from dps.testing import VirtualCluster

PUSHES = 40
WORKERS = 3
SHARDS = 2
COMPUTE_SECONDS = 0.01
START = {"w": np.zeros(40), "v": np.zeros((3, 5), np.float32)}


def count(worker: Worker) -> int:
    """Push −1 for every weight, a hundred times a second or so; return how often."""
    gradients = {name: np.full_like(array, -1.0) for name, array in worker.pull().items()}
    for _ in range(PUSHES):
        worker.sleep(COMPUTE_SECONDS)
        worker.push_pull(gradients)
    return PUSHES


@dataclass(frozen=True)
class Came:
    """What came of a training.

    Attributes
    ----------
    pushed
        What each worker returned; None: it was killed.
    seen
        For each weight, how many updates it has seen.
    lost
        How many acknowledged updates each shard has lost, together.
    """

    pushed: tuple[int | None, ...]
    seen: tuple[float, ...]
    lost: int
    seconds: float
    events: tuple[Event, ...]

    def of(self, kind: type[Event]) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def digest(self) -> str:
        """Differs where anything differs."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def counted(
    recovery: str | Recovery = "none",
    faults: Sequence[Fault] = (),
    seed: int = 0,
    servers: int = SHARDS,
    workers: int = WORKERS,
    shards: int = SHARDS,
) -> Came:
    """Count under faults, and say what came of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is lost is told by `lost`
        with VirtualCluster(servers, workers, seed=seed, faults=faults) as cluster:
            with ParameterServer(
                cluster,
                START,
                shards=shards,
                optimizer=SGD(1.0),
                recovery=recovery,
                on_event=cluster.note,
                on_loss="ignore",
            ) as ps:
                futures = ps.run(count, workers=workers)
                pushed = []
                for future in futures:
                    try:
                        pushed.append(future.result())
                    except (KilledWorker, CancelledError):
                        pushed.append(None)
                weights = np.concatenate([array.ravel() for array in ps.pull().values()])
                lost = ps.updates_lost
            seconds = cluster.dps_platform.clock.monotonic()
    seen = tuple(float(x) for x in weights)
    return Came(tuple(pushed), seen, lost, seconds, tuple(cluster.events))
