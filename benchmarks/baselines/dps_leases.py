"""dps on leased data, whose lost nodes are replaced. The argument is the folder of its task."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import count

from benchmarks.baselines.task import Gradients, Task, Trace
from benchmarks.recovery import nodes_for
from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.batches import Batches
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.strategy import PRESETS, with_checkpoint_path

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
            trace.applied(read.updates, weights, server)


def main(folder: str) -> None:
    """Train on all nodes, and replace those that are lost."""
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
        over = threading.Event()
        nodes = [each.name for each in nodes_for(recovery, task.workers)]
        replacing = threading.Thread(target=_replace, args=(cluster, nodes, task, over))
        replacing.start()
        try:
            step = partial(train, folder, cluster.pids["server-0"])
            leased = {"batch_size": task.batch_size, "epochs": task.epochs, "shuffle": task.seed}
            ps.run(step, "all", task.examples, **leased)
        finally:
            over.set()
            replacing.join()
        Trace(task).ended(ps.pull())


def _replace(cluster: LocalCluster, nodes: list[str], task: Task, over: threading.Event) -> None:
    """Start a new node for each that is lost, until the training is over."""
    numbers = count(task.workers)
    while not over.wait(POLL_SECONDS):
        for name in [name for name in nodes if cluster.gone(name, 0.0)]:
            time.sleep(task.back_after)
            role = "worker" if name.startswith("worker") else "spare"
            nodes[nodes.index(name)] = again = f"{role}-{next(numbers)}"
            cluster.start(NodeSpec(again, resource_of(again)))


if __name__ == "__main__":
    main(sys.argv[1])
