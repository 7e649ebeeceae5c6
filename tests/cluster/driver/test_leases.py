"""Leased data: every shard applies each batch once under losses, joins and leaves."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pytest
from dask import delayed
from distributed import Client

from dps import (
    ASP,
    BSP,
    SGD,
    SSP,
    Chain,
    Checkpoint,
    Consistency,
    Continue,
    ParameterServer,
    Quantise,
    Recovery,
    Worker,
)
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import is_gone
from dps.cluster.driver.runs import copies_of, processing
from dps.cluster.names import Node, NodeSpec
from dps.cluster.node.batches import Batches
from dps.core.leases import Applied
from dps.errors import ConfigurationError, TrainingStopped
from dps.faults import AtUpdates, Kill
from dps.testing import VirtualCluster
from tests.support.training import PRELOAD, SECONDS, audited, nodes, versions
from tests.support.waiting import eventually

EXAMPLES = 103
EPOCHS = 3
AHEAD = 5  # batches, of more than two leases
SOME, MANY = 40, 80  # epochs that take longer than several kills, on virtual and on real time


def count(worker: Worker, batches: Iterable[Any]) -> int:
    """Add one to the weight of each example of a batch; return how many batches it had."""
    done = 0
    worker.pull()
    for indices in batches:
        gradient = np.zeros(EXAMPLES)
        gradient[indices] = -1.0
        worker.push_pull({"w": gradient})
        done += 1
    return done


def ahead(worker: Worker, batches: Batches) -> int:
    """The same for what reads several batches before those before them are pushed."""

    def prefetched() -> Iterator[Any]:
        while batches.more():
            source, read = batches.ahead(), deque[Any]()
            while read.extend(itertools.islice(source, AHEAD - len(read))) or read:
                begun, indices = batches.begin(), read.popleft()
                if begun is None:
                    break
                assert begun.tolist() == indices.tolist()
                yield indices

    return count(worker, prefetched())


LOOPS = pytest.mark.parametrize("train", [count, ahead])


def server(cluster: Any, **choices: Any) -> ParameterServer:
    return ParameterServer(cluster, {"w": np.zeros(EXAMPLES)}, optimizer=SGD(1.0), **choices)


CHOICES = {"data": EXAMPLES, "batch_size": 10, "epochs": EPOCHS, "shuffle": 1, "lease": 2}


def run(ps: ParameterServer, train: Any = count, workers: Any = 3, **more: Any) -> list[Any]:
    return ps.run(train, workers=workers, **(CHOICES | more))


def assert_each_once(ps: ParameterServer, epochs: int = EPOCHS) -> None:
    assert ps.pull()["w"].tolist() == [epochs] * EXAMPLES
    for reply in audited(ps):
        assert len(reply.batches) == epochs
        assert set(reply.batches.values()) == {Applied(11)}


@LOOPS
@pytest.mark.parametrize("consistency", [ASP(), SSP(1), BSP()])
@pytest.mark.parametrize("shards", [1, 3])
def test_workers_divide_the_batches(train: Any, consistency: Consistency, shards: int) -> None:
    with (
        VirtualCluster(workers=3) as cluster,
        server(cluster, shards=shards, consistency=consistency) as ps,
    ):
        done = [future.result() for future in run(ps, train)]
        assert sum(done) == 11 * EPOCHS
        assert min(done) > 0
        assert_each_once(ps)


@LOOPS
@pytest.mark.parametrize("consistency", [ASP(), SSP(1), BSP()])
@pytest.mark.parametrize("outage", [None, Continue(), Continue(buffer="worker")])
def test_batches_of_lost_workers_are_computed_by_others(
    train: Any, consistency: Consistency, outage: Continue | None
) -> None:
    recovery = Recovery(Chain(2)) if outage is None else Recovery(Chain(2), outage)
    kills = {"worker-0": 20, "server-0": 60, "worker-1": 120}
    faults = [Kill(name, AtUpdates(updates)) for name, updates in kills.items()]
    with (
        VirtualCluster(servers=3, workers=4, faults=faults) as cluster,
        server(cluster, shards=2, consistency=consistency, recovery=recovery) as ps,
    ):
        futures = run(ps, train, workers=4, epochs=SOME)
        assert sum(future.result() for future in futures[2:]) > 10
        assert_each_once(ps, SOME)


@LOOPS
def test_a_shard_that_was_restored_gets_the_batches_again_that_it_lacks(train: Any) -> None:
    recovery = Recovery(Checkpoint(every=20))
    faults = [Kill("server-0", AtUpdates(50)), Kill("server-1", AtUpdates(170))]
    with (
        VirtualCluster(servers=3, workers=3, faults=faults) as cluster,
        server(cluster, shards=2, recovery=recovery) as ps,
    ):
        done = [future.result() for future in run(ps, train, epochs=SOME)]
        assert ps.updates_lost > 0
        assert sum(done) > 11 * SOME
        assert_each_once(ps, SOME)


def test_batches_are_computed_again_that_are_lost_while_their_lease_is_held() -> None:
    def first_is_lost(worker: Worker, batches: Batches) -> None:
        for number, indices in enumerate(batches):
            count(worker, [indices])
            if number == 0:
                cluster.kill("server-0")
                worker.pull()  # returns when the shard is restored
                assert len([*batches.ahead()]) == 1  # has the coordinator ask the shards

    with (
        VirtualCluster(servers=2) as cluster,
        server(cluster, recovery=Recovery(Checkpoint(every=1000)), on_loss="ignore") as ps,
    ):
        ps.run(first_is_lost, data=EXAMPLES, batch_size=-(-EXAMPLES // 2))[0].result()
        assert ps.updates_lost == 1
        assert ps.pull()["w"].tolist() == [1] * EXAMPLES


def few(worker: Worker, batches: Batches) -> int:
    return count(worker, itertools.islice(batches, 4))


def some(worker: Worker, batches: Batches) -> None:
    """Compute a few batches, and then wait for the end."""
    few(worker, batches)
    while True:
        worker.pull()


def test_a_run_that_was_stopped_continues_with_the_batches_that_are_left() -> None:
    with VirtualCluster(workers=3) as cluster, server(cluster) as ps:
        futures = run(ps, some)
        while min(versions(ps)) < 12:
            ps.pull()
        ps.stop()
        for future in futures:
            with pytest.raises(TrainingStopped):
                future.result()
        done = [future.result() for future in run(ps)]
        assert sum(done) == 11 * EPOCHS - 12
        assert_each_once(ps)


def test_the_same_data_once_more_is_another_pass() -> None:
    with VirtualCluster(workers=3) as cluster, server(cluster) as ps:
        for passes in (1, 2):
            assert sum(future.result() for future in run(ps)) == 11 * EPOCHS
            assert ps.pull()["w"].tolist() == [passes * EPOCHS] * EXAMPLES


def test_a_resumed_training_continues_with_the_batches_that_its_checkpoints_lack(
    tmp_path: Path,
) -> None:
    recovery = Recovery(Checkpoint(every=5, path=str(tmp_path)))
    with VirtualCluster(workers=3) as cluster:
        with server(cluster, shards=2, recovery=recovery) as ps:
            assert [future.result() for future in run(ps, few)] == [4, 4, 4]
        with ParameterServer.resume(cluster, str(tmp_path)) as again:
            left = [future.result() for future in run(again)]
            assert sum(left) == 11 * EPOCHS - 12
            assert_each_once(again)


def test_workers_join_and_leave() -> None:
    with VirtualCluster(workers=4) as cluster, server(cluster) as ps:
        futures = run(ps, workers=2)
        futures.append(ps.add_worker(count))
        ps.remove_worker("worker-0")
        done = [future.result() for future in futures]
        assert sum(done) == 11 * EPOCHS
        assert done[0] < min(done[1:])
        assert_each_once(ps)


def test_filters_and_updates_under_way_do_not_repeat_a_batch() -> None:
    def ahead(worker: Worker, batches: Batches) -> None:
        worker.pull()
        sent: list[Any] = []
        for indices in batches:
            gradient = np.zeros(EXAMPLES, np.float64)
            gradient[indices] = -1.0
            sent.append(worker.push_pull_async({"w": gradient}))
            if len(sent) > 2:
                sent.pop(0).wait()
        for handle in sent:
            handle.wait()

    filters = {"*": [Quantise("bf16")]}
    with VirtualCluster(workers=3) as cluster, server(cluster, shards=2, filters=filters) as ps:
        for future in run(ps, ahead):
            future.result()
        assert_each_once(ps)


def test_data_comes_in_the_form_in_which_it_was_given() -> None:
    x, names = np.arange(20.0).reshape(10, 2), [f"file-{n}" for n in range(10)]

    def train(worker: Worker, batches: Batches) -> list[Any]:
        found = []
        for batch in batches:
            worker.push({"w": np.zeros(EXAMPLES)})
            found.append((batches.epoch, batch["x"][:, 0].tolist(), batch["names"]))
        return found

    with VirtualCluster() as cluster, server(cluster) as ps:
        given = {"x": x, "names": names}
        (future,) = ps.run(train, data=given, batch_size=4, epochs=2)
        rows = future.result()
        assert [epoch for epoch, _, _ in rows] == [0, 0, 0, 1, 1, 1]
        for epoch in range(2):
            of_epoch = [row for row in rows if row[0] == epoch]
            assert [value for _, first, _ in of_epoch for value in first] == x[:, 0].tolist()
            assert [name for _, _, files in of_epoch for name in files] == names


def test_each_batch_needs_exactly_one_push() -> None:
    zeros = {"w": np.zeros(EXAMPLES)}

    def none(worker: Worker, batches: Batches) -> None:
        for _ in batches:
            worker.pull()

    def two(worker: Worker, batches: Batches) -> None:
        for _ in batches:
            worker.push(zeros)
            worker.push(zeros)

    with VirtualCluster() as cluster, server(cluster) as ps:
        for train, message in ((none, "was not pushed"), (two, "no batch is open for this push")):
            (future,) = run(ps, train, workers=1)
            with pytest.raises(ConfigurationError, match=message):
                future.result()


def test_an_empty_push_records_its_batch() -> None:
    def nothing(worker: Worker, batches: Batches) -> None:
        for _ in batches:
            worker.push({})

    with VirtualCluster() as cluster, server(cluster, shards=2) as ps:
        run(ps, nothing, workers=1)[0].result()
        for reply in audited(ps):
            assert reply.version == 0
            assert [*reply.batches.values()] == [Applied(11)] * EPOCHS


def test_a_worker_is_added_after_the_last_one_that_was_added_has_ended() -> None:
    with VirtualCluster(workers=3) as cluster, server(cluster) as ps:
        (first,) = run(ps, some, workers=1)
        for _ in range(2):
            assert ps.add_worker(few).result() == 4
        assert not first.done()
        ps.stop()
        with pytest.raises(TrainingStopped):
            first.result()


def test_workers_on_all_nodes_compute_until_every_batch_is_applied() -> None:
    faults = [Kill("worker-1", AtUpdates(50)), Kill("worker-0", AtUpdates(150))]
    with VirtualCluster(workers=4, faults=faults) as cluster, server(cluster) as ps:
        for passes in (1, 2):
            futures = run(ps, workers="all", epochs=SOME)
            done = [future.result() for future in futures]
            assert len(done) >= 2
            assert min(done[:2]) > 50
            assert ps.pull()["w"].tolist() == [passes * SOME] * EXAMPLES


def test_a_run_on_all_nodes_is_over_though_batches_of_an_earlier_pass_are_lost() -> None:
    killed = []

    def kill(worker: Worker, batches: Batches) -> int:
        first = few(worker, batches)
        if not killed:
            killed.append(cluster.kill("server-0"))
        return first + count(worker, batches)

    with (
        VirtualCluster(servers=2, workers=3) as cluster,
        server(cluster, recovery=Recovery(Checkpoint(every=30)), on_loss="ignore") as ps,
    ):
        run(ps, workers="all")
        run(ps, kill, workers="all")
        assert ps.updates_lost > 4
        (reply,) = audited(ps)
        assert sum(done.batches for done in reply.batches.values()) == (10 + 11) * EPOCHS


def test_a_run_on_all_nodes_can_be_stopped() -> None:
    def stop(worker: Worker, batches: Batches) -> None:
        few(worker, batches)
        ps.stop()

    with VirtualCluster(workers=2) as cluster, server(cluster) as ps:
        with pytest.raises(TrainingStopped):
            run(ps, stop, workers="all", epochs=SOME)
        assert sum(future.result() for future in run(ps, workers="all", epochs=SOME)) > 0


def test_an_error_on_one_of_all_nodes_is_raised() -> None:
    def fail(worker: Worker, batches: Batches) -> None:
        raise ValueError("a bad example")

    with VirtualCluster(workers=2) as cluster, server(cluster) as ps:
        with pytest.raises(ValueError, match="a bad example"):
            run(ps, fail, workers="all")
        with pytest.raises(ConfigurationError, match='workers="all" needs data, batch_size'):
            ps.run(count, workers="all")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"batch_size": 0}, "batch_size=0, expected 1 or more whole examples"),
        ({"epochs": 0}, "epochs=0, expected"),
        ({"data": None}, "data is NoneType, expected a number of examples"),
        ({"batch_size": None}, "epochs, shuffle and lease are for leased data; give batch_size"),
        ({"lease": 1.5}, "lease=1.5, expected"),
    ],
)
def test_arguments_are_checked(choices: dict[str, Any], message: str) -> None:
    with (
        VirtualCluster() as cluster,
        server(cluster) as ps,
        pytest.raises(ConfigurationError, match=message),
    ):
        run(ps, workers=1, **choices)


def reached(ps: ParameterServer, futures: Sequence[Any], updates: int) -> bool:
    """Whether each shard has this number of updates; fails if no worker is left."""
    errors = [future.exception() for future in futures if future.status == "error"]
    assert len(errors) < len(futures), errors
    return min(versions(ps)) >= updates


def named(worker: Worker, batches: Batches) -> int:
    return count(worker, (batch["index"] for batch in batches))


@pytest.mark.cluster
@pytest.mark.parametrize("train", [count, named])
def test_each_example_is_applied_once_though_processes_are_killed(train: Any) -> None:
    data = {"index": np.arange(EXAMPLES)} if train is named else EXAMPLES
    with (
        LocalCluster(nodes(spares=1, workers=4), PRELOAD) as cluster,
        server(cluster.client, shards=2, recovery=Recovery(Chain(2))) as ps,
    ):
        futures = run(ps, train, workers=2, data=data, epochs=MANY)
        futures += [ps.add_worker(train) for _ in range(2)]
        for name, updates in (("worker-0", 5), ("server-0", 100), ("worker-1", 200)):
            eventually(partial(reached, ps, futures, updates), SECONDS)
            assert is_gone(cluster.kill(name), SECONDS)
        eventually(lambda: all(future.status != "pending" for future in futures), SECONDS)
        assert any(future.status == "finished" for future in futures), [
            f.exception() for f in futures
        ]
        assert_each_once(ps, MANY)


@pytest.mark.cluster
@pytest.mark.parametrize("form", ["array", "bag", "frame", "futures", "pair"])
def test_batches_of_a_collection_have_rows_of_one_partition(form: str) -> None:
    def rows(worker: Worker, batches: Iterable[Any]) -> int:
        def indices() -> Iterator[Any]:
            for batch in batches:
                batch = batch[0] if isinstance(batch, tuple) else batch
                yield batch["i"] if hasattr(batch, "columns") else batch

        return count(worker, indices())

    array = da.arange(EXAMPLES, chunks=20)
    with LocalCluster(nodes(workers=2), PRELOAD) as cluster, server(cluster.client) as ps:
        if form == "futures":
            data: Any = cluster.client.scatter([np.arange(60), np.arange(60, EXAMPLES)])
        else:
            bag = db.from_sequence(range(EXAMPLES), partition_size=20)
            frame = dd.from_dask_array(array, columns="i").to_frame()
            data = {"array": array, "bag": bag, "frame": frame, "pair": (array, array + 1)}[form]
        assert sum(future.result(SECONDS) for future in run(ps, rows, 2, data=data)) == 11 * EPOCHS
        assert_each_once(ps)


@pytest.mark.cluster
def test_a_wrong_function_is_refused_before_a_collection_is_computed(plain: Client) -> None:
    data = delayed(pytest.fail)("was computed")
    parts = da.from_delayed(data, (EXAMPLES,), int)
    with server(plain) as ps, pytest.raises(ConfigurationError, match="does not accept the call"):
        ps.run(lambda worker: None, data=parts, batch_size=10)


@pytest.mark.cluster
@pytest.mark.parametrize("is_collection", [False, True])
def test_a_run_on_all_nodes_follows_those_that_join_and_are_lost(is_collection: bool) -> None:
    with (
        LocalCluster(nodes(workers=1), PRELOAD) as cluster,
        server(cluster.client) as ps,
        ThreadPoolExecutor(1) as threads,
    ):
        data: Any = {"index": np.arange(EXAMPLES)}
        train: Any = named
        if is_collection:
            train, data = count, da.arange(EXAMPLES, chunks=20)
        running = threads.submit(run, ps, train, workers="all", data=data, epochs=MANY)
        for number, updates in ((0, 20), (1, 100)):
            eventually(lambda: running.done() or min(versions(ps)) >= updates, SECONDS)  # noqa: B023
            assert is_gone(cluster.kill(f"worker-{number}"), SECONDS)
            cluster.start(NodeSpec(f"worker-{number + 1}", "worker"))
        assert [future.status for future in running.result(SECONDS)] == ["finished"]
        assert_each_once(ps, MANY)


def count_and_wait(asked: Path, worker: Worker, batches: Batches) -> int:
    done = count(worker, batches)
    eventually(asked.exists, SECONDS)
    return done


@pytest.mark.cluster
def test_a_worker_that_ends_while_dask_is_asked_for_it_is_not_cancelled(
    plain: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"

    def late(client: Client, nodes: Sequence[Node]) -> set[str]:
        asked.touch()
        eventually(lambda: not any(client.processing().values()), SECONDS)
        return processing(client, nodes)

    monkeypatch.setattr("dps.cluster.driver.training.processing", late)
    with server(plain) as ps:
        futures = run(ps, partial(count_and_wait, asked), workers="all", epochs=1)
        assert sum(future.result(SECONDS) for future in futures) == 11


@pytest.mark.cluster
def test_copies_of_data_stay_though_dask_deletes_replicas(plain: Client) -> None:
    nodes = [*plain.scheduler_info(n_workers=-1)["workers"]]
    futures = copies_of(plain, {"index": np.arange(EXAMPLES)}, "data", nodes)
    plain.amm.run_once()
    holders = [holder for held in plain.who_has(futures).values() for holder in held]
    assert sorted(holders) == sorted(nodes)
