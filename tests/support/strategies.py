"""Hypothesis strategies that several test modules draw from: arrays, and any typed record."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from hypothesis import strategies as st

from dps.core.leases import Division
from dps.protocol.wire import MARK

TEXT = st.text(max_size=5).filter(lambda text: text != MARK)
WHOLE = st.integers(-(2**63), 2**63 - 1)
DTYPES = ("float32", "float64")

json_values = st.recursive(
    st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Small arrays of float32, float64 or bytes, of up to three dimensions."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    numbers = np.arange(np.prod(shape, dtype=int)) + draw(st.integers(0, 9))
    return numbers.reshape(shape).astype(draw(st.sampled_from((*DTYPES, "uint8"))))


@st.composite
def models(draw: st.DrawFn, largest: int = 12) -> dict[str, np.ndarray]:
    """Named parameter arrays of mixed dtype, each of up to `largest`² elements, all different."""
    model = {}
    for i in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, largest), min_size=1, max_size=2))
        numbers = np.arange(np.prod(shape)) + 1e4 * i
        # Not in the order of the alphabet, in which nothing is laid out.
        model[f"array{9 - i}"] = numbers.reshape(shape).astype(draw(st.sampled_from(DTYPES)))
    return model


def records(cls: type) -> st.SearchStrategy[Any]:
    """Instances of a dataclass or named tuple, each field drawn by its annotation."""
    return st.builds(cls, *(_annotated(hint) for hint in _field_hints(cls)))


def _field_hints(cls: type) -> list[Any]:
    hints = get_type_hints(cls)
    names = getattr(cls, "_fields", None) or [field.name for field in fields(cls)]
    return [hints[name] for name in names]


def _annotated(hint: Any) -> st.SearchStrategy[Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(_annotated(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_annotated, args))
    if origin is dict:
        return st.dictionaries(_annotated(args[0]), _annotated(args[1]), max_size=2)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(_annotated, args))
    if hint not in _PLAIN and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return records(hint)
    return _PLAIN[hint]


_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    Any: json_values,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    int: WHOLE,
    Division: st.builds(
        Division,
        st.integers(1, 9),
        st.integers(1, 9),
        shuffle=st.none(),
        partitions=st.lists(st.integers(0, 9)).map(tuple),
    ),
    str: TEXT,
    bytes: st.binary(),
    type(None): st.none(),
    np.ndarray: arrays(),
}
