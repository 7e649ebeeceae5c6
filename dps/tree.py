"""Trees of arrays on a parameter server, as in JAX.

Arrays are those of numpy and JAX, and objects with `__array__` or DLPack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from dps.cluster.node.pipeline import Closing, Pipeline
from dps.cluster.node.worker import Worker, check_worker
from dps.core.arguments import is_floating, plain
from dps.core.blocks import Arrays, FlatArrays
from dps.core.ranges import described, refused
from dps.errors import ConfigurationError, DpsError, ShapeMismatch

# An array, None (no arrays), or a mapping, list, tuple, named tuple or dataclass of trees.
Tree = Any

ONLY = "array"  # the path of a tree that is one array


def parameters(tree: Tree) -> dict[str, np.ndarray]:
    """Return the first values for a parameter server of a tree.

    They are copies of all leaves that are not empty, by their paths, such as "layers/0/w" ("array"
    if the tree is one). Arrays that are not float64 become float32. Raises `ConfigurationError` if
    a leaf is no array of floats, or two have the same path.

    Examples
    --------
    >>> dps.tree.parameters({"layers": [np.zeros(2), np.ones(1)]})
    {'layers/0': array([0., 0.]), 'layers/1': array([1.])}
    """
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in _leaves(tree):
        if path in arrays:
            raise ConfigurationError(f"two arrays of the tree have the path {path!r}")
        array = _array(path, leaf)
        dtype = "float64" if array.dtype.itemsize >= 8 else "float32"
        arrays[path] = np.array(array, dtype, order="C")
    return arrays


def restored(like: Tree, arrays: Arrays) -> Tree:
    """Return a tree like `like`, with arrays such as `ParameterServer.pull` returns.

    They have the dtypes of the leaves of `like`, and are copied only if that differs. Raises
    `ConfigurationError` if a leaf is not of floats, or there is no array of its path and shape.

    Examples
    --------
    >>> dps.tree.restored({"w": np.zeros(2)}, {"w": np.array([1.0, 2.0])})
    {'w': array([1., 2.])}
    """
    if not isinstance(arrays, Mapping):
        raise refused("arrays", arrays, "path → array, as of ps.pull()")
    return _built(like, arrays, "")


def attach(worker: Worker, like: Tree, *, ahead: int = 0) -> Replica:
    """Join the training of a tree of weights; refuse one that is not that of the parameter server.

    Parameters
    ----------
    worker
        The argument of the training function.
    like
        A tree of the structure, shapes and dtypes of the weights; the server was started from its
        `parameters`.
    ahead
        As for `dps.Pipeline`.
    """
    return Replica(worker, like, ahead)


class Replica(Closing):
    """Keeps `weights` to compute gradients on; a `with` statement closes it. Not thread-safe."""

    def __init__(self, worker: Worker, like: Tree, ahead: int) -> None:
        check_worker(worker)
        self._names = tuple(path for path, _ in _leaves(like))
        wanted = {path: described(array) for path, array in parameters(like).items()}
        worker.layout.require(wanted, "the tree", "dps.tree.parameters(tree)")
        self._worker = worker
        self._like = like
        self._ahead = ahead
        self._pipeline = Pipeline(worker, ahead)
        self.weights: Tree = restored(like, self._pipeline.weights)

    def step(self, gradients: Tree) -> Tree:
        """Send gradients, which are copied, and return the weights for the next ones.

        Waits for the server while more than `ahead` updates are under way. Errors are those of
        `dps.Worker.push`, `ShapeMismatch` if gradients and weights differ in structure or shape,
        and `GroupClosed` after `close`.
        """
        return self._sent(self._written(gradients))

    def exchange(self, weights: Tree) -> Tree:
        """Send the decrease of the weights by local steps; return the weights for the next ones.

        The server takes the decrease for a gradient. That is Local SGD, or DiLoCo: see
        `dps.torch.attach`. Errors are those of `step`, and `ConfigurationError` if the replica is
        `ahead`.

        Parameters
        ----------
        weights
            What local steps have made of the weights that were returned last.

        Examples
        --------
        >>> from dps.testing import VirtualCluster
        >>> def train(worker):
        ...     with dps.tree.attach(worker, {"w": np.zeros(2)}) as replica:
        ...         weights = replica.weights
        ...         for _ in range(3):
        ...             for _ in range(20):  # local steps
        ...                 weights = {"w": weights["w"] - 0.1 * (weights["w"] - 3)}
        ...             weights = replica.exchange(weights)
        >>> start = {"w": np.zeros(2)}
        >>> with VirtualCluster() as cluster:
        ...     with ParameterServer(cluster, start, optimizer=SGD(1.0)) as ps:
        ...         ps.run(train, workers=1)[0].result()
        ...         ps.pull()["w"].round(1)
        array([3., 3.])
        """
        if self._ahead:
            reason = "weights that lack this worker's last update would undo its local steps"
            raise ConfigurationError(f"ahead={self._ahead}: {reason}; expected 0 for exchange")
        arrays = self._written(weights)
        assert self._worker.read_point is not None
        before = self._worker.layout.scatter(self._worker.read_point.buffers)
        for path, array in arrays.items():
            np.subtract(before[path], array, out=array)
        return self._sent(arrays)

    def _written(self, tree: Tree) -> FlatArrays:
        self._pipeline.require_open()
        arrays = self._worker.gradients(self._names)
        _write(arrays, tree)
        return arrays

    def _sent(self, arrays: FlatArrays) -> Tree:
        self.weights = restored(self._like, self._pipeline.push_pull(arrays))
        return self.weights

    def close(self, wait: bool = True) -> Tree:
        """Wait for all updates under way; return the weights after them."""
        self.weights = restored(self._like, self._pipeline.close(wait))
        return self.weights


def _leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    parts = _parts(tree)
    if parts is not None:
        for name, part in parts:
            yield from _leaves(part, f"{path}/{name}")
    elif not _is_empty(tree):
        yield path[1:] or ONLY, tree


def _is_empty(leaf: Any) -> bool:
    return 0 in tuple(getattr(leaf, "shape", ()))


def _parts(tree: Tree) -> list[tuple[str, Tree]] | None:
    """Return the names and parts of a tree; None: it is a leaf."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [(str(name), part) for name, part in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, list | tuple):
        return [(str(number), part) for number, part in enumerate(tree)]
    if is_dataclass(tree) and not isinstance(tree, type):
        # JAX (`static`) and Flax (`pytree_node`) mark fields that are no trees.
        marks = [(field.name, field.metadata) for field in fields(tree)]
        names = [n for n, m in marks if m.get("pytree_node", True) and not m.get("static", False)]
        return [(name, getattr(tree, name)) for name in names]
    return None


def _built(like: Tree, arrays: Arrays, path: str) -> Tree:
    if like is None:
        return None
    parts = _parts(like)
    if parts is None:
        return like if _is_empty(like) else _restored(path[1:] or ONLY, like, arrays)
    built = [_built(part, arrays, f"{path}/{name}") for name, part in parts]
    try:
        if isinstance(like, Mapping):
            made = dict(zip(like, built, strict=True))
            if isinstance(like, defaultdict):
                return defaultdict(like.default_factory, made)
            return made if type(like) is dict else type(like)(made)  # type: ignore[call-arg]
        if isinstance(like, tuple) and hasattr(like, "_fields"):
            return type(like)(*built)
        if isinstance(like, list | tuple):
            return type(like)(built)
        return replace(like, **{name: part for (name, _), part in zip(parts, built, strict=True)})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path[1:] or 'it'!r} of the tree is {type(like).__name__}, which cannot be rebuilt "
            f"({error}); expected dicts, lists, tuples, named tuples and dataclasses"
        ) from error


def _restored(path: str, like: Any, arrays: Arrays) -> np.ndarray:
    if path not in arrays:
        raise ConfigurationError(f"the tree has {path!r}, but no array has this path")
    leaf = plain(f"arrays[{path!r}]", np.asanyarray(arrays[path]))
    dtype = getattr(like, "dtype", None)
    if not isinstance(dtype, np.dtype):
        like = _array(path, like)
        dtype = like.dtype
    for each in (dtype, leaf.dtype):
        _require_floats(path, each, leaf.shape, ConfigurationError)
    if leaf.shape != tuple(like.shape):
        raise ConfigurationError(
            f"{path!r} has the shape {list(like.shape)} in the tree, {list(leaf.shape)} in the "
            "arrays"
        )
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _array(path: str, leaf: Any, refusal: type[DpsError] = ConfigurationError) -> np.ndarray:
    what, array, why = f"{path!r} of the tree", None, ""
    try:
        if hasattr(leaf, "__array__") or isinstance(leaf, float):
            array = plain(what, np.asanyarray(leaf), refusal)
        elif hasattr(leaf, "__dlpack__"):
            array = np.from_dlpack(leaf)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        why = f": {error}"
    if array is None:
        raise refusal(f"{what} is {type(leaf).__name__}, expected an array{why}")
    _require_floats(path, array.dtype, array.shape, refusal)
    return array


def _require_floats(
    path: str, dtype: np.dtype[Any], shape: tuple[int, ...], refusal: type[DpsError]
) -> None:
    if not is_floating(dtype):
        raise refusal(
            f"{path!r} of the tree is {dtype}{list(shape)}, expected floats; convert with astype, "
            "such as to float32"
        )


def _write(arrays: FlatArrays, gradients: Tree) -> None:
    leaves = dict(_leaves(gradients))
    for path in (*arrays, *leaves):
        if path not in leaves or path not in arrays:
            whose = "that of the parameter server" if path in arrays else "the one given"
            raise ShapeMismatch(f"only {whose} has {path!r}: expected trees of the same structure")
    for path, leaf in leaves.items():
        array = _array(path, leaf, ShapeMismatch)
        if array.shape != arrays[path].shape:
            raise ShapeMismatch(
                f"{path!r} of the tree is {list(array.shape)}, expected {list(arrays[path].shape)}"
            )
        arrays[path][...] = array
