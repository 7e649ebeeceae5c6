"""Dask collections that workers share: whole partitions, computed near their nodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client, get_worker, wait

from dps import Worker
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
def test_what_is_in_memory_stays_on_its_node(plain: Client) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        first, second = nodes = [node.address for node in ps.nodes if node.role == "worker"][:2]
        parts = [
            plain.submit(np.full, 5, number, workers=[nodes[number % 2]], pure=False)
            for number in range(4)
        ]
        wait(parts)
        found = dict(results(ps.run(plain_rows, workers=2, data=parts)))
        for number in range(2):
            values = sorted(int(part[0]) for part in found[nodes[number]])
            assert values == [number, number + 2]
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
        assert "data has 1 partitions, expected at least 2" in message(
            data=da.ones(10, chunks=10), workers=2
        )
        assert "expected a Dask array" in message(data=np.ones(3))
        assert "[1, 2] partitions" in message(data=(da.ones(4, chunks=4), da.ones(4, chunks=2)))
        (future,) = plain.scatter([1])
        assert "data=[future, …]" in message(train=partial(with_future, future))
        assert "data=[future, …]" in message(train=partial(with_future, [future]))
        assert "data=[future, …]" in message(train=partial(with_future, future={"a": (future,)}))
        assert not ps.workers
