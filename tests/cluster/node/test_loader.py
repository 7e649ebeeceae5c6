"""Leased data in torch: what a loader yields, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import Client

import dps
from dps import SGD, ParameterServer, Worker
from dps.cluster.node.batches import Batches
from dps.core.leases import Applied
from dps.errors import ConfigurationError
from dps.testing import VirtualCluster
from tests.support.needs_torch import needs_torch
from tests.support.training import audited, results

pytestmark = [pytest.mark.cluster, *needs_torch]

EXAMPLES = 50
EPOCHS = 2
OF_RUN = {"data": EXAMPLES, "batch_size": 4, "epochs": EPOCHS, "shuffle": 3, "lease": 2}


class Squares:
    """A dataset of torch: numbers and their squares."""

    def __init__(self, examples: int = EXAMPLES) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index**2


def count(choices: dict[str, Any], worker: Worker, batches: Batches) -> int:
    """Add one to the weight of each example of a batch; return how many batches it had."""
    done = 0
    for numbers, squares in dps.torch.loader(batches, Squares(), **choices):
        assert (squares == numbers**2).all()
        gradient = np.zeros(EXAMPLES)
        gradient[numbers.numpy()] = -1.0
        worker.push_pull({"w": gradient})
        done += 1
    return done


@pytest.mark.parametrize(
    "choices", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}]
)
def test_each_example_is_used_once_in_each_epoch(
    with_roles: Client, choices: dict[str, Any]
) -> None:
    with ParameterServer(with_roles, {"w": np.zeros(EXAMPLES)}, optimizer=SGD(1.0)) as ps:
        done = results(ps.run(partial(count, choices), workers=2, **OF_RUN))
        assert sum(done) == 13 * EPOCHS
        assert ps.pull()["w"].tolist() == [EPOCHS] * EXAMPLES
        assert [*audited(ps)[0].batches.values()] == [Applied(13)] * EPOCHS


def without_a_push(worker: Worker, batches: Batches) -> None:
    for _ in dps.torch.loader(batches, Squares()):
        worker.pull()


def of_another_length(worker: Worker, batches: Batches) -> None:
    next(dps.torch.loader(batches, Squares(7)))


def shuffled(worker: Worker, batches: Batches) -> None:
    next(dps.torch.loader(batches, Squares(), shuffle=True))


def out_of_order(worker: Worker, batches: Batches) -> None:
    next(dps.torch.loader(batches, Squares(), in_order=False))


def of_a_worker(worker: Worker, batches: Batches) -> None:
    next(dps.torch.loader(worker, Squares()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (without_a_push, r"batch 0 of epoch 0 was not pushed"),
        (of_another_length, r"the dataset has 7 examples, and the data of the run 50"),
        (shuffled, r"shuffle=True: set the size and order of batches"),
        (out_of_order, r"in_order=False: set the size and order of batches"),
        (of_a_worker, r"batches=.*, expected the Batches"),
    ],
)
def test_what_would_break_exactly_once_is_refused(
    train: Callable[[Worker, Batches], None], message: str
) -> None:
    with (
        VirtualCluster() as cluster,
        ParameterServer(cluster, {"w": np.zeros(EXAMPLES)}, optimizer=SGD(1.0)) as ps,
    ):
        (future,) = ps.run(train, workers=1, **OF_RUN)
        with pytest.raises(ConfigurationError, match=message):
            future.result()
