"""One process that trains alone, writes checkpoints, and resumes from the newest one.

It needs no framework: a loop, a file, and a supervisor that restarts the program. It takes the
batches of all workers in turn. Lost gradients are computed again, because the loop resumes at the
checkpoint. The argument of the program is the folder of its task.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

from benchmarks.baselines.task import MAX_RESTARTS, Gradients, Task, Trace


def train(folder: str) -> None:
    """Train from the newest checkpoint to the end."""
    task = Task.read(folder)
    trace = Trace(task)
    weights, done = task.restore()
    gradients = [Gradients(task, worker, done[worker]) for worker in range(task.workers)]
    trace.began()
    for version in range(sum(done), task.updates):
        worker = version % task.workers
        for name, gradient in gradients[worker].next(weights).items():
            weights[name] -= task.learning_rate * gradient
        done[worker] += 1
        if (version + 1) % task.every == 0:
            task.save(weights, done)
        trace.applied(version + 1, weights)
    trace.ended(weights)


def main(folder: str) -> None:
    """Start the training, and restart it if its process ends early."""
    context = multiprocessing.get_context("spawn")
    for attempt in range(1 + MAX_RESTARTS):
        if attempt:
            time.sleep(Task.read(folder).back_after)
        process = context.Process(target=train, args=(folder,))
        process.start()
        process.join()
        if process.exitcode == 0:
            return
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
