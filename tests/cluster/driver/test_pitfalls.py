"""What goes wrong with parameters in plain Dask actors, and does not here."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from threadpoolctl import threadpool_info

from dps import SGD, ParameterServer, Worker
from dps.cluster.backends.local import LocalCluster
from dps.protocol.transport import TransportChoice
from tests.support.training import COUNTING, PRELOAD, SECONDS, count, nodes, ones, results

pytestmark = pytest.mark.cluster

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A cluster that no test of this module breaks."""
    with LocalCluster(nodes(1), PRELOAD) as found:
        yield found


def large(megabytes: int) -> dict[str, np.ndarray]:
    return {"w": np.zeros(megabytes * MEGABYTE // 4, np.float32)}


async def longest_gap(flag: str) -> float:
    """The longest time for which this node's event loop did nothing else."""
    longest, before = 0.0, time.monotonic()
    while not os.path.exists(flag):
        await asyncio.sleep(0.001)
        now = time.monotonic()
        longest, before = max(longest, now - before), now
    return longest


def push_and_tell(flag: str, steps: int, worker: Worker) -> float:
    """Push so often; then return how long one push took, in the mean."""
    try:
        gradients = ones(worker.pull())
        began = time.monotonic()
        for _ in range(steps):
            worker.push(gradients)
        return (time.monotonic() - began) / steps
    finally:
        Path(flag).touch()


def server_address(ps: ParameterServer) -> str:
    return ps.table().views[0].chain[0].address


@dataclass(frozen=True, slots=True)
class Slow(SGD):
    """SGD that takes a tenth of a second for a million weights."""

    def step(
        self, values: np.ndarray, *others: Any, **named: Any
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        time.sleep(values.size * 1e-7)
        return SGD.step(self, values, *others, **named)


@pytest.mark.slow
def test_large_updates_do_not_hold_up_the_nodes_event_loop(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    flag, client = tmp_path / "done", cluster.client
    with ParameterServer(client, large(64), optimizer=Slow(1.0)) as ps:
        (future,) = ps.run(partial(push_and_tell, str(flag), 1))
        (gap,) = client.run(longest_gap, str(flag), workers=[server_address(ps)]).values()
        took = future.result(timeout=SECONDS)
        assert gap < took / 2


def socket_bytes(dask_worker: Any = None, dask_scheduler: Any = None) -> int:
    """Bytes that this process has sent and received over its open TCP connections."""
    total = 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            with socket.socket(fileno=os.dup(connection.fd)) as open_socket:
                info = open_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            total += sum(struct.unpack_from("=QQ", info, 120))  # acked and received
    return total


@pytest.mark.parametrize("transport", ["auto", "dask"])
def test_training_traffic_does_not_pass_through_the_scheduler(
    cluster: LocalCluster, transport: TransportChoice
) -> None:
    client = cluster.client
    with ParameterServer(client, large(4), optimizer=COUNTING, transport=transport) as ps:
        server = server_address(ps)

        def moved() -> tuple[int, int]:
            node = client.run(socket_bytes, workers=[server])[server]
            return node, client.run_on_scheduler(socket_bytes)

        before = moved()
        results(ps.run(partial(count, 20), workers=2))
        at_server, at_scheduler = np.subtract(moved(), before)
        if transport == "dask":  # the others' connections have ended with the workers
            assert at_server > 2 * 20 * 4 * MEGABYTE
        assert at_scheduler < MEGABYTE


def test_arithmetic_on_a_node_has_one_thread(cluster: LocalCluster) -> None:
    pools = [pool for found in cluster.client.run(threadpool_info).values() for pool in found]
    assert {pool["num_threads"] for pool in pools if pool["user_api"] == "blas"} == {1}
