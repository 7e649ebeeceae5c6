"""What a worker keeps of its requests."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client

from dps import ParameterServer, Worker
from dps.core.tables.table import SparseSpec
from tests.support.training import results


def read_and_push(worker: Worker) -> int:
    for key in range(50):
        worker.pull_rows("t", [key])
    worker.push(rows={"t": ([], np.zeros((0, 1), np.float32))})
    return len(worker._requests)


@pytest.mark.cluster
def test_a_worker_keeps_no_reply(plain: Client) -> None:
    with ParameterServer(plain, {"w": np.zeros(2)}, tables=[SparseSpec("t", 1)]) as ps:
        assert results(ps.run(read_and_push)) == [1]
