"""What may be pushed: arrays to compute into, others, and what can be read as one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dps import ParameterServer, Worker
from dps.errors import ShapeMismatch
from tests.cluster.node.test_pipeline import HOLD
from tests.support.training import COUNTING, counts, ones, params, results

pytestmark = pytest.mark.cluster

STEPS = 6


def compute_into(names: tuple[str, ...], worker: Worker) -> list[float]:
    """Write over the arrays as soon as they have been pushed and asked for anew."""
    worker.pull()
    handles = []
    for _ in range(STEPS):
        gradients = worker.gradients(names)
        assert worker.gradients(names) is gradients
        for array in gradients.values():
            array[:] = -1.0
        handles.append(worker.push_async(gradients))
        for array in worker.gradients(names).values():
            array[:] = np.nan
    for handle in handles:
        handle.wait()
    weights = worker.pull()
    return [float(weights[name].flat[0]) for name in ("w", "v")]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("names", "found"), [((), [STEPS, STEPS]), (("v",), [0, STEPS])])
def test_arrays_to_compute_into_are_others_as_soon_as_they_are_pushed(
    plain: Client, shards: int, names: tuple[str, ...], found: list[float]
) -> None:
    with ParameterServer(plain, params(), shards=shards, optimizer=COUNTING) as ps:
        assert results(ps.run(partial(compute_into, names))) == [found]


def keep_two_under_way(flag: str, worker: Worker) -> bool:
    """Compute a second gradient while the first waits for a shard that is busy."""
    worker.pull()
    worker.apply_async("hold", flag)
    first = worker.gradients()
    for array in first.values():
        array[:] = -1.0
    under_way = worker.push_async(first)
    second = worker.gradients()
    for array in second.values():
        array[:] = -2.0
    apart = not np.shares_memory(first.buffer, second.buffer)
    Path(flag).touch()
    under_way.wait()
    worker.push(second)
    return apart


def test_a_gradient_on_its_way_keeps_its_memory(plain: Client, tmp_path: Path) -> None:
    with ParameterServer(plain, params(), optimizer=COUNTING, functions=HOLD) as ps:
        assert results(ps.run(partial(keep_two_under_way, str(tmp_path / "go on")))) == [True]
        assert counts(ps) == [3]


def pull_into_arrays(worker: Worker) -> list[bool]:
    flat = worker.layout.flat()
    mine = flat.over(np.zeros(flat.nbytes, np.uint8))
    worker.pull_into(mine)
    gradients = ones(mine)
    worker.push_pull_into(mine, gradients).wait()
    return [bool((mine[name] == array).all()) for name, array in worker.pull().items()]


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_can_be_written_into_arrays_of_ones_own(plain: Client, shards: int) -> None:
    with ParameterServer(plain, params(), shards=shards, optimizer=COUNTING) as ps:
        assert results(ps.run(pull_into_arrays)) == [[True, True]]
        assert counts(ps) == [1] * shards


class Readable:
    """What is no numpy array, but can be read as one, or cannot."""

    def __init__(self, array: np.ndarray, fails: bool = False) -> None:
        self.array, self.fails = array, fails

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.fails:
            raise TypeError("it is on another device")
        return self.array


def push_others(worker: Worker) -> str:
    gradients = ones(worker.pull())
    worker.push({name: Readable(array) for name, array in gradients.items()})  # type: ignore[misc]
    with pytest.raises(ShapeMismatch) as caught:
        worker.push({**gradients, "w": Readable(gradients["w"], fails=True)})  # type: ignore[dict-item]
    with pytest.raises(ShapeMismatch, match="'w' is list, expected an array"):
        worker.push({"w": [0.0] * 30})  # type: ignore[dict-item]
    return str(caught.value)


def test_what_can_be_read_as_an_array_is_taken_and_else_refused(plain: Client) -> None:
    with ParameterServer(plain, params(), optimizer=COUNTING) as ps:
        (told,) = results(ps.run(push_others))
        assert "'w' is Readable" in told
        assert "it is on another device" in told
        assert "dps.torch.attach" in told
        assert counts(ps) == [1]
