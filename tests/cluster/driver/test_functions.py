"""Functions of a user's on a real cluster: norms, top-k, proximal steps, and failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dps import BSP, SGD, Changed, Checkpoint, ParameterServer, Part, Recovery, Worker
from dps.errors import ConfigurationError, FunctionFailed
from tests.support.training import results

pytestmark = pytest.mark.cluster

Parts = Mapping[str, Part]
START = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)


def squares(arrays: Parts) -> float:
    return float((arrays["w"].values.astype(float) ** 2).sum())


def largest(arrays: Parts, k: int) -> dict[str, Any]:
    part = arrays["w"]
    here = np.argsort(-np.abs(part.values))[:k]
    return {"at": part.positions[here], "values": part.values[here]}


def shrink(arrays: Parts, by: float) -> Changed:
    values = arrays["w"].values
    left = np.sign(values) * np.maximum(np.abs(values) - np.float32(by), 0)
    return Changed({"w": left}, int(np.count_nonzero(left)))


def broken(arrays: Parts) -> float:
    return 1 / 0


def add_one(arrays: Parts, caller: int) -> Changed:
    """Count in the shard's counter, and in the caller's own cell."""
    values = arrays["counts"].values.copy()
    values[[0, 1 + caller]] += 1
    return Changed({"counts": values}, values[1 + caller])


FUNCTIONS = {"squares": squares, "largest": largest, "shrink": shrink, "broken": broken}


@pytest.mark.slow
def test_functions_do_what_they_would_do_to_the_whole_array(client: Client) -> None:
    with ParameterServer(
        client, {"w": START, "other": np.ones(3)}, shards=2, functions=FUNCTIONS
    ) as ps:
        assert sum(ps.apply("squares")) == pytest.approx(float((START.astype(float) ** 2).sum()))
        found = ps.apply("largest", 5)
        values = np.concatenate([shard["values"] for shard in found])
        at = np.concatenate([shard["at"] for shard in found])
        best = np.argsort(-np.abs(values))[:5]
        assert set(at[best]) == set(np.argsort(-np.abs(START.ravel()))[:5])
        assert np.array_equal(START.ravel()[at], values)
        left = ps.apply("shrink", 0.5)
        weights = ps.pull()["w"]
        expected = np.sign(START) * np.maximum(np.abs(START) - np.float32(0.5), 0)
        assert np.array_equal(weights, expected)
        assert weights.dtype == np.float32
        assert sum(left) == np.count_nonzero(expected)


def test_a_failure_goes_to_the_caller_and_the_shards_go_on(client: Client) -> None:
    def train(worker: Worker) -> str:
        try:
            worker.apply("broken")
        except FunctionFailed as error:
            worker.push({"w": START})
            return str(error)
        return ""

    with ParameterServer(
        client, {"w": START}, shards=2, optimizer=SGD(1.0), functions=FUNCTIONS, consistency=BSP()
    ) as ps:
        with pytest.raises(ConfigurationError, match="registered: squares, largest"):
            ps.apply("median")
        (text,) = results(ps.run(train))
        assert "ZeroDivisionError" in text
        assert "return 1 / 0" in text
        assert "applied on no shard" in text
        assert not ps.pull()["w"].any()


def test_what_cannot_be_is_refused_at_once(plain: Client, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected a mapping of names to functions"):
        ParameterServer(plain, {"w": START}, functions=[add_one])  # type: ignore[arg-type]
    recovery = Recovery(Checkpoint(path=str(tmp_path), scope="all"))
    with pytest.raises(
        ConfigurationError, match="with scope='all' cannot be combined with functions"
    ):
        ParameterServer(plain, {"w": START}, functions=FUNCTIONS, recovery=recovery)


def test_a_resumed_server_takes_no_call_for_one_of_before(plain: Client, tmp_path: Path) -> None:
    recovery = Recovery(Checkpoint(every=1, mode="sync", path=str(tmp_path)))
    params, functions = {"counts": np.zeros(3)}, {"add one": add_one}
    with ParameterServer(plain, params, recovery=recovery, functions=functions) as ps:
        assert [ps.apply("add one", 0), ps.apply("add one", 0)] == [[1], [2]]
    with ParameterServer.resume(plain, str(tmp_path), functions=functions) as ps:
        assert ps.apply("add one", 0) == [3]
        assert ps.pull()["counts"].tolist() == [3, 3, 0]
