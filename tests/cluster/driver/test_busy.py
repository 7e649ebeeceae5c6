"""Busy is not dead: processes that hold the GIL for longer than a lease lose nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from functools import partial
from pathlib import Path

import distributed
import numpy as np
import pytest

from dps import (
    ASP,
    BSP,
    SGD,
    Chain,
    Checkpoint,
    Consistency,
    NoDurability,
    ParameterServer,
    Part,
    Recovery,
    SharedStore,
    Timings,
    UpdatesDropped,
    Worker,
    WorkerCache,
)
from dps.cluster.backends.local import LocalCluster
from dps.cluster.liveness import presence_of
from dps.cluster.monitor import peer_of
from dps.errors import UpdatesDroppedWarning, UpdatesLostWarning
from dps.events import Detected, WorkerLeft
from dps.protocol.transport import Watched
from tests.support.training import PRELOAD, SECONDS, Events, nodes
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

STEPS = 2
SHORT = Timings(lease=2.0)  # as of a laptop whose owner wants losses noticed soon

RECOVERIES = {
    "none": Recovery(NoDurability()),
    "checkpoint": Recovery(Checkpoint(every=100)),
    "chain": Recovery(Chain(2)),
    "stateless": Recovery(SharedStore()),
    "worker cache": Recovery(WorkerCache()),
}


def hold_gil(seconds: float) -> None:
    """Do what a long call into C does that does not release the GIL."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def busy_steps(seconds: float, worker: Worker) -> int:
    for _ in range(STEPS):
        worker.pull()
        hold_gil(seconds)
        worker.push({"w": np.full(30, -1.0)})
    return worker.dropped


def busy_call(arrays: dict[str, Part], seconds: float) -> int:
    hold_gil(seconds)
    return os.getpid()


def count_all(steps: int, worker: Worker) -> int:
    for _ in range(steps):
        worker.push({"w": np.full(30, -1.0)})
    return steps


@pytest.fixture(autouse=True)
def no_loss() -> None:
    warnings.simplefilter("error", UpdatesLostWarning)
    warnings.simplefilter("error", UpdatesDroppedWarning)


def placed(recovery: Recovery, folder: Path) -> Recovery:
    return recovery.at(str(folder)) if recovery.durability.writes_checkpoints else recovery


@pytest.mark.parametrize(
    ("recovery", "consistency"),
    [
        ("none", ASP()),
        ("chain", BSP()),
    ],
    ids=repr,
)
@pytest.mark.slow
def test_steps_that_hold_the_gil_lose_nothing(
    recovery: str, consistency: Consistency, tmp_path: Path
) -> None:
    chosen, events = placed(RECOVERIES[recovery], tmp_path), Events()
    wanted = nodes(replicas=chosen.durability.above.replicas - 1, store=bool(chosen.stores))
    with (
        LocalCluster(wanted, PRELOAD) as cluster,
        ParameterServer(
            cluster.client,
            {"w": np.zeros(30)},
            shards=2,
            optimizer=SGD(1.0),
            recovery=chosen,
            consistency=consistency,
            on_event=events,
            timings=SHORT,
        ) as ps,
    ):
        futures = ps.run(partial(busy_steps, 3.0), workers=2)
        assert [future.result(timeout=SECONDS) for future in futures] == [0, 0]
        assert ps.pull()["w"].tolist() == [2 * STEPS] * 30
        assert ps.losses == []
    assert events.of(Detected) == []
    assert {left.reason for left in events.of(WorkerLeft)} == {"finished"}


def test_a_function_that_holds_the_gil_of_its_server_loses_nothing() -> None:
    events = Events()
    with (
        LocalCluster(nodes(replicas=1), PRELOAD) as cluster,
        ParameterServer(
            cluster.client,
            {"w": np.zeros(30)},
            optimizer=SGD(1.0),
            recovery=RECOVERIES["chain"],
            functions={"busy": busy_call},
            on_event=events,
            timings=SHORT,
        ) as ps,
    ):
        assert ps.run(partial(count_all, 5), workers=1)[0].result(timeout=SECONDS) == 5
        futures = ps.run(partial(count_all, 20), workers=1)
        ps.apply("busy", 4.4)
        assert [future.result(timeout=SECONDS) for future in futures] == [20]
        assert ps.pull()["w"].tolist() == [25] * 30
    assert events.of(Detected) == []


def test_a_worker_that_is_busy_for_longer_than_its_patience_fails() -> None:
    timings = Timings(lease=0.5, patience=1.0)
    with (
        warnings.catch_warnings(record=True) as caught,
        LocalCluster(nodes(), PRELOAD) as cluster,
        ParameterServer(
            cluster.client,
            {"w": np.zeros(30)},
            optimizer=SGD(1.0),
            consistency=BSP(),
            timings=timings,
        ) as ps,
    ):
        warnings.simplefilter("always")
        slow, fast = ps.run(busy_for_first, workers=2)
        assert fast.result(timeout=SECONDS) == 0
        with pytest.raises(UpdatesDropped, match=r"2 of the 2 updates of worker-0 were .*=10"):
            slow.result(timeout=SECONDS)
        slow.retry()  # it trains again, and does not return what it would have returned
        with pytest.raises(UpdatesDropped):
            slow.result(timeout=SECONDS)
    (text,) = (str(w.message) for w in caught if w.category is UpdatesDroppedWarning)
    assert "updates of worker-0" in text
    assert "longer than its lease (0.5 s), or busy for longer than its patience (1 s)" in text
    assert "timings=dps.Timings(patience=10)" in text


def busy_for_first(worker: Worker) -> int:
    return busy_steps(2.0 if worker.index == 0 else 0.0, worker)


def test_a_stopped_server_with_a_copy_is_killed_long_before_its_lease_ends() -> None:
    events = Events()
    with (
        LocalCluster(nodes(replicas=1, spares=1), PRELOAD) as cluster,
        ParameterServer(
            cluster.client,
            {"w": np.zeros(30)},
            optimizer=SGD(1.0),
            recovery="chain",
            on_event=events,
            timings=Timings(lease=60.0),
        ) as ps,
    ):
        cluster.pause("server-0")
        eventually(lambda: events.of(Detected), 30.0)
        assert cluster.gone("server-0", SECONDS)
        (detected,) = events.of(Detected)
        assert (detected.node, detected.by) in (("server-0", "monitor"), ("server-0", "scheduler"))
        assert ps.run(partial(count_all, 5), workers=1)[0].result(timeout=SECONDS) == 5


def test_a_stopped_server_is_not_killed_while_another_group_uses_its_process() -> None:
    """The coordinator of one group cannot know what the other one would lose."""
    events = Events()
    with (
        LocalCluster(nodes(replicas=1), PRELOAD) as cluster,
        ParameterServer(
            cluster.client,
            {"w": np.zeros(30)},
            optimizer=SGD(1.0),
            recovery="chain",
            on_event=events,
            timings=Timings(lease=2.0),
        ) as chain,
        ParameterServer(cluster.client, {"w": np.zeros(30)}, optimizer=SGD(1.0)) as single,
    ):
        assert single.run(partial(count_all, 5), workers=1)[0].result(timeout=SECONDS) == 5
        cluster.pause("server-0")
        eventually(lambda: events.of(Detected), 30.0)
        cluster.resume("server-0")
        assert [(lost.node, lost.by) for lost in events.of(Detected)] == [("server-0", "lease")]
        assert single.pull()["w"].tolist() == [5] * 30
        assert chain.pull()["w"].tolist() == [0] * 30


def test_processes_are_watched_from_the_first_moment_and_by_another_monitor_if_one_is_killed() -> (
    None
):
    with LocalCluster(nodes(), PRELOAD) as cluster:
        for first, second in cluster.client.run(watched_in_turn).values():
            assert None not in (first, second)
            assert first != second
        with ParameterServer(cluster.client, {"w": np.zeros(30)}):
            (killed,) = eventually(lambda: monitors_of(cluster), SECONDS)
            os.kill(killed, signal.SIGKILL)
            (other,) = eventually(lambda: monitors_of(cluster) - {killed}, SECONDS)
            eventually(lambda: monitors_of(cluster) == {other}, SECONDS)


def monitors_of(cluster: LocalCluster) -> set[int]:
    """The monitors by which the hosts of a group are watched."""
    servers = [node for node in cluster.client.run(monitor_of).values() if node]
    return set(servers)


def monitor_of(dask_worker: distributed.Worker) -> int:
    writer = getattr(presence_of(dask_worker), "_writer", None)
    if writer is None or writer.is_closing():
        return 0
    return peer_of(writer.get_extra_info("socket"))[0]


async def watched_in_turn(dask_worker: distributed.Worker) -> list[Watched | None]:
    """What a process is registered as for one group after another."""
    presence, found = presence_of(dask_worker), []
    for group in ("first", "second"):
        presence.enter(group)
        await presence.registered()
        found.append(presence.watched)
        presence.exit(group)
    return found
