"""Training functions as they are, on virtual time: strategies under faults, each exact, and twice.

`ParameterServer`, workers, servers, coordinator and injector are those of real clusters; here it is
seen that they come to what they promise on a virtual one too, and always to the same.
"""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import KilledWorker

from dps import (
    BSP,
    Chain,
    Checkpoint,
    Continue,
    Layered,
    ParameterServer,
    Quantise,
    Recovery,
    SharedStore,
    SparseSpec,
    TrainingStopped,
    UpdatesLostWarning,
    Worker,
    WorkerCache,
)
from dps.errors import ConfigurationError
from dps.events import (
    Disturbed,
    Killed,
    Paused,
    Restored,
    to_json,
)
from dps.faults import (
    After,
    AtSeconds,
    AtUpdates,
    Corrupt,
    Cut,
    Delay,
    DiskFull,
    Fault,
    InChain,
    Kill,
    Pause,
    Slow,
)
from dps.recovery.durability import Durability, Persistence, ServerContext
from dps.testing import VirtualCluster
from dps.virtual.client import TaskFuture
from dps.virtual.loop import VirtualLoop
from tests.virtual.training import PUSHES, SHARDS, START, WORKERS, count, counted

ALL = PUSHES * WORKERS
RECOVERIES: dict[str, str | Recovery] = {
    "none": "none",
    "checkpoint": Recovery(Checkpoint(every=10)),
    "chain": "chain",
    "stateless": "stateless",
    "worker cache": Recovery(WorkerCache()),
    "chain + continue": Recovery(Chain(2), Continue(limit=20, buffer="worker")),
    "chain over checkpoint": Recovery(Layered(Chain(2), Checkpoint(every=10))),
    "store over checkpoint": Recovery(Layered(SharedStore(), Checkpoint(every=10))),
}
LOSE_NOTHING = ("chain", "stateless", "chain + continue", *(r for r in RECOVERIES if "over" in r))
FAULTS: dict[str, tuple[Fault, ...]] = {
    "nothing": (),
    "kill of a server": (Kill("server-0", AtUpdates(40), back_after=0.1),),
    "kill of a worker": (Kill("worker-1", AtUpdates(40)),),
    "pause": (Pause("server-0", AtUpdates(40), seconds=0.3),),
    "long pause": (Pause("server-0", AtUpdates(40), seconds=1.8),),
    "slow": (Slow("server-0", AtUpdates(20), seconds=0.4),),
    "cut": (Cut("server-0", AtUpdates(40), seconds=0.3),),
    "delay": (Delay("worker-0", AtUpdates(20), delay_seconds=0.02, seconds=0.3),),
}
PROOF = {
    "kill of a server": Killed,
    "kill of a worker": Killed,
    "pause": Paused,
    "long pause": Paused,
    "slow": Disturbed,
    "cut": Disturbed,
    "delay": Disturbed,
}


# Each strategy under a kill, and under one of the other faults.
PAIRS = [(recovery, "kill of a server") for recovery in RECOVERIES] + list(
    zip(RECOVERIES, FAULTS, strict=True)
)


@pytest.mark.parametrize(("recovery", "fault"), dict.fromkeys(PAIRS))
def test_every_strategy_keeps_its_promise_under_every_fault_and_does_so_twice(
    recovery: str, fault: str
) -> None:
    came = counted(RECOVERIES[recovery], FAULTS[fault], seed=3)
    if fault == "kill of a worker":
        assert came.pushed == (PUSHES, None, PUSHES)
        assert 2 * PUSHES <= min(came.seen) <= max(came.seen) < ALL
    else:
        assert came.pushed == (PUSHES,) * WORKERS
        # What shards together have lost is missing in the weights of one of them.
        assert {ALL - came.lost, ALL} == {min(came.seen), max(came.seen), ALL}
    if recovery in LOSE_NOTHING:
        assert came.lost == 0
    if fault in PROOF:
        assert came.of(PROOF[fault])
    assert counted(RECOVERIES[recovery], FAULTS[fault], seed=3).digest == came.digest


@pytest.mark.parametrize(
    ("above", "other"),
    [(Chain(2), InChain(0, "tail")), (SharedStore(), "store-0")],
    ids=["chain", "store"],
)
def test_with_every_copy_above_what_came_since_the_newest_checkpoint_is_lost(
    above: Chain | SharedStore, other: str | InChain
) -> None:
    lost = (
        Kill(other, AtUpdates(47), back_after=0.1),
        Kill(InChain(0, "head"), After(0, 0.0), back_after=0.1),
    )
    layered = Recovery(Layered(above, Checkpoint(every=10)))
    came = counted(layered, lost, seed=3, servers=4)
    assert came.pushed == (PUSHES,) * WORKERS
    assert {min(came.seen), max(came.seen)} == {ALL - came.lost, ALL}
    assert came.lost <= 10, "writes keep up here"
    last = came.of(Restored)[-1]
    assert (last.source, last.shard) == ("checkpoint", 0)  # type: ignore[attr-defined]
    assert counted(layered, lost, seed=3, servers=4).digest == came.digest
    if isinstance(above, Chain):  # without a layer nothing is left
        assert counted(Recovery(above), lost, seed=3, servers=4).lost >= 47


@pytest.mark.slow
def test_runs_leave_nothing_behind() -> None:
    """Neither what ended by itself, nor what was killed and could not tidy up."""

    def objects() -> int:
        counted("chain", FAULTS["kill of a server"])
        gc.collect()
        return len(gc.get_objects())

    objects()
    before = objects()
    after = [objects() for _ in range(20)][-1]
    assert after - before < 20 * 25  # a single server is some hundreds


def test_another_seed_is_another_run() -> None:
    assert counted(seed=1).digest != counted(seed=2).digest


def test_a_run_does_not_depend_on_the_process_that_it_is_in() -> None:
    """Sets and dictionaries are ordered by hashes that differ from process to process."""
    program = (
        "from tests.virtual.training import counted; from dps.faults import AtUpdates, Kill;"
        "print(counted('stateless', [Kill('server-0', AtUpdates(40))]).digest)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert found == counted("stateless", [Kill("server-0", AtUpdates(40))]).digest + "\n"


# Of what comes of a kill, on every version of Python and on every machine: the weights are sums of
# whole numbers. A change of the protocol may change them: they are then what the test has found.
DIGESTS = {
    "none": "29c45d8878c62016",
    "chain": "0f618994e1f2b20e",
    "stateless": "bcf435a81cf7f06b",
    "worker cache": "e721bd1a3975c274",
}


@pytest.mark.parametrize("recovery", DIGESTS)
def test_a_run_does_not_depend_on_the_version_of_python(recovery: str) -> None:
    came = counted(RECOVERIES[recovery], FAULTS["kill of a server"], seed=7)
    lines = [*map(to_json, came.events), repr((came.pushed, came.seen, came.lost, came.seconds))]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == DIGESTS[recovery]


def test_a_push_wakes_no_more_of_others_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the loop are counted, as those of a real one are what a busy server has to do."""
    steps = 0
    real = VirtualLoop.call_soon

    def counting(loop: VirtualLoop, *args: Any, **how: Any) -> Any:
        nonlocal steps
        steps += 1
        return real(loop, *args, **how)

    monkeypatch.setattr(VirtualLoop, "call_soon", counting)
    monkeypatch.setattr("tests.virtual.training.COMPUTE_SECONDS", 0.0001)  # so that they queue
    monkeypatch.setattr(Persistence, "window", 4)  # how many a replica has under way at once
    of_a_push = []
    for workers in (4, 24):
        before = steps
        counted("chain", servers=4, workers=workers)
        of_a_push.append((steps - before) / (workers * PUSHES))
    assert of_a_push[1] < of_a_push[0], of_a_push


def test_only_virtual_time_passes() -> None:
    def sleep(worker: Worker) -> float:
        began = worker.now()
        worker.sleep(300.0)
        return worker.now() - began

    with (
        VirtualCluster() as cluster,
        ParameterServer(cluster, START) as ps,
    ):
        began = time.monotonic()
        assert cluster.gather(ps.run(sleep)) == [pytest.approx(300.0)]
        assert time.monotonic() - began < 300


def test_a_function_that_sleeps_by_itself_is_told_so() -> None:
    def sleep(worker: Worker) -> None:
        time.sleep(0.01)

    with (
        VirtualCluster() as cluster,
        ParameterServer(cluster, START) as ps,
        pytest.raises(ConfigurationError, match=r"worker\.sleep\(seconds\)"),
    ):
        cluster.gather(ps.run(sleep))
    began = time.monotonic()
    time.sleep(0.02)  # outside it is what it was
    assert time.monotonic() - began >= 0.02


def test_an_error_of_a_worker_is_raised_where_it_is_gathered() -> None:
    def fail(worker: Worker) -> None:
        worker.pull()
        raise ZeroDivisionError("on purpose")

    with (
        VirtualCluster() as cluster,
        ParameterServer(cluster, START) as ps,
        pytest.raises(ZeroDivisionError, match="on purpose"),
    ):
        cluster.gather(ps.run(fail))


def test_what_a_killed_worker_does_on_its_way_out_has_no_effect() -> None:
    after: list[str] = []

    def train(worker: Worker) -> None:
        gradients = {"w": np.full(40, -1.0)}
        try:
            for _ in range(PUSHES):
                worker.sleep(0.01)
                worker.push(gradients)
        finally:
            worker.push(gradients)
            after.append(worker.name)

    with (
        VirtualCluster(workers=2, faults=[Kill("worker-0", AtUpdates(20))]) as cluster,
        ParameterServer(cluster, {"w": np.zeros(40)}) as ps,
    ):
        with pytest.raises(KilledWorker):
            cluster.gather(ps.run(train, workers=2))
        assert after == ["worker-1"]


def test_a_fault_that_did_not_happen_is_told() -> None:
    with (
        pytest.raises(ConfigurationError, match="the training ended at 120 updates and"),
        VirtualCluster(2, WORKERS, faults=[Kill("server-0", AtUpdates(10**6))]) as cluster,
        ParameterServer(cluster, START, shards=2) as ps,
    ):
        cluster.gather(ps.run(count, workers=WORKERS))


def test_faults_without_a_training_are_told() -> None:
    with (
        pytest.warns(UserWarning, match="no planned fault happened"),
        VirtualCluster(faults=[Kill("server-0", AtUpdates(1))]),
    ):
        pass


def test_a_place_in_a_chain_is_hit_and_a_fault_after_another() -> None:
    faults = [
        Kill(InChain(0, "tail"), AtSeconds(0.1), back_after=0.1),
        Kill(InChain(0, "head"), After(0, 0.3), back_after=None),
    ]
    came = counted("chain", faults, servers=3)
    assert len(came.of(Killed)) == 2
    assert set(came.seen) == {ALL}


def test_a_damaged_checkpoint_costs_the_updates_since_the_one_before() -> None:
    faults = [Corrupt(shard, AtUpdates(60)) for shard in range(SHARDS)]
    faults += [Kill("server-0", After(0), back_after=0.1)]
    came = counted(Recovery(Checkpoint(every=10)), faults)
    assert came.lost > 0
    assert {ALL - came.lost, ALL} == set(came.seen)


def test_losses_are_warned_of_as_on_any_cluster() -> None:
    with (
        VirtualCluster(1, 1, faults=[Kill("server-0", AtUpdates(20))]) as cluster,
        ParameterServer(cluster, START) as ps,
    ):
        cluster.gather(ps.run(count))
        with pytest.warns(UpdatesLostWarning, match="from its initial values"):
            assert ps.losses


def test_consistency_filters_resume_and_functions_work_as_on_any_cluster() -> None:
    with VirtualCluster(2, 3) as cluster:
        with ParameterServer(
            cluster,
            START,
            shards=2,
            consistency=BSP(),
            filters={"*": [Quantise("bf16")]},
            recovery="checkpoint",
        ) as ps:
            cluster.gather(ps.run(count, workers=3))
            before, path = ps.pull(), ps.group.recovery.durability.path
        assert path is not None
        with ParameterServer.resume(cluster, path) as again:
            for name, array in again.pull().items():
                np.testing.assert_array_equal(array, before[name])


def push_rows(dense: bool, worker: Worker) -> int:
    """Push what is left of 40 updates, of one row each; return how many were done before."""
    for step in range(worker.done, 40):
        row = np.array([step]), np.ones((1, 2), np.float32)
        worker.push({"count": np.zeros(1)} if dense else {}, rows={"t": row})
    return worker.done


@pytest.mark.parametrize("dense", [True, False])
def test_an_array_with_every_update_makes_exact_how_many_are_done(dense: bool) -> None:
    with VirtualCluster(2, 1) as cluster:
        table, start = SparseSpec("t", 2), {"count": np.zeros(1)}
        with ParameterServer(cluster, start, tables=[table], shards=2, recovery="checkpoint") as ps:
            assert cluster.gather(ps.run(partial(push_rows, dense))) == [0]
            path = ps.group.recovery.durability.path
        assert path is not None
        with ParameterServer.resume(cluster, path) as again:
            (done,) = cluster.gather(again.run(partial(push_rows, dense)))
    assert (done == 40) == dense
    assert done >= 20  # of the shard that more rows are on


def test_tasks_that_are_cancelled_before_they_begin_leave_their_threads_to_others() -> None:
    with VirtualCluster(workers=1) as cluster:
        [(address, node)] = (
            (address, each)
            for address, each in cluster.sync(cluster.scheduler.identity)["workers"].items()
            if each["name"] == "worker-0"
        )

        def task(key: str) -> TaskFuture[str]:
            return cluster.submit(str, key, key=key, workers=[address], resources={"any": 1})

        running = [task(f"running-{number}") for number in range(node["nthreads"])]
        waiting = task("waiting")
        cluster.sync(cluster.cancel, [*running, waiting])
        assert task("last").result(timeout=10) == "last"


def test_the_garbage_collector_looks_less_often_only_while_virtual_time_passes() -> None:
    before = gc.get_threshold()

    def train(worker: Worker) -> int:
        if worker.name == "worker-1":
            raise ValueError("no gradient")
        return gc.get_threshold()[0]

    with VirtualCluster(workers=2) as cluster, ParameterServer(cluster, START) as ps:
        first, second = ps.run(train, workers=2)
        assert first.result() > before[0]
        with pytest.raises(ValueError, match="no gradient"):
            second.result()
        assert gc.get_threshold() == before
    assert gc.get_threshold() == before


def test_the_end_of_a_training_from_outside() -> None:
    def train(worker: Worker) -> str:
        try:
            while True:
                worker.push({"w": np.ones(40)})
        except TrainingStopped:
            return "stopped"

    with (
        VirtualCluster(workers=2) as cluster,
        ParameterServer(cluster, {"w": np.zeros(40)}) as ps,
    ):
        futures = ps.run(train, workers=2)
        with pytest.raises(TimeoutError):
            futures[0].result(timeout=0.5)
        ps.stop()
        assert cluster.gather(futures) == ["stopped", "stopped"]


def test_evaluation_happens_beside_the_training() -> None:
    scores: list[float] = []

    def score(weights: Any) -> tuple[float, float]:
        scores.append(float(weights["w"][0]))
        return 0.0, 0.0

    with (
        VirtualCluster(workers=2) as cluster,
        ParameterServer(cluster, START) as ps,
    ):
        ps.evaluate(score, every=0.1)
        cluster.gather(ps.run(count))
    assert len(scores) >= 4
    assert scores == sorted(scores)
    assert scores[0] == 0


def test_a_fault_that_cannot_be_simulated_is_refused_at_once() -> None:
    with pytest.raises(
        ConfigurationError, match=r"fault 0 .*server-0 .* in memory and cannot fill up"
    ):
        VirtualCluster(faults=[DiskFull("server-0", AtUpdates(10))])


def test_clusters_of_a_program_have_disks_of_their_own_and_those_that_ended_leave_theirs() -> None:
    def path(cluster: VirtualCluster) -> str:
        return cluster.dps_platform.place("files") or ""

    with VirtualCluster() as first:
        with VirtualCluster() as second:
            assert path(first) != path(second)
            latter = path(second)
        with VirtualCluster() as third:
            assert path(third) == latter


@pytest.mark.parametrize(
    ("name", "value"), [("servers", 0), ("workers", 1.5), ("stores", "2"), ("faults", None)]
)
def test_an_argument_that_cannot_be_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name}=.*, expected "):
        VirtualCluster(**{name: value})


@dataclass(frozen=True)
class Outside(Durability):
    """Notes under which name each server would keep state outside of the cluster."""

    names: list[str]

    def persistence(self, context: ServerContext) -> Persistence:
        self.names.append(context.group)
        return Persistence()


def test_what_is_kept_outside_has_another_name_in_every_run() -> None:
    runs = []
    for _ in range(2):
        names: list[str] = []
        with (
            VirtualCluster(servers=2, workers=1) as cluster,
            ParameterServer(cluster, START, shards=2, recovery=Recovery(Outside(names))),
        ):
            pass
        (name,) = set(names)  # the same for all shards of a group
        runs.append(name)
    assert runs[0] != runs[1]


def test_an_interruption_while_a_worker_computes_reaches_the_program() -> None:
    def interrupted(worker: Worker) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        VirtualCluster() as cluster,
        ParameterServer(cluster, {"w": np.zeros(2)}) as ps,
    ):
        ps.run(interrupted)[0].result()
