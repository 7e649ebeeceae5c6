"""Flat arrays: they are gathered and scattered as the same arrays one by one, without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dps.core.blocks import FlatArrays, Layout
from dps.errors import ShapeMismatch

PARAMS = {
    "a": np.zeros((7, 5), np.float32),
    "b": np.zeros(33),
    "c": np.zeros((2, 3, 4), np.float32),
    "d": np.zeros(1),
}


def filled(layout: Layout, names: tuple[str, ...] = ()) -> FlatArrays:
    flat = layout.flat(names or None)
    arrays = flat.over(np.empty(flat.nbytes, np.uint8))
    random = np.random.default_rng(0)
    for array in arrays.values():
        array[:] = random.normal(size=array.shape)
    return arrays


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("names", [(), ("d", "a", "c")])
def test_they_are_gathered_as_the_same_arrays_one_by_one(
    shards: int, names: tuple[str, ...]
) -> None:
    layout = Layout.of(PARAMS, shards, block_bytes=48)
    arrays = filled(layout, names)
    assert set(arrays) == set(names or PARAMS)
    for shard in range(shards):
        buffer, pieces = layout.gather(shard, arrays)
        expected, expected_pieces = layout.gather(shard, dict(arrays))
        assert pieces == expected_pieces
        assert buffer.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("names", [(), ("a", "d")])
def test_weights_are_written_as_they_are_scattered(shards: int, names: tuple[str, ...]) -> None:
    layout = Layout.of(PARAMS, shards, block_bytes=48)
    whole = filled(layout)
    buffers = {shard: layout.gather(shard, dict(whole))[0] for shard in range(shards)}
    flat = layout.flat(names or None)
    out = flat.over(np.zeros(flat.nbytes, np.uint8))
    out.fill(buffers)
    for name in out:
        assert np.array_equal(out[name], whole[name])


def test_what_does_not_fit_is_refused() -> None:
    layout = Layout.of(PARAMS, 1)
    with pytest.raises(ShapeMismatch, match="'x'; there are: a, b, c, d"):
        layout.flat(["a", "x"])
    flat = layout.flat()
    with pytest.raises(ShapeMismatch, match=r"^names=3, expected a list"):
        layout.flat(3)  # type: ignore[arg-type]
    odd: list[Any] = [np.zeros(flat.nbytes), np.zeros(3, "u1"), None, bytes(flat.nbytes)]
    for buffer in odd:
        with pytest.raises(ShapeMismatch, match=rf"^buffer=.*expected .* uint8\[{flat.nbytes}\]"):
            flat.over(buffer)
    with pytest.raises(TypeError, match="item assignment"):
        filled(layout)["a"] = PARAMS["a"]  # type: ignore[index]
