"""The task of a baseline, and the common part of all: gradients, checkpoints, the trace.

A baseline is a program whose argument is a folder. The folder has its task, its checkpoints and its
trace: a line for each applied gradient, and snapshots of the weights, which are scored after the
training. This module imports nothing that only dps needs, such as Dask.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from flows.config.workload import WorkloadSection
from flows.workloads import DATASETS, Arrays, Dataset, Workload, batches

TASK_FILE = "task.json"
TRACE_FILE = "trace.jsonl"
SNAPSHOTS = "snapshots"
CHECKPOINTS = "checkpoints"
MAX_RESTARTS = 3  # of supervisors, so that what always fails comes to an end
DONE = "_done"  # beside the arrays of a checkpoint
COUNT = "_count"  # beside the parameters: how often the gradient of each example was applied


@dataclass(frozen=True)
class Task:
    """The training of a baseline.

    Attributes
    ----------
    folder
        Folder of the task, empty at first.
    seed
        Draws the initial weights, and each worker's order of batches.
    workload, dataset
        The kind of the model with its settings, and the kind of the data set.
    workers, updates, batch_size
        Number of workers, number of gradients of all workers, and examples of a gradient.
    compute_seconds
        Minimum seconds of a gradient.
    learning_rate
        Learning rate of SGD.
    snapshot_seconds
        Seconds between two snapshots of the weights.
    every
        Updates between two checkpoints.
    back_after
        Seconds for which a machine is away after its process was killed, before a new one starts.
    time_limit
        Seconds until the program fails.
    epochs
        If not 0, number of applications of each example: workers divide the batches of each epoch,
        an array beside the parameters counts the examples, and only the last weights are saved. 0:
        each worker has its own order of all examples.
    recovery
        The recovery strategy, for dps.
    """

    folder: str
    seed: int
    workload: Mapping[str, Any]
    dataset: str
    workers: int
    updates: int
    batch_size: int
    compute_seconds: float
    learning_rate: float
    snapshot_seconds: float
    every: int
    back_after: float
    time_limit: float
    epochs: int = 0
    recovery: str = ""

    def write(self) -> None:
        """Write the task into its folder, which is created."""
        for folder in (SNAPSHOTS, CHECKPOINTS):
            (self.path / folder).mkdir(parents=True)
        (self.path / TASK_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: str) -> Task:
        """Read the task of a folder."""
        return cls(**json.loads((Path(folder) / TASK_FILE).read_text("utf-8")))

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def model(self) -> Workload:
        """The model that is trained."""
        section = TypeAdapter(WorkloadSection).validate_python(dict(self.workload))
        model: Workload = section.build(DATASETS[self.dataset].shape)
        return model

    def share(self, worker: int) -> int:
        """Number of gradients of a worker."""
        each, rest = divmod(self.updates, self.workers)
        return each + (worker < rest)

    def save(self, weights: Arrays, done: Sequence[int]) -> None:
        """Write a checkpoint atomically: the weights, and the number of each worker's gradients."""
        _save(self.path / CHECKPOINTS / f"{sum(done):08d}.npz", {**weights, DONE: np.array(done)})

    def restore(self) -> tuple[Arrays, list[int]]:
        """Return the content of the newest checkpoint, or the initial values without one."""
        found = sorted((self.path / CHECKPOINTS).glob("*.npz"))
        if not found:
            return self.initial(), [0] * self.workers
        weights = _load(found[-1])
        return weights, [int(n) for n in weights.pop(DONE)]

    def initial(self) -> Arrays:
        """Return the initial weights, and zeros for the counts."""
        weights = self.model.initial(np.random.default_rng([self.seed, 0]))
        if self.epochs:
            weights[COUNT] = np.zeros(self.examples, np.float32)
        return weights

    @property
    def examples(self) -> int:
        """Number of used examples; if they are counted, only those in full batches."""
        there = len(self.data.x_train)
        return there - there % self.batch_size if self.epochs else there

    @property
    def data(self) -> Dataset:
        """The data set."""
        return DATASETS[self.dataset]().load("train")


class Gradients:
    """The gradients of one worker, in its order of batches, each taking as long as the task says.

    The first `done` batches of the order are left out: their gradients are in the checkpoint.
    """

    def __init__(self, task: Task, worker: int, done: int = 0) -> None:
        self._task, self._model, self._data = task, task.model, task.data
        rng = np.random.default_rng([task.seed, 1 if task.epochs else 1 + worker])
        self._order = batches(rng, task.examples, task.batch_size)
        if task.epochs:
            self._order = islice(self._order, worker, None, task.workers)
        deque(islice(self._order, done), maxlen=0)

    def next(self, weights: Arrays) -> Arrays:
        """Compute the gradient of the next batch at these weights."""
        return self.of(next(self._order), weights)

    def of(self, batch: np.ndarray, weights: Arrays) -> Arrays:
        """Compute the gradient of a batch, given its indices, at these weights."""
        began = time.monotonic()
        x, y = self._data.x_train[batch], self._data.y_train[batch]
        parameters = {name: array for name, array in weights.items() if name != COUNT}
        _, gradients = self._model.gradient(parameters, x, y)
        if self._task.epochs:
            gradients[COUNT] = np.zeros_like(weights[COUNT])
            gradients[COUNT][batch] = -1 / self._task.learning_rate  # so that a step adds one
        time.sleep(max(0.0, self._task.compute_seconds - (time.monotonic() - began)))
        return gradients


class Trace:
    """Records the actions of a process of a baseline; the record survives the process."""

    def __init__(self, task: Task) -> None:
        self._folder, self._every = task.path, task.snapshot_seconds
        self._due = inf if task.epochs else 0.0
        self._file = os.open(task.path / TRACE_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def began(self) -> None:
        """Record that a worker is ready and computes its first gradient."""
        self._record("began", time.time())

    def applied(self, version: int, weights: Arrays, pid: int | None = None) -> None:
        """Note that a process applied a gradient: `pid`, or this one; take a snapshot if due."""
        now = time.time()
        self._record("applied", now, pid=pid or os.getpid(), version=version)
        if now >= self._due:
            self._due = now + self._every
            self._snapshot(now, weights)

    def ended(self, weights: Arrays) -> None:
        """Take the last snapshot."""
        self._snapshot(time.time(), weights)

    def _record(self, event: str, now: float, **more: Any) -> None:
        line = json.dumps({"t": now, "event": event, "pid": os.getpid()} | more)
        os.write(self._file, f"{line}\n".encode())

    def _snapshot(self, now: float, weights: Arrays) -> None:
        _save(self._folder / SNAPSHOTS / f"{now:.6f}.npz", weights)


def snapshots(folder: Path) -> list[tuple[float, Arrays]]:
    """Return the snapshots in a folder, with their times in seconds since the Unix epoch."""
    found = sorted((folder / SNAPSHOTS).glob("*.npz"))
    return [(float(path.stem), _load(path)) for path in found]


def _save(path: Path, arrays: Arrays) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    partial.replace(path)


def _load(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
