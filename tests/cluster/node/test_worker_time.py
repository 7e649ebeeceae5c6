"""The time that a worker tells is that in which it sleeps."""

from __future__ import annotations

import pytest
from distributed import Client

from dps import Worker
from tests.support.training import COUNTING, counts, ones, params, patient_server, results

pytestmark = pytest.mark.cluster

SLEPT = 0.2


def push_and_sleep(worker: Worker) -> float:
    """Sleep while a push is under way; return for how long, by the worker's clock."""
    gradients = ones(worker.pull())
    began = worker.now()
    handle = worker.push_async(gradients)
    worker.sleep(SLEPT)
    slept = worker.now() - began
    handle.wait()
    return slept


def test_a_worker_sleeps_as_long_as_its_clock_says(plain: Client) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        (slept,) = results(ps.run(push_and_sleep))
        assert slept >= SLEPT
        assert counts(ps) == [1]
