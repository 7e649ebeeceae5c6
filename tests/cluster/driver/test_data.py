"""Dask collections that workers share: whole partitions, computed near their nodes."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, get_worker, wait
from hypothesis import example, given
from hypothesis import strategies as st

from dps import SGD, Worker
from dps.cluster.driver.data_shares import assigned
from dps.errors import ConfigurationError
from tests.support.training import COUNTING, SECONDS, params, patient_server, results
from tests.support.waiting import eventually

ROWS = 120


def plain_rows(worker: Worker, data: list[Any]) -> tuple[str, list[Any]]:
    """Return the node that the worker runs on, and its share."""
    return get_worker().address, [np.asarray(part) for part in data]


def share(worker: Worker, data: list[Any]) -> list[Any]:
    return data


@pytest.mark.cluster
def test_each_worker_is_given_its_partitions_of_an_array(plain: Client) -> None:
    x = da.arange(ROWS, chunks=20)
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        found = results(ps.run(plain_rows, workers=2, data=x))
        assert sum("arange" in str(key) for key in plain.who_has()) == 6
        assert [np.concatenate(parts).tolist() for _, parts in found] == [
            list(range(60)),
            list(range(60, ROWS)),
        ]
    eventually(lambda: not any("arange" in str(key) for key in plain.who_has()), SECONDS)


@pytest.mark.cluster
def test_a_partition_in_memory_stays_on_its_node(plain: Client) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        nodes = [node.address for node in ps.nodes if node.role == "worker"]
        parts = [
            plain.submit(np.full, 5, number, workers=[nodes[number % 2]], pure=False)
            for number in range(4)
        ]
        wait(parts)
        found = dict(results(ps.run(plain_rows, workers=2, data=parts)))
        for number in range(2):
            values = sorted(int(part[0]) for part in found[nodes[number]])
            assert values == [number, number + 2]


@pytest.mark.cluster
def test_a_persisted_array_stays_where_it_is(plain: Client) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        first, second = [node.address for node in ps.nodes if node.role == "worker"][:2]
        halves = [
            plain.persist(da.full(4, number, chunks=2) + 0, workers=[node])
            for number, node in enumerate((second, first))
        ]
        wait(halves)
        found = dict(results(ps.run(plain_rows, workers=2, data=da.concatenate(halves))))
        assert {node: np.concatenate(parts).tolist() for node, parts in found.items()} == {
            second: [0] * 4,
            first: [1] * 4,
        }


@pytest.mark.cluster
def test_collections_of_a_tuple_are_given_together(plain: Client) -> None:
    rows = pd.DataFrame({"a": np.arange(ROWS), "b": 2 * np.arange(ROWS)})
    frame = dd.from_pandas(rows, npartitions=3)
    labels = da.from_array(np.arange(ROWS) % 2, chunks=40)
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        (parts,) = results(ps.run(share, workers=1, data=(frame, labels)))
        assert [type(x) for x, _ in parts] == [pd.DataFrame] * 3
        pd.testing.assert_frame_equal(pd.concat([x for x, _ in parts]), rows)
        assert np.concatenate([y for _, y in parts]).tolist() == (rows["a"] % 2).tolist()
        bags = db.from_sequence(["ab", "c", "d"], npartitions=3)
        assert results(ps.run(share, workers=1, data=bags)) == [[["ab"], ["c"], ["d"]]]


def descend(worker: Worker, data: list[Any]) -> None:
    x = np.concatenate([part[0] for part in data])
    y = np.concatenate([part[1] for part in data])
    weights = worker.pull()
    for _ in range(200):
        weights = worker.push_pull({"w": x.T @ (x @ weights["w"] - y) / len(y)})


@pytest.mark.cluster
def test_a_model_is_fitted_to_a_dask_array(plain: Client) -> None:
    x = da.random.default_rng(0).normal(size=(4000, 5), chunks=(500, 5))
    truth = np.arange(1.0, 6.0)
    with patient_server(plain, {"w": np.zeros(5)}, optimizer=SGD(0.1)) as ps:
        results(ps.run(descend, workers=2, data=(x, x @ truth)))
        np.testing.assert_allclose(ps.pull()["w"], truth, atol=1e-6)


async def share_asynchronously(address: str, parts: int) -> tuple[list[Any], float]:
    async with (
        Client(address, asynchronous=True) as client,
        patient_server(client, params(), optimizer=COUNTING) as ps,
    ):
        x = da.arange(parts, chunks=1)
        before = time.process_time()
        futures = ps.run(share, workers=2, data=x)
        seconds = time.process_time() - before
        return await client.gather(futures), seconds


@pytest.mark.cluster
def test_an_asynchronous_client_shares_collections_too(plain: Client) -> None:
    found, _ = asyncio.run(share_asynchronously(plain.scheduler.address, 4))
    assert [np.concatenate(parts).tolist() for parts in found] == [[0, 1], [2, 3]]


@pytest.mark.cluster
@pytest.mark.slow
def test_many_partitions_are_shared_out_in_one_graph(plain: Client) -> None:
    parts = 1600
    rows = pd.DataFrame({"a": np.arange(2 * parts)})
    frame = dd.from_pandas(rows, npartitions=parts).assign(b=1)
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        before = time.process_time()
        futures = ps.run(count_parts, workers=2, data=frame)
        # Of this process alone: it took over three minutes when each partition was a graph.
        assert time.process_time() - before < 2.5
        nodes = [node.address for node in ps.nodes if node.role == "worker"][:2]
        found = [future.result(timeout=600) for future in futures]
    assert [(address, len(keys)) for address, keys in found] == [(n, parts // 2) for n in nodes]
    assert [sum(keys) for _, keys in found] == [parts // 2, parts // 2]


def count_parts(worker: Worker, data: list[Any]) -> tuple[str, list[bool]]:
    """Return the node, and whether it has computed each partition of the share."""
    here = get_worker()
    held = {id(value) for value in here.data.values()}
    return here.address, [id(part) in held for part in data]


def with_future(future: Any, worker: Worker) -> None:
    """Never called."""


@pytest.mark.cluster
def test_data_that_cannot_be_shared_out_is_refused(plain: Client) -> None:
    def message(**given: Any) -> str:
        with pytest.raises(ConfigurationError) as refused:
            ps.run(given.pop("train", share), **given)
        return str(refused.value)

    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        columns = da.ones((10, 10), chunks=(5, 5))
        assert "x.rechunk({1: -1})" in message(data=columns)
        assert "workers=2 need as many partitions of data, which has 1" in message(
            data=da.ones(10, chunks=10), workers=2
        )
        assert "expected a Dask array" in message(data=np.ones(3))
        assert "[1, 2] partitions" in message(data=(da.ones(4, chunks=4), da.ones(4, chunks=2)))
        (future,) = plain.scatter([1])
        assert "data=[future, …]" in message(train=partial(with_future, future))
        assert "data=[future, …]" in message(train=partial(with_future, [future]))
        assert "data=[future, …]" in message(train=partial(with_future, future={"a": (future,)}))
        assert not ps.workers


@given(
    st.lists(st.sets(st.sampled_from("abc")), min_size=3, max_size=20),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=3),
)
@example([{"b"}, {"b"}, {"c"}, {"c"}], ["a", "b", "c"])  # all are near to some of the workers
def test_shares_are_equal_and_leave_nothing_out(holders: list[set[str]], nodes: list[str]) -> None:
    found = assigned(holders, nodes)
    assert sorted(number for numbers in found for number in numbers) == list(range(len(holders)))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert all(numbers == sorted(numbers) for numbers in found)


def test_what_a_node_holds_is_its_own_worker_s() -> None:
    assert assigned([{"b"}, {"a"}, {"b"}, {"a"}], ["a", "b"]) == [[1, 3], [0, 2]]
    assert assigned([{"a"}] * 4, ["a", "b"]) == [[0, 1], [2, 3]]
