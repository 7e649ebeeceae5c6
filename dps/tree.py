"""Trees of arrays on a parameter server: nested dicts, lists and tuples, as JAX's users have them.

A worker attaches with a tree of the weights' structure, computes gradients as such a tree, and
calls `step` with it. Whatever gives its values as an array is one: of numpy, JAX, or by DLPack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dps.cluster.node.closing import Closing
from dps.cluster.node.pipeline import Pipeline
from dps.cluster.node.worker import Worker
from dps.core.blocks import Arrays
from dps.core.consistency import check_ahead
from dps.core.flat import FlatArrays
from dps.core.ranges import argument_above_zero
from dps.errors import ConfigurationError, ShapeMismatch

Tree = Any  # an array, or a dict, list, tuple or named tuple of trees; None is a tree of nothing

_EPS = 1e-6  # what the norm has added where gradients are clipped, as in torch


def parameters(tree: Tree) -> dict[str, np.ndarray]:
    """Return what a parameter server of a tree starts from.

    Returns
    -------
    arrays
        Of all leaves, by their paths, such as "layers/0/w": float64 as they are, all others
        float32. They are copies.

    Raises
    ------
    ConfigurationError
        A leaf is no array, or not of floats, or two have the same path.
    """
    found: dict[str, np.ndarray] = {}
    for path, leaf in _leaves(tree):
        if path in found:
            raise ConfigurationError(f"two arrays of the tree have the path {path!r}")
        array = _array(path, leaf)
        _require_floats(path, array.dtype, array.shape)
        found[path] = np.array(array, _dtype(array), order="C")
    return found


def restored(like: Tree, arrays: Arrays) -> Tree:
    """Return a tree of this structure with arrays such as `ParameterServer.pull` returns.

    Arrays have the dtype of the leaf whose place they take, and are views of those given where they
    have it already.

    Raises
    ------
    ConfigurationError
        A leaf is not of floats.
    """
    return _built(like, arrays, "")


def attach(
    worker: Worker, like: Tree, *, ahead: int = 0, clip_norm: float | None = None
) -> Replica:
    """Take part in the training of a tree of weights.

    Parameters
    ----------
    worker
        What a training function is given.
    like
        A tree of the structure, shapes and dtypes that the weights are to have; the server has
        started from its `parameters`.
    ahead
        How many of its own last updates the weights may lack on which it computes; see
        `dps.Pipeline`.
    clip_norm
        What the norm of all gradients together is clipped to.

    Raises
    ------
    ConfigurationError
        The parameter server has other parameters, the consistency model does not allow `ahead`, or
        `clip_norm` is no number above 0.
    """
    return Replica(worker, like, ahead, clip_norm)


class Replica(Closing):
    """A tree whose weights are a parameter server's; made by `attach`. Not thread-safe.

    Used in a `with` statement, it is closed at the end.

    Attributes
    ----------
    weights
        The tree to compute the next gradients on; its arrays of numpy are read-only.
    """

    def __init__(self, worker: Worker, like: Tree, ahead: int, clip_norm: float | None) -> None:
        check_ahead(worker.consistency, ahead)
        if clip_norm is not None:
            argument_above_zero("clip_norm", clip_norm)
        self._names = tuple(path for path, _ in _leaves(like))
        _check(worker, parameters(like))
        self._worker = worker
        self._like = like
        self._clip_norm = clip_norm
        self._pipeline = Pipeline(worker, ahead)
        self.weights: Tree = restored(like, self._pipeline.weights)

    def step(self, gradients: Tree) -> Tree:
        """Send gradients, and return the weights to compute the next on.

        Waits for the server while more than `ahead` updates are under way. The gradients may be
        changed as soon as it has returned. Errors are those of `dps.Worker.push`.

        Raises
        ------
        ShapeMismatch
            They have another structure, or other shapes, than the weights.
        GroupClosed
            After `close`; nothing was sent.
        """
        self._pipeline.require_open()
        arrays = self._worker.gradients(self._names)
        _write(arrays, gradients)
        if self._clip_norm is not None:
            _clip(arrays, self._clip_norm)
        self.weights = restored(self._like, self._pipeline.push_pull(arrays))
        return self.weights

    def close(self) -> Tree:
        """Take no more gradients; return the weights after all that is under way."""
        self.weights = restored(self._like, self._pipeline.close())
        return self.weights

    def abandon(self) -> None:
        """Send nothing more, and wait for nothing."""
        self._pipeline.abandon()


def _leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    if tree is None:
        return
    parts = _parts(tree)
    if parts is None:
        yield path, tree
        return
    for name, part in parts.items():
        yield from _leaves(part, f"{path}/{name}" if path else name)


def _parts(tree: Tree) -> dict[str, Tree] | None:
    """What a tree consists of, by the names of the parts; None: it is a leaf."""
    if isinstance(tree, Mapping):
        return {str(name): part for name, part in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, list | tuple):
        return {str(number): part for number, part in enumerate(tree)}
    return None


def _built(like: Tree, arrays: Arrays, path: str) -> Tree:
    if like is None:
        return None
    parts = _parts(like)
    if parts is None:
        found, dtype = arrays[path], np.dtype(getattr(like, "dtype", np.float64))
        _require_floats(path, dtype, found.shape)
        return found if found.dtype == dtype else found.astype(dtype)
    built = [
        _built(part, arrays, f"{path}/{name}" if path else name) for name, part in parts.items()
    ]
    if isinstance(like, Mapping):
        return dict(zip(like, built, strict=True))
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*built)
    return type(like)(built)


def _array(path: str, leaf: Any) -> np.ndarray:
    if hasattr(leaf, "__array__") or isinstance(leaf, float):
        array: np.ndarray = np.asarray(leaf)
    elif hasattr(leaf, "__dlpack__"):
        array = np.from_dlpack(leaf)
    else:
        raise ConfigurationError(
            f"{path!r} of the tree is {type(leaf).__name__}, expected an array"
        )
    return array


def _require_floats(path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Refuse what weights could not be restored as: they would be truncated."""
    if "float" not in dtype.name:  # by name, as bfloat16 and its like are no kind of numpy's
        raise ConfigurationError(
            f"{path!r} of the tree is {dtype}{list(shape)}, expected floats; convert with astype, "
            "such as to float32"
        )


def _dtype(array: np.ndarray) -> str:
    return "float64" if array.dtype == np.float64 else "float32"


def _write(arrays: FlatArrays, gradients: Tree) -> None:
    found = dict(_leaves(gradients))
    for path in (*arrays, *found):
        if path not in found or path not in arrays:
            whose = "the weights have" if path in arrays else "the gradients have"
            raise ShapeMismatch(f"only {whose} {path!r}: expected gradients of the same structure")
    for path, leaf in found.items():
        array = _array(path, leaf)
        if array.shape != arrays[path].shape:
            raise ShapeMismatch(
                f"the gradient of {path!r} is {list(array.shape)}, expected "
                f"{list(arrays[path].shape)}"
            )
        arrays[path][...] = array


def _clip(arrays: FlatArrays, clip_norm: float) -> None:
    squares = (float(np.vdot(array, array)) for array in arrays.values())
    factor = clip_norm / (sum(squares) ** 0.5 + _EPS)
    if factor < 1:
        for array in arrays.values():
            array *= array.dtype.type(factor)


def _check(worker: Worker, wanted: Arrays) -> None:
    """Refuse a tree that the parameter server has no arrays for."""
    specs = worker.layout.names
    for path, array in wanted.items():
        spec = specs.get(path)
        mine = f"{array.dtype}{list(array.shape)}"
        found = "nothing of that path" if spec is None else f"{spec.dtype}{list(spec.shape)}"
        if found != mine:
            raise ConfigurationError(
                f"the tree has {path!r}, {mine}, and the parameter server {found}; start it from "
                "dps.tree.parameters(tree)"
            )
