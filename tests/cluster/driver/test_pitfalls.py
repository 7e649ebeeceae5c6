"""What goes wrong with parameters in plain Dask actors, and does not here."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
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

from dps import BSP, SGD, Adam, ParameterServer, Worker
from dps.cluster.backends.local import LocalCluster
from dps.cluster.node.malloc import keep_memory
from dps.cluster.transport.calls import ClusterTransport, Meter
from dps.core.updates import Operation, UpdateId
from dps.errors import Unreachable
from dps.protocol.messages import Push
from dps.protocol.transport import TransportChoice
from tests.support.training import (
    COUNTING,
    PATIENT,
    PRELOAD,
    SECONDS,
    count,
    count_until,
    nodes,
    ones,
    params,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A cluster that no test of this module breaks."""
    with LocalCluster(nodes(1), PRELOAD) as found:
        yield found


@pytest.fixture
def breakable() -> Iterator[LocalCluster]:
    """A cluster of its own for a test that kills."""
    with LocalCluster(nodes(1, replicas=1), PRELOAD) as found:
        yield found


def large(megabytes: int) -> dict[str, np.ndarray]:
    return {"w": np.zeros(megabytes * MEGABYTE // 4, np.float32)}


# -- losses --------------------------------------------------------------------------------------


def test_the_loss_of_a_server_does_not_err_the_workers_tasks(
    breakable: LocalCluster, tmp_path: Path
) -> None:
    flag, client = tmp_path / "stop", breakable.client
    with ParameterServer(client, params(), optimizer=COUNTING, recovery="chain") as ps:
        futures = ps.run(partial(count_until, str(flag)), workers=2)
        eventually(lambda: versions(ps)[0] > 10, SECONDS)

        def dependencies(dask_scheduler: Any) -> list[str]:
            tasks = [dask_scheduler.tasks[future.key] for future in futures]
            return [str(dependency) for task in tasks for dependency in task.dependencies]

        assert client.run_on_scheduler(dependencies) == []
        breakable.kill("server-0")
        eventually(lambda: "server-0" not in node_names(client), SECONDS)
        assert [future.status for future in futures] == ["pending", "pending"]
        flag.touch()
        results(futures)


def node_names(client: Any) -> list[str]:
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return [str(info["name"]) for info in workers.values()]


async def hold_until_killed(ps: ParameterServer, cluster: LocalCluster) -> float:
    """Have a push wait at its server for another worker's, kill the server, return the delay."""
    transport = ClusterTransport(cluster.client.rpc, Meter())
    (view,) = (await ps._router.table()).views
    head, epoch = view.chain[0], view.epoch
    for name in ("one", "other"):
        join = Operation("join", UpdateId(name, 1, 0))
        await transport.call(head, Push(0, epoch, join, pull=False, patience=1.0), 5.0)
    gradient = Operation("gradient", UpdateId("one", 1, 1), gradient=np.zeros(8, np.uint8))
    push = Push(0, epoch, gradient, pull=False, patience=60.0)
    held = asyncio.ensure_future(transport.call(head, push, 60.0))
    done, _ = await asyncio.wait([held], timeout=0.2)
    assert not done
    began = time.monotonic()
    cluster.kill("server-0")
    with pytest.raises(Unreachable):
        await held
    return time.monotonic() - began


def test_a_call_in_flight_fails_as_soon_as_its_node_dies(breakable: LocalCluster) -> None:
    client, one = breakable.client, {"w": np.zeros(1)}
    with ParameterServer(client, one, consistency=BSP()) as ps:
        assert client.sync(hold_until_killed, ps, breakable) < SECONDS / 2


def test_a_call_to_a_dead_node_keeps_its_deadline(breakable: LocalCluster) -> None:
    client = breakable.client
    with ParameterServer(client, params(), recovery="chain") as ps:
        dead = ps.table().views[0].chain[0]
        breakable.kill("server-0")

        async def call() -> None:
            transport = ClusterTransport(client.rpc, Meter())
            push = Push(0, 1, Operation("join", UpdateId("one", 1, 0)), pull=False, patience=1.0)
            await transport.call(dead, push, 0.5)

        began = time.monotonic()
        with pytest.raises(Exception, match="Push to"):
            client.sync(call)
        assert time.monotonic() - began < 10.0  # Dask would try for 30 s to connect


def first_push(worker: Worker) -> float:
    began = time.monotonic()
    worker.push(ones(worker.pull()))
    return time.monotonic() - began


def test_a_worker_that_never_saw_the_lost_server_is_served_at_once(
    breakable: LocalCluster,
) -> None:
    client = breakable.client
    with ParameterServer(client, params(), recovery="chain", timings=PATIENT) as ps:
        results(ps.run(first_push))  # the functions are loaded, and the chain is complete
        (view,) = ps.table().views
        breakable.kill("server-0")
        (took,) = results(ps.run(first_push))
        assert took < SECONDS
        assert ps.table().views[0].chain == view.chain[1:]


def test_the_driver_reads_on_at_once_after_a_loss(breakable: LocalCluster) -> None:
    with ParameterServer(breakable.client, params(), recovery="chain", timings=PATIENT) as ps:
        breakable.kill("server-0")
        began = time.monotonic()
        ps.pull()
        eventually(lambda: versions(ps) == [0], SECONDS)
        assert time.monotonic() - began < SECONDS


# -- large arrays --------------------------------------------------------------------------------


def spread(flag: str, worker: Worker) -> float:
    """Read while the other worker pushes; return the widest spread within one read."""
    if worker.index == 1:
        count(40, worker)
        Path(flag).touch()
        return 0.0
    widest = 0.0
    while not Path(flag).exists():
        weights = worker.pull()["w"]
        widest = max(widest, float(weights.max() - weights.min()))
    return widest


@pytest.mark.slow
def test_a_pull_never_shows_half_an_update(cluster: LocalCluster, tmp_path: Path) -> None:
    with ParameterServer(cluster.client, large(8), optimizer=COUNTING) as ps:
        train = partial(spread, str(tmp_path / "done"))
        assert results(ps.run(train, workers=2)) == [0.0, 0.0]


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


@pytest.mark.parametrize("transport", ["auto", "stream", "dask"])
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


# -- how nodes are set up ------------------------------------------------------------------------


def test_arithmetic_on_a_node_has_one_thread(cluster: LocalCluster) -> None:
    pools = [pool for found in cluster.client.run(threadpool_info).values() for pool in found]
    assert {pool["num_threads"] for pool in pools if pool["user_api"] == "blas"} == {1}


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def count_twice(steps: int, begun: str, go_on: str, worker: Worker) -> None:
    """Push so often, wait until that has been looked at, and push as often again."""
    for _ in range(2):  # weights are pulled into other memory while the last ones are held
        count(steps, worker)
    Path(begun).touch()
    eventually(Path(go_on).exists, SECONDS)
    count(steps, worker)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
@pytest.mark.parametrize("transport", ["shared_memory", "stream", "dask"])
def test_memory_of_large_messages_is_used_again(
    cluster: LocalCluster, tmp_path: Path, transport: TransportChoice
) -> None:
    assert keep_memory()
    client, steps = cluster.client, 8
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    with ParameterServer(client, large(40), optimizer=Adam(), transport=transport) as ps:
        server = server_address(ps)
        futures = ps.run(partial(count_twice, steps, str(begun), str(go_on)))
        eventually(begun.exists, SECONDS)
        before = client.run(page_faults, workers=[server])[server]
        go_on.touch()
        results(futures)
        faults = client.run(page_faults, workers=[server])[server] - before
        one_array = 40 * MEGABYTE / resource.getpagesize()
        # Each push makes four of them, the message and the new state. One may lie in new memory:
        # how many are held at once, until the worker has said what it has let go of, is chance.
        assert faults < 1.2 * one_array
