"""Owns one trial, from fresh processes to the last event. Start reading here: it names every layer.

A trial brings up a cluster of processes on this machine, a parameter server on it, the workers, an
evaluator on a node of its own, and an injector that carries out the fault plan. Everything that
happens is an event, and the events are all that a trial leaves behind.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
from distributed import Client, wait

from dps.chaos.injector import Injector
from dps.cluster.local import LocalCluster, NodeSpec
from dps.cluster.server import ParameterServer
from dps.cluster.transport import SystemClock
from dps.cluster.worker import Worker
from dps.core.recovery import with_checkpoint_path
from dps.errors import DpsError
from dps.events import (
    Audited,
    Event,
    FaultMissed,
    Sink,
    TrainingStarted,
    TrialEnded,
    TrialResumed,
    TrialStarted,
)
from dps.protocol.group import Timings
from flows.config import TrialConfig
from flows.grid import Trial
from flows.record import EVENTS_FILE, EventWriter
from flows.resume import CHECKPOINTS
from flows.workloads import SHAPES, Dataset, Workload, batches, build_workload, load_dataset

PACKAGES = ("dps", "dask", "distributed", "numpy", "mlflow", "scikit-learn", "safetensors")
PRELOAD = ("dps.cluster.server", "flows.trial")


def run_trial(trial: Trial, folder: Path, sink: Sink, path: str | None = None) -> None:
    """Run one trial and record it in `folder`.

    Parameters
    ----------
    trial
        What to run.
    folder
        Gets `events.jsonl`, and the trial's checkpoints if it writes any.
    sink
        Is called with every event as well, from another thread.
    path
        Checkpoints of this trial to go on from; None: from its start.

    Notes
    -----
    The record ends with `TrialEnded` in any case, but for an interruption (`KeyboardInterrupt`):
    then it just stops, and the processes are ended before the interruption goes on.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # a lost node is no news here
    clock = SystemClock()
    missed: list[FaultMissed] = []
    with EventWriter(folder / EVENTS_FILE) as write:

        def record(event: Event) -> None:
            if isinstance(event, FaultMissed):
                missed.append(event)
            write(event)
            sink(event)

        record(TrialStarted(clock.now(), trial.name, settings(trial), versions()))
        try:
            failure = _train(trial, folder, record, path)
        except (DpsError, OSError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"
        if failure is not None:
            record(TrialEnded(clock.now(), "failed", failure))
        elif missed:
            reasons = "; ".join(f"fault on {m.target}: {m.reason}" for m in missed)
            record(TrialEnded(clock.now(), "invalid", reasons))
        else:
            record(TrialEnded(clock.now(), "valid", ""))


def settings(trial: Trial) -> dict[str, Any]:
    """Everything that the trial depends on, for its record."""
    return {
        "trial": trial.name,
        "experiment": trial.experiment,
        "labels": trial.labels,
        "seed": trial.seed,
        "digest": trial.digest,
        "config": trial.config.model_dump(mode="json"),
    }


def versions() -> dict[str, str]:
    """The software that the trial ran on."""
    return {"python": python_version(), **{name: version(name) for name in PACKAGES}}


def _train(trial: Trial, folder: Path, record: Sink, path: str | None) -> str | None:
    """Train under the fault plan; return why it failed, or None."""
    config, clock = trial.config, SystemClock()
    with LocalCluster(nodes(config), PRELOAD) as cluster:
        injector: Injector | None = None

        def on_event(event: Event) -> None:
            record(event)
            if injector is not None:
                injector.note(event)

        with _server(trial, cluster.client, folder, on_event, path) as ps:
            done = _done(ps, config)
            ps.evaluate(Scorer(config), config.evaluation.every_seconds)
            injector = Injector(_faults(ps, config), cluster, ps.audit, clock, record)
            elements = sum(math.prod(spec.shape) for spec in ps.group.layout.arrays)
            record(
                TrainingStarted(
                    clock.now(), config.training.workers, config.server.shards, elements
                )
            )
            if ps.saved is not None and path is not None:
                record(TrialResumed(clock.now(), path, ps.saved.updates))
            with injector:
                futures = ps.run(partial(train, config, done), workers=config.training.workers)
                with cluster.client.as_current():
                    failure = _finished(futures, config.time_limit)
            _audit(ps, clock.now(), record)
    return failure


def _server(
    trial: Trial, client: Client, folder: Path, on_event: Sink, path: str | None
) -> ParameterServer:
    config, timings = trial.config, Timings(lease=trial.config.server.lease)
    if path is not None:
        return ParameterServer.resume(client, path, on_event=on_event, timings=timings)
    checkpoints = str((folder / CHECKPOINTS).absolute())
    return ParameterServer(
        client,
        initial(config),
        shards=config.server.shards,
        optimizer=config.build_optimizer(),
        consistency=config.build_consistency(),
        recovery=with_checkpoint_path(config.build_recovery(), checkpoints),
        on_event=on_event,
        timings=timings,
        about=settings(trial),
    )


def initial(config: TrialConfig) -> dict[str, np.ndarray]:
    """The values that the model starts from; they depend on the seed alone."""
    return _workload(config).initial(np.random.default_rng([config.seed, 0]))


def _done(ps: ParameterServer, config: TrialConfig) -> tuple[int, ...]:
    """How many gradients of each worker are in what the trial goes on from, on every shard."""
    names = [f"worker-{index}" for index in range(config.training.workers)]
    if ps.saved is None:
        return (0,) * len(names)
    tables = [state.workers for state in ps.saved.states]
    return tuple(min(t[name].applied if name in t else 0 for t in tables) for name in names)


def _faults(ps: ParameterServer, config: TrialConfig) -> tuple[Any, ...]:
    """The fault plan, but for what lies before the point from which the trial goes on."""
    behind = ps.saved.updates if ps.saved is not None else 0
    return tuple(fault for fault in config.build_faults() if fault.at_updates > behind)


def _finished(futures: Sequence[Any], limit: float) -> str | None:
    """Wait for the workers; return why the training failed, or None."""
    try:
        wait(futures, timeout=limit)
    except TimeoutError:
        return f"the training did not end within the time limit of {limit:g} s"
    for future in futures:
        if future.status == "error":
            error = future.exception()
            return f"{type(error).__name__}: {error}"
    return None


def _audit(ps: ParameterServer, now: float, record: Sink) -> None:
    for view, reply in zip(ps.table().views, ps.audit(), strict=True):
        if reply is not None:
            record(
                Audited(
                    now,
                    view.shard,
                    view.epoch,
                    reply.node,
                    reply.version,
                    reply.applied,
                    reply.duplicates,
                )
            )


# -- what runs on the nodes ----------------------------------------------------------------------


def train(config: TrialConfig, done: Sequence[int], worker: Worker) -> None:
    """One worker's loop, the same for every strategy: gradient, push and pull, report.

    What it reports as computing is the gradient and the emulated rest of it; the time until the
    next gradient is spent waiting for the server, or for other workers.

    `done` is how many gradients of each worker an interrupted part of the trial has applied.
    """
    workload = _workload(config)
    data = load_dataset(**config.dataset.model_dump(), part="train")
    rng = np.random.default_rng([config.seed, 1 + worker.index])
    order = batches(rng, len(data.x_train), config.training.batch_size)
    skipped = done[worker.index]
    deque(islice(order, skipped), maxlen=0)
    params = worker.pull()
    for _ in range(_share(config, worker.index) - skipped):
        began = time.perf_counter()
        batch = next(order)
        loss, gradients = workload.gradient(params, data.x_train[batch], data.y_train[batch])
        spent = time.perf_counter() - began
        time.sleep(max(0.0, config.training.compute_seconds - spent))
        computed = time.perf_counter() - began
        params = worker.push_pull(gradients)
        worker.report(loss=loss, compute_seconds=computed)


def _share(config: TrialConfig, index: int) -> int:
    """How many of the gradients this worker computes."""
    each, rest = divmod(config.training.updates, config.training.workers)
    return each + (index < rest)


class Scorer:
    """Scores weights on the test set, which it loads when it is first called."""

    def __init__(self, config: TrialConfig) -> None:
        self._config = config

    def __call__(self, weights: Mapping[str, np.ndarray]) -> tuple[float, float]:
        """Return loss and accuracy."""
        return self._workload.evaluate(dict(weights), self._data.x_test, self._data.y_test)

    @cached_property
    def _workload(self) -> Workload:
        return _workload(self._config)

    @cached_property
    def _data(self) -> Dataset:
        return load_dataset(**self._config.dataset.model_dump(), part="test")


def _workload(config: TrialConfig) -> Workload:
    chosen = config.workload.model_dump()
    return build_workload(chosen.pop("kind"), SHAPES[config.dataset.kind], **chosen)


def nodes(config: TrialConfig) -> list[NodeSpec]:
    """The trial's nodes, each with the Dask resource that its role is known by."""
    hosting = {"server", "replica", "spare"}
    kinds = {name: name.split("-")[0] for name in config.node_names}
    return [NodeSpec(n, "server" if kind in hosting else kind) for n, kind in kinds.items()]
