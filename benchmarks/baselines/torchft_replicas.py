"""Replicas that average their gradients by torchft, and continue when one of them is lost.

There is no server: every worker has all of the weights and applies the same sums of gradients,
which is one synchronous step. When a replica dies the others take a new quorum without it, and its
successor has the weights from one of them. So there are no checkpoints, and at most the step under
way is lost. The replica with rank 0 is killed. The argument of the program is the folder of its
task.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.baselines.task import MAX_RESTARTS, Gradients, Task, Trace

HOST = "localhost"
TIMEOUT = timedelta(seconds=30)


def train(folder: str, worker: int, lighthouse: str) -> None:
    """Run a replica until all gradients are in the weights."""
    import torch
    from torch.distributed import ReduceOp, TCPStore
    from torchft import Manager, ProcessGroupGloo

    task = Task.read(folder)
    trace = Trace(task)
    weights = {k: torch.from_numpy(v) for k, v in task.restore()[0].items()}
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}  # the same memory

    def load(state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            weights[name].copy_(tensor)

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {name: tensor.clone() for name, tensor in weights.items()},
        min_replica_size=1,
        use_async_quorum=False,  # so that a successor takes part as soon as it has the weights
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker-{worker}",
        hostname=HOST,
        init_sync=False,  # all start from the same values
    )
    step, gradients = 0, Gradients(task, worker)
    trace.began()
    while manager.batches_committed() < task.updates:
        manager.start_quorum()
        if manager.current_step() != step:  # its own was not committed, or it has come later
            step = manager.current_step()
            gradients = Gradients(task, worker, done=step)
        found = [torch.from_numpy(array) for array in gradients.next(arrays).values()]
        flat = torch.cat([tensor.flatten() for tensor in found])
        manager.allreduce(flat, reduce_op=ReduceOp.SUM).wait()
        step += 1
        if not manager.should_commit():
            continue
        parts = flat.split([tensor.numel() for tensor in found])
        for tensor, part in zip(weights.values(), parts, strict=True):
            tensor.sub_(part.view_as(tensor), alpha=task.learning_rate)
        if manager.participating_rank() == 0:
            trace.applied(manager.batches_committed(), arrays)
    if manager.participating_rank() == 0:
        trace.ended(arrays)
    manager.shutdown(wait=False)


def main(folder: str) -> None:
    """Start the lighthouse and the replicas, and restart a replica that ends early."""
    from torchft.coordination import LighthouseServer

    task, context = Task.read(folder), multiprocessing.get_context("spawn")
    # What the documentation of torchft starts its lighthouse with.
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10_000
    )
    # The name of the host, which it says of itself, may not lead anywhere.
    address = f"http://{HOST}:{lighthouse.address().rpartition(':')[2]}"

    def started(worker: int) -> BaseProcess:
        process = context.Process(target=train, args=(folder, worker, address))
        process.start()
        return process

    replicas = {worker: started(worker) for worker in range(task.workers)}
    restarts = 0
    while replicas:
        ended = connection.wait([process.sentinel for process in replicas.values()])
        for worker, process in list(replicas.items()):
            if process.sentinel not in ended:
                continue
            process.join()
            del replicas[worker]
            if process.exitcode and restarts < MAX_RESTARTS:
                restarts += 1
                time.sleep(task.back_after)
                replicas[worker] = started(worker)
            elif process.exitcode:
                sys.exit(1)
    lighthouse.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
