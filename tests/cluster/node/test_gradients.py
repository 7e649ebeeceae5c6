"""What may be pushed: arrays to compute into, others, and what can be read as one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dps import Pipeline, Worker
from dps.cluster.transport.connection import LARGE_BYTES
from dps.cluster.transport.memory import Held, held_by
from dps.errors import ShapeMismatch
from dps.protocol.executor import INLINE_BYTES
from tests.cluster.node.test_pipeline import HOLD
from tests.support.training import COUNTING, counts, ones, params, patient_server, results

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


@pytest.mark.parametrize(
    ("shards", "names", "found"), [(1, (), [STEPS, STEPS]), (2, ("v",), [0, STEPS])]
)
def test_arrays_to_compute_into_are_others_as_soon_as_they_are_pushed(
    plain: Client, shards: int, names: tuple[str, ...], found: list[float]
) -> None:
    with patient_server(plain, params(), shards=shards, optimizer=COUNTING) as ps:
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
    with patient_server(plain, params(), optimizer=COUNTING, functions=HOLD) as ps:
        assert results(ps.run(partial(keep_two_under_way, str(tmp_path / "go on")))) == [True]
        assert counts(ps) == [3]


def look_where_arrays_lie(worker: Worker) -> list[bool]:
    """Whether in shared memory are: an array to compute into, it once pushed, and weights."""
    gradients = worker.gradients()
    gradients["w"][:] = -1.0
    lent = in_a_segment(gradients["w"])
    weights = worker.push_pull(gradients)["w"]
    with pytest.raises(ValueError, match="read-only"):
        gradients["w"][:] = 0.0
    weights += 1.0  # they are the worker's own, without a copy
    return [lent, held_by(gradients["w"]) is not None, in_a_segment(weights)]


def in_a_segment(array: Any) -> bool:
    """Whether an array that may be written to lies in a segment."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, Held)


@pytest.mark.parametrize(("transport", "shared"), [("auto", True), ("dask", False)])
def test_large_arrays_lie_in_shared_memory_from_the_beginning(
    plain: Client, transport: Any, shared: bool
) -> None:
    large = {"w": np.zeros(LARGE_BYTES, np.float32)}
    with patient_server(plain, large, optimizer=COUNTING, transport=transport) as ps:
        assert results(ps.run(look_where_arrays_lie)) == [[shared] * 3]
        assert ps.pull()["w"][0] == 1.0


def write_into_arrays(worker: Worker) -> list[bool]:
    flat = worker.layout.flat()
    mine = flat.over(np.zeros(flat.nbytes, np.uint8))
    with Pipeline(worker, ahead=0, into=mine) as pipeline:
        first = [bool((mine[name] == array).all()) for name, array in worker.pull().items()]
        pipeline.push_pull(ones(mine))
    return first + [bool((mine[name] == array).all()) for name, array in worker.pull().items()]


def test_weights_can_be_written_into_arrays_of_ones_own(plain: Client) -> None:
    with patient_server(plain, params(), shards=2, optimizer=COUNTING) as ps:
        assert results(ps.run(write_into_arrays)) == [[True] * 4]
        assert counts(ps) == [1, 1]


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
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        (told,) = results(ps.run(push_others))
        assert "'w' is Readable" in told
        assert "it is on another device" in told
        assert "dps.torch.attach" in told
        assert counts(ps) == [1]


def push_large_arrays(worker: Worker) -> list[bool]:
    """Push arrays that have to be put together, and write over them before they are acked."""
    weights = worker.pull()
    gradients = {name: np.full_like(array, -1.0) for name, array in weights.items()}
    under_way = worker.push_async(gradients)
    for array in gradients.values():
        array[:] = np.nan
    under_way.wait()
    return [bool((array == 1.0).all()) for array in worker.pull().values()]


@pytest.mark.parametrize("transport", ["auto", "dask"])
def test_large_arrays_are_put_together_before_the_push_returns(
    plain: Client, transport: Any
) -> None:
    large = {name: np.zeros(INLINE_BYTES // 4, np.float32) for name in ("a", "b", "c")}
    choices: dict[str, Any] = {"optimizer": COUNTING, "transport": transport}
    with patient_server(plain, large, **choices) as ps:
        assert results(ps.run(push_large_arrays)) == [[True] * 3]
