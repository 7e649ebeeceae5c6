"""Trees of arrays on a parameter server: their structure, what counts as an array, and clipping."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributed import Client

import dps
from dps import SGD, ParameterServer, Worker
from dps.errors import ConfigurationError, GroupClosed, ShapeMismatch
from dps.testing import VirtualCluster
from tests.support.training import results

pytestmark = pytest.mark.cluster

STEPS = 5


class Layer(NamedTuple):
    w: Any
    b: Any


class ByDLPack:
    """An array that is no numpy array, and is given by DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **choices: Any) -> Any:
        return self._array.__dlpack__(**choices)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def tree(value: float = 0.0) -> dict[str, Any]:
    return {
        "layers": [
            Layer(np.full((2, 3), value, np.float32), np.full(3, value)),
            Layer(np.full((3, 1), value, np.float16), None),
        ],
        "scale": (value,),
        "z": {"a": np.full((), value, np.float32)},
    }


PATHS = {
    "layers/0/w": "float32",
    "layers/0/b": "float64",
    "layers/1/w": "float32",
    "scale/0": "float64",
    "z/a": "float32",
}


def leaves(found: Any) -> list[np.ndarray]:
    first, second = found["layers"]
    assert (type(first), type(second), second.b) == (Layer, Layer, None)
    assert isinstance(found["scale"], tuple)
    return [first.w, first.b, second.w, found["scale"][0], found["z"]["a"]]


def test_a_tree_is_named_by_paths_and_put_together_again() -> None:
    arrays = dps.tree.parameters(tree(2.0))
    assert {path: str(array.dtype) for path, array in arrays.items()} == PATHS
    found = leaves(dps.tree.restored(tree(), arrays))
    assert [str(a.dtype) for a in found] == ["float32", "float64", "float16", "float64", "float32"]
    assert [a.shape for a in found] == [(2, 3), (3,), (3, 1), (), ()]
    assert all((a == 2.0).all() for a in found)
    assert dps.tree.parameters(np.ones(2, np.longdouble))["array"].dtype == np.float64
    with pytest.raises(ConfigurationError, match="two arrays of the tree have the path 'a/b'"):
        dps.tree.parameters({"a/b": np.zeros(1), "a": {"b": np.zeros(1)}})
    with pytest.raises(ConfigurationError, match="two arrays of the tree have the path '1'"):
        dps.tree.parameters({1: np.zeros(1), "1": np.zeros(1)})
    with pytest.raises(ConfigurationError, match="'a/0' of the tree is str, expected an array"):
        dps.tree.parameters({"a": ["text"]})


@dataclass(frozen=True)
class Net:
    """Two arrays, and two settings as JAX and Flax mark them."""

    w: Any
    b: Any = None
    name: str = field(default="net", metadata={"static": True})
    act: Any = field(default=len, metadata={"pytree_node": False})


ARRAY = np.arange(3.0)
TREES: list[Any] = [
    ARRAY,
    2.5,
    OrderedDict([("b", ARRAY), ("a", None)]),
    defaultdict(list, a=ARRAY, b=[ARRAY, (ARRAY,)]),
    MappingProxyType({"a": ARRAY}),
    Net(ARRAY, {"x": ARRAY}, name="mine"),
    [Layer(ARRAY, None), [], {}, ()],
    {"w": ARRAY, "nothing": np.zeros((0, 3)), 7: ARRAY},
]


@pytest.mark.parametrize("like", TREES, ids=lambda like: type(like).__name__)
def test_what_comes_back_has_the_structure_of_what_went_in(like: Any) -> None:
    arrays = dps.tree.parameters(like)
    assert all(path and array.size for path, array in arrays.items())
    found: Any = dps.tree.restored(like, {path: array + 1.0 for path, array in arrays.items()})
    assert repr(found) == repr(dps.tree.restored(like, arrays)).replace(
        "0., 1., 2.", "1., 2., 3."
    ).replace("2.5", "3.5")
    assert type(found) is (type(like) if like is not TREES[1] else np.ndarray)
    if isinstance(like, Net):
        assert (found.name, found.act) == ("mine", len)
    if isinstance(like, defaultdict):
        assert found.default_factory is list


class Named(dict[str, Any]):
    """A mapping that is made of something else than its items."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        super().__init__(given)


@pytest.mark.parametrize(
    ("like", "text"),
    [
        (Named("a", {"a": ARRAY}), "'it' of the tree is Named, which cannot be rebuilt"),
        ({"a": np.zeros(4)}, r"'a' has the shape \[4\] in the tree, \[3\] in"),
        ({"b": ARRAY}, "the tree has 'b', but no array has this path"),
    ],
)
def test_a_structure_that_cannot_come_back_is_refused(like: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        dps.tree.restored(like, {"a": ARRAY})


def test_masks_and_imaginary_parts_are_not_dropped() -> None:
    with pytest.raises(ConfigurationError, match="'a' of the tree is a masked array"):
        dps.tree.parameters({"a": np.ma.masked_array([1.0], [True])})


@pytest.mark.parametrize("dtype", ["int64", "complex64"])
def test_leaves_that_are_no_floats_are_refused(dtype: str) -> None:
    wrong = {"a": [np.zeros((2, 3), dtype)]}
    text = rf"^'a/0' of the tree is {dtype}\[2, 3\], expected floats; convert with astype"
    with pytest.raises(ConfigurationError, match=text):
        dps.tree.parameters(wrong)
    with pytest.raises(ConfigurationError, match=text):
        dps.tree.restored(wrong, {"a/0": np.full((2, 3), 0.5)})


def train(ahead: int, worker: Worker) -> list[float]:
    """Push gradients that are changed at once; the sum of all is what the weights come to."""
    with dps.tree.attach(worker, tree(), ahead=ahead) as replica:
        for _ in range(STEPS):
            gradients = tree(-1.0)
            gradients["z"]["a"] = ByDLPack(np.full((), -1.0, np.float32))
            replica.step(gradients)
            gradients["layers"][0].w[:] = np.nan
    return [float(array.flat[0]) for array in leaves(replica.weights)]


@pytest.mark.parametrize(("shards", "ahead"), [(1, 0), (2, 1)])
def test_every_gradient_is_applied_once(plain: Client, shards: int, ahead: int) -> None:
    start = dps.tree.parameters(tree())
    with ParameterServer(plain, start, shards=shards, optimizer=SGD(1.0)) as ps:
        assert results(ps.run(partial(train, ahead))) == [[STEPS] * 5]
        assert all((array == STEPS).all() for array in ps.pull().values())


def push_what_does_not_fit(worker: Worker) -> list[str]:
    told = []
    replica = dps.tree.attach(worker, tree())
    lacks = {key: part for key, part in tree().items() if key != "z"}
    more = {**tree(), "more": np.zeros(1)}
    other = {**tree(), "z": {"a": np.zeros(2)}}
    imaginary = {**tree(), "z": {"a": np.zeros((), complex)}}
    for wrong in (lacks, more, other, imaginary):
        with pytest.raises(ShapeMismatch) as caught:
            replica.step(wrong)
        told.append(str(caught.value))
    with pytest.raises(ConfigurationError) as refused:
        dps.tree.attach(worker, {"z": np.zeros(3)})
    return [*told, str(refused.value)]


def test_what_does_not_fit_is_refused_by_its_path(plain: Client) -> None:
    with ParameterServer(plain, dps.tree.parameters(tree())) as ps:
        (told,) = results(ps.run(push_what_does_not_fit))
    assert "only that of the parameter server has 'z/a'" in told[0]
    assert "only the one given has 'more'" in told[1]
    assert "'z/a' of the tree is [2], expected []" in told[2]
    assert "'z/a' of the tree is complex128[], expected floats" in told[3]
    assert (
        "the tree has 'z', float64[3], but the parameter server has nothing of this name" in told[4]
    )


def step_when_closed(worker: Worker) -> float:
    with dps.tree.attach(worker, tree()) as left:
        left.step(tree(-1.0))
    with pytest.raises(ZeroDivisionError), dps.tree.attach(worker, tree()) as failed:
        raise ZeroDivisionError
    closed = dps.tree.attach(worker, tree())
    closed.close()
    for replica in (left, failed, closed):
        with pytest.raises(GroupClosed, match="attach again"):
            replica.step(tree(-1.0))
    return float(closed.close()["scale"][0])


def test_a_closed_replica_sends_nothing(plain: Client) -> None:
    with ParameterServer(plain, dps.tree.parameters(tree()), optimizer=SGD(1.0)) as ps:
        assert results(ps.run(step_when_closed)) == [1.0]
        assert all((array == 1.0).all() for array in ps.pull().values())


def test_an_exchange_sends_the_decrease_of_weights_that_may_be_changed_in_place() -> None:
    like = {"w": np.zeros(2), "none": np.zeros(0)}

    def train(worker: Worker) -> list[list[float]]:
        found = []
        with dps.tree.attach(worker, like) as replica:
            for step in range(3):
                replica.weights["w"] -= step + 1
                found.append(replica.exchange(replica.weights)["w"].tolist())
        return found

    def ahead(worker: Worker) -> None:
        with dps.tree.attach(worker, like, ahead=1) as replica:
            replica.exchange(replica.weights)

    with (
        VirtualCluster() as cluster,
        ParameterServer(cluster, dps.tree.parameters(like), optimizer=SGD(0.5)) as ps,
    ):
        (future,) = ps.run(train, workers=1)
        assert future.result() == [[-0.5, -0.5], [-1.5, -1.5], [-3.0, -3.0]]
        (future,) = ps.run(ahead, workers=1)
        with pytest.raises(ConfigurationError, match="expected 0 for exchange"):
            future.result()
