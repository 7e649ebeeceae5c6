"""dps on leased data, whose lost nodes are replaced. The argument is the folder of its task."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from benchmarks.baselines.task import Gradients, Task, Trace
from benchmarks.recovery import nodes_for
from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.batches import Batches
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.errors import CapacityError
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.strategy import PRESETS, Recovery, with_checkpoint_path

PRELOAD = ("dps.cluster.driver.parameter_server", __name__)
POLL_SECONDS = 0.01


def train(folder: str, server: int, worker: Worker, batches: Batches) -> None:
    """Compute, push and pull; `server` is the process that applies the gradients at first."""
    task = Task.read(folder)
    gradients, trace = Gradients(task, 0), Trace(task)
    weights = worker.pull()
    trace.began()
    for batch in batches:
        weights = worker.push_pull(gradients.of(batch, weights))
        if (read := worker.read_point) is not None:
            trace.applied(read.updates, None, server)


def main(folder: str) -> None:
    """Start nodes and workers, and again those that are lost, until all examples are applied."""
    task = Task.read(folder)
    recovery = with_checkpoint_path(PRESETS[task.recovery], folder)
    if isinstance(recovery.durability, Checkpoint):
        durability = replace(recovery.durability, every=task.every, mode="sync")
        recovery = replace(recovery, durability=durability)
    with (
        LocalCluster(nodes_for(recovery, task.workers), PRELOAD) as cluster,
        ParameterServer(
            cluster.client,
            task.initial(),
            optimizer=SGD(task.learning_rate),
            recovery=recovery,
            on_loss="ignore",
        ) as ps,
    ):
        step = partial(train, folder, cluster.pids["server-0"])
        _run(task, cluster, ps, step, recovery)
        Trace(task).ended(ps.pull())


def _run(
    task: Task, cluster: LocalCluster, ps: ParameterServer, step: Any, recovery: Recovery
) -> None:
    epochs = task.updates * task.batch_size // task.examples
    leased = {"data": task.examples, "batch_size": task.batch_size, "epochs": epochs}
    futures = ps.run(step, task.workers, **leased, shuffle=task.seed)
    nodes = [each.name for each in nodes_for(recovery, task.workers)]
    due: dict[str, float] = {}  # when the machine of a lost node is there again
    joining, numbers = 0, count(task.workers)
    while any(future.status == "pending" for future in futures):
        time.sleep(POLL_SECONDS)
        for name in [name for name in nodes if cluster.gone(name, 0.0)]:
            nodes.remove(name)
            due[name] = time.monotonic() + task.back_after
        for name in [name for name, at in due.items() if at <= time.monotonic()]:
            del due[name]
            is_worker = name.startswith("worker")
            nodes.append(f"{'worker' if is_worker else 'spare'}-{next(numbers)}")
            cluster.start(NodeSpec(nodes[-1], resource_of(nodes[-1])))
            joining += is_worker
        if joining:
            with suppress(CapacityError):  # the new node has not joined yet
                futures.append(ps.add_worker(step))
                joining -= 1


if __name__ == "__main__":
    main(sys.argv[1])
