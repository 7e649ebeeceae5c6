"""Sparse tables on real Dask processes: pushed to and read, and exact across the loss of a head."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from dps import (
    BSP,
    Normal,
    ParameterServer,
    Recovery,
    SparseSpec,
    Worker,
    WorkerCache,
)
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import is_gone
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch
from tests.support.training import COUNTING, PRELOAD, SECONDS, audited, nodes, results, versions
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

TABLES = [SparseSpec("emb", 4, initial=Normal(0.5)), SparseSpec("counts", 1, "float64")]
KEYS = np.arange(200) * 12345678901
FAR = 2**63 - 1


def one_each(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What adds 1 to the count of each key."""
    return keys, np.full((len(keys), 1), -1.0)


def push_and_read(worker: Worker) -> None:
    keys = np.array([7, 3, FAR, 3])
    gradient = np.ones((4, 4), np.float32)
    begun = worker.pull_rows("emb", keys)
    assert begun.dtype == np.float32
    assert (begun[1] == begun[3]).all()
    weights = worker.push_pull({"w": np.ones(5)}, rows={"emb": (keys, gradient)})
    assert (weights["w"] == -1).all()
    assert (begun - worker.pull_rows("emb", keys)) == pytest.approx(
        np.array([[1], [2], [1], [2]]) * np.ones(4), abs=1e-6
    )
    pushed = worker.push_async(rows={"counts": one_each(KEYS), "emb": ([5], gradient[:1])})
    pushed.wait()
    found, rows = worker.pull_range("counts", KEYS[1], KEYS[3])
    assert found.tolist() == KEYS[1:3].tolist()
    assert (rows == 1).all()
    assert worker.pull_rows_async("counts", [1, KEYS[1]]).wait().tolist() == [[0.0], [1.0]]


def push_what_does_not_fit(worker: Worker) -> None:
    one = np.ones((1, 1))
    for bad, said in [
        ({"counts": ([-1], one)}, "-1, expected 0"),
        ({"counts": ([1.5], one)}, "expected whole numbers"),
        ({"counts": ([1], one.astype(int))}, "are int64"),
        ({"other": ([1], one)}, "no sparse table is named 'other'; there are: emb, counts"),
    ]:
        with pytest.raises(ShapeMismatch, match=said):
            worker.push({"w": np.ones(5)}, rows=bad)
    with pytest.raises(NonFiniteGradient, match="'counts' hold NaN"):
        worker.push({"w": np.ones(5)}, rows={"counts": ([1], one * np.nan)})
    with pytest.raises(ShapeMismatch, match="2 dimensions"):
        worker.pull_rows("counts", [[1]])  # type: ignore[list-item]


def count_rows_until(flag: str, worker: Worker) -> int:
    """Push to all keys until there is a file `flag`, and five times more; return how often."""
    left = 5
    for step in itertools.count(1):
        worker.push({"w": np.full(5, -1.0)}, rows={"counts": one_each(KEYS)})
        assert (worker.pull_rows("counts", KEYS[:20]) >= step).all()
        left -= os.path.exists(flag)
        if not left:
            return step
    raise AssertionError


@pytest.mark.slow
def test_rows_are_pushed_and_read(client: Client) -> None:
    params = {"w": np.zeros(5)}
    with ParameterServer(client, params, tables=TABLES, shards=2, optimizer=COUNTING) as ps:
        results(ps.run(push_and_read))
        keys, rows = ps.pull_range("emb")
        assert keys.tolist() == [3, 5, 7, FAR]
        assert rows.tobytes() == ps.pull_rows("emb", keys).tobytes()
        assert (ps.pull_rows("counts", KEYS[::-1]) == 1).all()
        before = versions(ps)
        results(ps.run(push_what_does_not_fit))
        assert versions(ps) == before


def test_a_group_of_tables_alone(with_roles: Client) -> None:
    with ParameterServer(
        with_roles, {}, tables=TABLES[1:], shards=2, optimizer=COUNTING, consistency=BSP()
    ) as ps:
        results(ps.run(partial(_push_times, 3), workers=2))
        assert ps.pull() == {}
        assert (ps.pull_rows("counts", KEYS) == 6).all()


def _push_times(steps: int, worker: Worker) -> None:
    for _ in range(steps):
        assert worker.push_pull(rows={"counts": one_each(KEYS)}) == {}


def test_tables_that_cannot_work_are_refused(with_roles: Client) -> None:
    start = partial(ParameterServer, with_roles, {"w": np.zeros(5)})
    with pytest.raises(ConfigurationError, match="worker_cache cannot restore sparse tables"):
        start(tables=TABLES, recovery=Recovery(WorkerCache()))
    with pytest.raises(ConfigurationError, match="expected a list of SparseSpec"):
        start(tables=TABLES[0])
    with pytest.raises(ConfigurationError, match="parameters or tables are named 'w'"):
        start(tables=[SparseSpec("w", 1)])


@pytest.mark.slow
def test_no_row_is_lost_or_counted_twice_when_a_head_is_killed(tmp_path: Path) -> None:
    flag = tmp_path / "stop"
    with (
        LocalCluster(nodes(replicas=1, spares=1), (*PRELOAD, __name__)) as cluster,
        ParameterServer(
            cluster.client,
            {"w": np.zeros(5)},
            tables=TABLES,
            shards=2,
            optimizer=COUNTING,
            recovery="chain",
        ) as ps,
    ):
        futures = ps.run(partial(count_rows_until, str(flag)), workers=2)
        eventually(lambda: min(versions(ps)) >= 10, SECONDS)
        assert is_gone(cluster.kill("server-0"), SECONDS)
        eventually(lambda: min(versions(ps)) >= 25, SECONDS)
        flag.touch()
        pushed = sum(results(futures))
        assert {reply.version for reply in audited(ps)} <= {pushed}
        keys, rows = ps.pull_range("counts")
        assert keys.tolist() == KEYS.tolist()
        assert set(rows[:, 0].tolist()) == {pushed}
        assert (ps.pull()["w"] == pushed).all()
