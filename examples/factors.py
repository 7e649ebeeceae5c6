"""Matrix factorisation with a sparse table of users and one of items.

The prediction of a rating is b + c + p·q, where (p, b) is the row of its user and (q, c) that of
its item: vectors and biases (`examples.factor_model` has the objective). Rows have the keys of the
data, and exist after their first push.

Users are spread over workers. A worker reads only the rows of its batch of ratings, and pushes
their gradients. The server uses AdaGrad, because the rates of updates differ between rows. The
penalty belongs to each rating, so other rows have no gradient.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dps import SSP, AdaGrad, ConfigurationError, Normal, ParameterServer, SparseSpec, Worker
from examples.factor_model import PENALTY, Factors, alternate, objective
from examples.outcome import PATIENT, Outcome, Task
from examples.ratings import RatingSource, prepare
from flows.workloads import batches

if TYPE_CHECKING:
    from distributed import Client

TOLERANCE = 0.02
RULE = AdaGrad(0.3)
BOUND = 4
STEPS, EPOCHS = 600, 30  # of all workers together: at least so many steps, and so many epochs
SIZES = {"small": (8, 4000), "large": (16, 20_000)}  # the length of a vector; ratings in a batch
SWEEPS = 30  # of the reference


def train(source: RatingSource, steps: int, size: int, worker: Worker) -> float:
    """Push gradients of batches of this worker's users; return the mean rows of a step."""
    ratings = prepare(source).share(worker.index, worker.workers)
    rng = np.random.default_rng([source.seed, 2, worker.index])
    chosen, about = batches(rng, len(ratings), min(size, len(ratings))), 0
    for _ in range(steps):
        some = ratings.part(next(chosen))
        users, user = np.unique(some.users, return_inverse=True)
        items, item = np.unique(some.items, return_inverse=True)
        pulls = worker.pull_rows_async("users", users), worker.pull_rows_async("items", items)
        of_users, of_items = (pull.wait() for pull in pulls)
        values = some.values.astype(of_users.dtype)
        value, by_users, by_items = objective(of_users[user], of_items[item], values)
        worker.report(loss=value / len(some))
        # A user's gradient is the sum over the batch: keys may be repeated, and are summed.
        worker.push(rows={"users": (some.users, by_users), "items": (some.items, by_items)})
        about += len(users) + len(items)
    return about / steps


def tables(seed: int, length: int) -> tuple[SparseSpec, SparseSpec]:
    """Return a table with small random rows: for zeros, the gradient of p and q is 0."""
    users, items = Normal(0.1, 2 * seed), Normal(0.1, 2 * seed + 1)
    return (
        SparseSpec("users", length + 1, initial=users),
        SparseSpec("items", length + 1, initial=items),
    )


def solve(client: Client, task: Task) -> Outcome:
    """Train, and compare with alternating least squares on ratings that are held out."""
    source = RatingSource(task.data and task.data.absolute(), task.size == "large", task.seed)
    length, batch = SIZES[task.size]
    data, specs = prepare(source), tables(task.seed, length)
    keys_of = data.users, data.items
    begun = [spec.initial_rows(keys) for spec, keys in zip(specs, keys_of, strict=True)]
    if len(data.users) < task.workers:
        raise ConfigurationError(
            f"{source.named} has {len(data.users)} users to learn from, expected at least one for "
            f"each of {task.workers} workers"
        )
    steps = -(-max(STEPS, EPOCHS * len(data.learn) // batch) // task.workers)
    with ParameterServer(
        client,
        {},
        tables=specs,
        shards=task.shards,
        optimizer=RULE,
        consistency=SSP(BOUND),
        recovery=task.recovery,
        timings=PATIENT,
    ) as ps:
        about = client.gather(ps.run(partial(train, source, steps, batch), task.workers))
        rows = [ps.pull_rows(spec.name, keys) for spec, keys in zip(specs, keys_of, strict=True)]
        made = sum(len(ps.pull_range(spec.name)[0]) for spec in specs)
    found, start = Factors(data, *rows), Factors(data, *begun)
    reference = alternate(start, SWEEPS)
    notes = (
        f"{len(data.learn):,} ratings of {len(data.users):,} users and {len(data.items):,} items "
        f"to learn from, {len(data.held_out):,} held out, from {source.named}; λ = {PENALTY:g}",
        f"{made:,} rows exist at the end; a step reads and changes {np.mean(about):,.0f} of them",
        f"the objective is {found.objective():.5g}, the reference's {reference.objective():.5g}",
        f"to say the mean of all ratings has an error of {data.error_of_mean:.4g}",
    )
    named = "alternating least squares from the same start"
    return Outcome("held-out RMSE", found.rmse(), reference.rmse(), named, TOLERANCE, notes)
