"""Epochs of Fashion-MNIST while workers and servers are killed: every example once in each.

Run as `python -m tests.soak.epochs`. The model is trained as usual. Beside it, an array counts how
often the gradient of each example was applied; that and the record of each shard are the audit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from random import Random
from typing import Annotated, Any

import numpy as np
import typer
from distributed import KilledWorker

from benchmarks.live import Watch, eventually
from dps.cluster.backends.processes import is_gone
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.node.batches import Batches
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.errors import CapacityError
from dps.events import WorkerJoined
from dps.recovery.chain import Chain
from dps.recovery.strategy import Recovery
from flows.workloads.fashion_mnist import SHAPE, download, find, read
from flows.workloads.mlp import SoftmaxRegression
from tests.soak.counting import Violation, require
from tests.soak.pool import Pool

BATCH = 64
WORKERS = 3
THINK = 0.15  # seconds of computing that a worker emulates, so that training outlasts the kills
SECONDS = 60.0  # until something that happens for sure counts as not happening
MODEL = SoftmaxRegression(SHAPE)
COUNT = "count"


@cache
def examples() -> tuple[np.ndarray, np.ndarray]:
    """The pixels and classes of the training set."""
    return read(find(None) or download(), "train")


def train(worker: Worker, batches: Batches) -> int:
    """Train on leased batches, and count their examples; return how many batches it had."""
    x, y = examples()
    weights, done = worker.pull(), 0
    for chosen in batches:
        model = {name: weights[name] for name in MODEL.parameters}
        _, gradients = MODEL.gradient(model, x[chosen], y[chosen])
        counted = np.zeros(len(y), np.float32)
        counted[chosen] = -1.0
        weights = worker.push_pull({**gradients, COUNT: counted})
        worker.sleep(THINK)
        done += 1
    return done


class Run:
    """A training on leased data, whose nodes are killed and replaced."""

    def __init__(self, pool: Pool, seed: int, epochs: int) -> None:
        self._pool = pool
        self._random = Random(seed)
        self._epochs = epochs
        self._watch = Watch()
        self._futures: dict[str, Any] = {}
        self.examples = len(examples()[1])
        self._batches = -(-self.examples // BATCH)
        start = {**MODEL.initial(np.random.default_rng(seed)), COUNT: np.zeros(self.examples, "f4")}
        self._ps = ParameterServer(
            pool.cluster.client,
            start,
            shards=2,
            optimizer={COUNT: SGD(1.0), "*": SGD(0.05)},
            recovery=Recovery(Chain(2)),
            on_event=self._watch,
        )

    def __call__(self, kills: Sequence[str]) -> None:
        """Train, with kills of a "worker" or "server" at even distances; then audit."""
        with self._ps as ps:
            leased = {"data": self.examples, "batch_size": BATCH, "epochs": self._epochs}
            futures = ps.run(train, workers=WORKERS, **leased, shuffle=self._random.randrange(1000))
            self._futures = {f"worker-{n}": future for n, future in enumerate(futures)}
            total = self._batches * self._epochs
            for number, kind in enumerate(kills, 1):
                at = total * number // (len(kills) + 2)
                eventually(partial(self._reached, at), f"update {at}", SECONDS)
                self._kill_worker() if kind == "worker" else self._kill_server()
            eventually(lambda: not self._running(), "the end of the workers", 10 * SECONDS)
            self._audit()

    def _reached(self, version: int) -> bool:
        for name, future in self._futures.items():
            error = future.exception() if future.status == "error" else None
            require(isinstance(error, KilledWorker | None), f"{name}: {error!r}")
        return min(shard.version or 0 for shard in self._ps.shards) >= version

    def _running(self) -> list[str]:
        return [name for name, future in self._futures.items() if future.status == "pending"]

    def _joined(self) -> list[str]:
        """The nodes of the workers that take part."""
        there, running = self._pool.alive(), self._running()
        joined = {each.worker: each.node for each in self._watch.record.of(WorkerJoined)}
        return sorted(node for w, node in joined.items() if w in running and node in there)

    def _kill_worker(self) -> None:
        nodes = eventually(self._complete, "as many workers as at first", SECONDS)
        self._kill(self._random.choice(nodes))

    def _complete(self) -> list[str]:
        """Return the nodes of all workers; while one is missing, start it and return nothing."""
        if len(nodes := self._joined()) == WORKERS:
            return nodes
        with suppress(CapacityError):  # a new node has not joined yet, or a worker has not
            self._futures[f"worker-{len(self._futures)}"] = self._ps.add_worker(train)
        return []

    def _kill(self, node: str) -> None:
        require(is_gone(self._pool.cluster.kill(node), SECONDS), f"{node} was not killed")
        self._pool.replace(node)

    def _kill_server(self) -> None:
        nodes = eventually(self._holding, "two copies of each shard", SECONDS)
        self._kill(self._random.choice(nodes))

    def _holding(self) -> list[str]:
        """The nodes that hold shards, once each shard has both of its copies."""
        shards = self._ps.shards
        if any(len(shard.replicas) < shard.wanted for shard in shards):
            return []
        return sorted({node for shard in shards for node in shard.replicas})

    def _audit(self) -> None:
        counts = self._ps.pull()[COUNT]
        wrong = np.flatnonzero(counts != self._epochs)
        require(not len(wrong), f"{len(wrong)} examples were not applied {self._epochs} times")
        for reply in self._ps.audit():
            require(reply is not None, "a shard does not answer")
            record = [(a.below, a.bits) for a in reply.batches.values()] if reply else []
            require(record == [(self._batches, b"")] * self._epochs, f"its record is {record}")


def main(
    workers: Annotated[int, typer.Option(help="Kills of workers.")] = 100,
    servers: Annotated[int, typer.Option(help="Kills of servers.")] = 20,
    epochs: Annotated[int, typer.Option(help="Epochs.")] = 3,
    seed: Annotated[int, typer.Option(help="Random seed of the order of kills.")] = 0,
) -> None:
    """Train on Fashion-MNIST under kills; audit that each example was applied once an epoch."""
    kills = ["worker"] * workers + ["server"] * servers
    Random(seed).shuffle(kills)
    began = time.monotonic()
    try:
        with Pool() as pool:
            pool.fill()
            run = Run(pool, seed, epochs)
            run(kills)
    except Violation as violation:
        print(f"seed {seed}: {violation}", file=sys.stderr)
        raise typer.Exit(1) from violation
    print(
        f"seed {seed}: {epochs * run.examples:,} examples, 0 lost, 0 repeated; {workers} workers "
        f"and {servers} servers were killed; {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    typer.run(main)
