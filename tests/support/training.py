"""The counter workload of the cluster tests, and what they read from a group.

Every push is a gradient of −1 under SGD(1.0), so each weight counts the updates that it has seen:
a lost update is missing in it, and one that was applied twice is there twice.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import distributed
import numpy as np
from distributed import Future

from benchmarks.live import Watch
from dps import SGD, ParameterServer, Timings, Worker
from dps.cluster.liveness import presence_of
from dps.cluster.names import NodeSpec
from dps.events import Acked, Applied, Event
from dps.protocol.messages import Description
from tests.support.waiting import eventually

COUNTING = SGD(1.0)
SECONDS = 60.0  # until something that happens for sure counts as not happening
# Whoever waited for a lease or the end of a call would wait longer than a test does.
PATIENT = Timings(call=2 * SECONDS, lease=2 * SECONDS)
# For tests that no loss belongs to: on a machine that is too busy, leases of a second end.
patient_server = partial(ParameterServer, timings=PATIENT)
PRELOAD = ("dps.cluster.driver.parameter_server", "tests.support.training")

E = TypeVar("E", bound=Event)
Update = tuple[str, int, int]


def params(elements: int = 30) -> dict[str, np.ndarray]:
    """Initial values: zeros of both dtypes."""
    return {"w": np.zeros(elements), "v": np.zeros((3, 7), np.float32)}


def ones(like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradient that adds 1 to every weight."""
    return {name: np.full_like(array, -1.0) for name, array in like.items()}


# -- training functions, each run by a worker ----------------------------------------------------


def count(steps: int, worker: Worker) -> int:
    """Push `steps` times; return how often."""
    gradients = ones(worker.pull())
    for _ in range(steps):
        worker.push(gradients)
    return steps


def count_until(flag: str, worker: Worker) -> int:
    """Push until there is a file `flag`, and then a few times more; return how often."""
    gradients = ones(worker.pull())
    for step in itertools.count(1):
        worker.push_pull(gradients)
        if os.path.exists(flag):
            return step + count(5, worker)
    raise AssertionError


def count_while_wanted(worker: Worker) -> int:
    """Push until asked to leave; return how often."""
    gradients = ones(worker.pull())
    for step in itertools.count(1):
        worker.push(gradients)
        if worker.leaving:
            return step
    raise AssertionError


async def hide(seconds: float, dask_worker: distributed.Worker) -> None:
    """Have the monitor of a node say nothing of it, as if both were cut off."""
    presence_of(dask_worker).silence(seconds)


# -- what became of it ---------------------------------------------------------------------------


class Events(Watch):
    """Collects a group's events. Thread-safe."""

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind so far, in the order in which they came."""
        return list(self.record.of(kind))

    def acked(self, *outcomes: str) -> dict[int, list[Update]]:
        """For each shard, the updates that workers were told are durable, with these outcomes."""
        found: dict[int, list[Update]] = {}
        for event in self.of(Acked):
            for shard, seq, outcome in zip(event.shards, event.seqs, event.outcomes, strict=True):
                if outcome in outcomes:
                    update = (event.worker, event.incarnation, seq)
                    found.setdefault(shard, []).append(update)
        return found

    def applied(self) -> dict[int, set[Update]]:
        """For each shard, the updates that a replica of it said it applied."""
        found: dict[int, set[Update]] = {}
        for event in self.of(Applied):
            updates = zip(event.workers, event.incarnations, event.seqs, strict=True)
            found.setdefault(event.shard, set()).update(updates)
        return found


def results(futures: Iterable[Future]) -> list[Any]:
    """What the workers returned, in time."""
    return [future.result(timeout=SECONDS) for future in futures]


def versions(ps: ParameterServer) -> list[int]:
    """How many updates each shard has applied; -1 for one that is down."""
    return [reply.version if reply else -1 for reply in ps.audit()]


def audited(ps: ParameterServer) -> list[Description]:
    """The numbers of every shard, once all of them answer."""

    def complete() -> Sequence[Description] | None:
        replies = [reply for reply in ps.audit() if reply is not None]
        return replies if len(replies) == len(ps.group.layout.shards) else None

    return list(eventually(complete, SECONDS) or ())


def counts(ps: ParameterServer) -> list[int]:
    """The count that the weights of each shard hold; all weights of a shard must agree."""
    weights, found = ps.pull(), []
    for shard, layout in enumerate(ps.group.layout.shards):
        buffer, _ = ps.group.layout.gather(shard, weights)
        values = {float(x) for piece in layout.pieces for x in piece.view(buffer)}
        assert len(values) == 1, f"shard {shard} holds different counts: {values}"
        found.append(int(values.pop()))
    return found


def nodes(
    servers: int = 2, replicas: int = 0, spares: int = 0, store: bool = False, workers: int = 2
) -> list[NodeSpec]:
    """Nodes with roles: servers, `replicas` more for each of them, and the others."""
    hosting = [f"server-{s}" for s in range(servers)]
    hosting += [f"replica-{s}-{r}" for s in range(servers) for r in range(1, replicas + 1)]
    hosting += [f"spare-{i}" for i in range(spares)]
    specs = [NodeSpec(name, "server") for name in hosting]
    specs += [NodeSpec("store-0", "store")] if store else []
    return specs + [NodeSpec(f"worker-{i}", "worker") for i in range(workers)]
