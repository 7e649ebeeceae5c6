"""A parameter server over torch's RPC; a supervisor restarts its whole group from a file.

RPC has a fixed group and cannot replace a lost member. When a process ends, the supervisor ends the
others and starts all of them as a new group. The server restores the newest checkpoint, and each
worker resumes after the gradients in it, so lost gradients are computed again. The argument of the
program is the folder of its task.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import warnings
from functools import cache
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.baselines.task import MAX_RESTARTS, Gradients, Task, Trace

SERVER = "server"


class Server:
    """Holds the weights. RPC calls it in many threads."""

    def __init__(self, folder: str) -> None:
        import torch

        self._task = Task.read(folder)
        self._trace = Trace(self._task)
        weights, self._done = self._task.restore()
        self._weights = {name: torch.from_numpy(array) for name, array in weights.items()}
        self._one_at_a_time = threading.Lock()

    def pull(self, worker: int) -> tuple[int, dict[str, Any]]:
        """Return how many gradients of a worker have been applied, and the weights."""
        with self._one_at_a_time:
            return self._done[worker], self._copy()

    def push_pull(self, worker: int, gradients: dict[str, Any]) -> dict[str, Any]:
        """Apply a gradient and return the weights."""
        with self._one_at_a_time:
            for name, gradient in gradients.items():
                self._weights[name].sub_(gradient, alpha=self._task.learning_rate)
            self._done[worker] += 1
            version, arrays = sum(self._done), {k: v.numpy() for k, v in self._weights.items()}
            if version % self._task.every == 0:
                self._task.save(arrays, self._done)
            self._trace.applied(version, arrays)
            return self._copy()

    def finish(self) -> None:
        """Record that all workers are done."""
        self._trace.ended({name: tensor.numpy() for name, tensor in self._weights.items()})

    def _copy(self) -> dict[str, Any]:
        # It is sent when the lock is free again.
        return {name: tensor.clone() for name, tensor in self._weights.items()}


@cache
def served(folder: str) -> Server:
    """Return the server of this process."""
    return Server(folder)


def serve(folder: str, group: str) -> None:
    """Be the server, until all are done."""
    from torch.distributed import rpc

    served(folder)
    _meet(SERVER, 0, Task.read(folder), group)
    rpc.shutdown()
    served(folder).finish()


def work(folder: str, group: str, number: int) -> None:
    """Compute, push and pull the rest of a worker's share."""
    import torch
    from torch.distributed import rpc

    task = Task.read(folder)
    Gradients(task, number)  # loads what it needs before the others wait for it
    _meet(f"worker-{number}", 1 + number, task, group)
    server = rpc.remote(SERVER, served, args=(folder,))
    done, weights = server.rpc_sync().pull(number)
    gradients = Gradients(task, number, done)
    Trace(task).began()
    for _ in range(done, task.share(number)):
        found = gradients.next({name: tensor.numpy() for name, tensor in weights.items()})
        pushed = {name: torch.from_numpy(array) for name, array in found.items()}
        weights = server.rpc_sync().push_pull(number, pushed)
    rpc.shutdown()


def _meet(name: str, rank: int, task: Task, group: str) -> None:
    from torch.distributed import rpc

    # torch says so of what its own RPC does.
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
    os.environ["TP_SOCKET_IFNAME"] = "lo"  # the name of the host may not lead anywhere
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{group}")
    world_size = 1 + task.workers
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def main(folder: str) -> None:
    """Start the group, and restart it if one of its processes ends early."""
    task = Task.read(folder)
    for attempt in range(1 + MAX_RESTARTS):
        if attempt:
            time.sleep(task.back_after)
        if all_done(_started(task, str(task.path.absolute() / f"group-{attempt}"))):
            return
    sys.exit(1)


def _started(task: Task, group: str) -> list[BaseProcess]:
    context, folder = multiprocessing.get_context("spawn"), task.folder
    members: list[BaseProcess] = [context.Process(target=serve, args=(folder, group))]
    for number in range(task.workers):
        members.append(context.Process(target=work, args=(folder, group, number)))
    for member in members:
        member.start()
    return members


def all_done(members: list[BaseProcess]) -> bool:
    """Wait for all to end; as soon as one of them fails, end the others.

    A process that ends closes its pipe a moment before it has an exit code, so that is asked for
    before each wait: the others may never end by themselves, not even when their calls fail.
    """
    while left := [member for member in members if member.is_alive()]:
        if any(member.exitcode for member in members):
            for member in left:
                member.kill()
        connection.wait([member.sentinel for member in left])
    for member in members:
        member.join()
    return not any(member.exitcode for member in members)


if __name__ == "__main__":
    main(sys.argv[1])
