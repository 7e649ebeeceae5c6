"""A parameter server as a Ray actor, and workers as further actors; Ray restarts all of them.

The server restores the newest checkpoint when it is made. If a process ends, Ray makes its actor
again (`max_restarts`) and repeats the calls that were under way (`max_task_retries`). A call whose
answer was lost with the process may be applied twice, and updates since the checkpoint are lost. A
worker that is made again resumes after the gradients that the server has applied for it; the other
workers do not go back with a server. The argument of the program is the folder of its task.
"""

from __future__ import annotations

import os
import secrets
import sys
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would tell its makers that it runs
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex()  # else it leaves one in the home folder

import ray

from benchmarks.baselines.task import Gradients, Task, Trace
from flows.workloads import Arrays

STORE_BYTES = 1 << 28


class Server:
    """Holds the weights; one call at a time."""

    def __init__(self, folder: str) -> None:
        self._task = Task.read(folder)
        _stay_away(self._task)
        self._trace = Trace(self._task)
        self._weights, self._done = self._task.restore()

    def pull(self, worker: int) -> tuple[int, Arrays]:
        """Return how many gradients of a worker were applied, and the weights."""
        return self._done[worker], self._weights

    def push_pull(self, worker: int, gradients: Arrays) -> Arrays:
        """Apply a gradient and return the weights."""
        for name, gradient in gradients.items():
            self._weights[name] -= self._task.learning_rate * gradient
        self._done[worker] += 1
        version = sum(self._done)
        if version % self._task.every == 0:
            self._task.save(self._weights, self._done)
        self._trace.applied(version, self._weights)
        return self._weights

    def finish(self) -> None:
        """Take note that all workers are done."""
        self._trace.ended(self._weights)


class Worker:
    """Computes its share of the gradients."""

    def __init__(self, folder: str, number: int) -> None:
        self._task, self._number = Task.read(folder), number
        _stay_away(self._task)
        Gradients(self._task, number)  # loads the data

    def ready(self) -> None:
        """Return when the data are loaded."""

    def train(self, server: ray.actor.ActorHandle) -> None:
        """Compute, push and pull, to the end."""
        done, weights = ray.get(server.pull.remote(self._number))
        gradients = Gradients(self._task, self._number, done)
        Trace(self._task).began()
        for _ in range(done, self._task.share(self._number)):
            pushed = server.push_pull.remote(self._number, gradients.next(weights))
            weights = ray.get(pushed)


def _stay_away(task: Task) -> None:
    """Wait while the machine is away, if Ray restarts this actor."""
    if ray.get_runtime_context().was_current_actor_reconstructed:
        time.sleep(task.back_after)


def main(folder: str) -> None:
    """Start Ray on this machine alone, and train."""
    task = Task.read(folder)
    ray.init(
        address="local",
        num_cpus=1 + task.workers,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=STORE_BYTES,
    )
    try:
        lasting = ray.remote(max_restarts=-1, max_task_retries=-1)
        server = lasting(Server).remote(folder)
        workers = [lasting(Worker).remote(folder, number) for number in range(task.workers)]
        ray.get([server.pull.remote(0), *(worker.ready.remote() for worker in workers)])
        ray.get([worker.train.remote(server) for worker in workers])
        ray.get(server.finish.remote())
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
