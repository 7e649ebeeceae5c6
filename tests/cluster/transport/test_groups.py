"""Whole groups by each transport: what is recorded, what is right, and what they leave."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from dps import Chain, ParameterServer, Recovery, Worker
from dps.cluster.backends.local import LocalCluster
from dps.events import Connected
from dps.protocol.transport import TransportChoice
from tests.support.leftovers import shared_by
from tests.support.training import COUNTING, PRELOAD, SECONDS, Events, audited, nodes, ones, results
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

MEGABYTE = 1 << 20
CHOSEN = [("auto", "shared_memory"), ("stream", "stream"), ("dask", "dask")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes(1, replicas=1, workers=2), (*PRELOAD, __name__)) as found:
        yield found


def zeros(megabytes: int) -> dict[str, np.ndarray]:
    return {"w": np.zeros(megabytes * MEGABYTE // 4, np.float32)}


def push_and_keep(steps: int, worker: Worker) -> list[float]:
    """Push so often; every array that was returned must stay as it was. Returns what they held."""
    gradients = ones(worker.pull())
    kept = []
    for _ in range(steps):
        weights = worker.push_pull(gradients)["w"]
        kept.append((weights, float(weights[0])))
    for weights, was in kept:
        assert (weights == was).all(), "weights changed while they were held, or are torn"
    return [was for _, was in kept]


def left_on(cluster: LocalCluster) -> dict[str, tuple[int, int, int]]:
    """Return the number of mapped segments, their descriptors, and unix sockets of each node."""
    cluster.client.run(gc.collect)  # the traceback of a call that was cancelled is a cycle
    return {
        address: (*shared_by(pid), len(psutil.Process(pid).net_connections("unix")))
        for address, pid in cluster.client.run(os.getpid).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "by"), CHOSEN)
def test_a_group_counts_right_records_its_transport_and_leaves_nothing(
    cluster: LocalCluster, transport: TransportChoice, by: str
) -> None:
    events, before = Events(), left_on(cluster)
    with ParameterServer(
        cluster.client,
        zeros(4),
        optimizer=COUNTING,
        recovery=Recovery(Chain()),
        on_event=events,
        transport=transport,
    ) as ps:
        found = results(ps.run(partial(push_and_keep, 10), workers=2))
        assert all(values == sorted(values) and values[-1] >= 10 for values in found)
        assert (ps.pull()["w"] == 20).all()
        assert [reply.version for reply in audited(ps)] == [20]
        told = events.of(Connected)
        assert {event.transport for event in told} == {by}
        assert {event.node for event in told} == {"server-0", "worker-0", "worker-1"}
    with suppress(AssertionError):  # the next line says more
        eventually(lambda: left_on(cluster) == before, SECONDS)
    assert left_on(cluster) == before


def push_until(flag: str, worker: Worker) -> int:
    gradients, step = ones(worker.pull()), 0
    while not Path(flag).exists():
        weights = worker.push_pull(gradients)["w"]
        assert weights.min() == weights.max(), "torn weights"
        step += 1
    return step


@pytest.mark.slow
def test_no_weights_are_torn_when_a_server_is_killed(tmp_path: Path) -> None:
    with (
        LocalCluster(nodes(1, replicas=1, workers=2), (*PRELOAD, __name__)) as cluster,
        ParameterServer(
            cluster.client,
            zeros(4),
            optimizer=COUNTING,
            recovery="chain",
        ) as ps,
    ):
        futures = ps.run(partial(push_until, str(tmp_path / "enough")), workers=2)

        def reached(version: int) -> bool:
            return any(reply and reply.version >= version for reply in ps.audit())

        eventually(lambda: reached(6), SECONDS)
        cluster.kill("server-0")
        at = audited(ps)[0].version
        eventually(lambda: reached(at + 6), SECONDS)
        (tmp_path / "enough").touch()
        pushed = sum(results(futures))
        weights = ps.pull()["w"]
        assert (weights == pushed).all()
