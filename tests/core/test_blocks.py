"""Blocks: arrays come back from the shards as they were, and what does not fit is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dps.core.blocks import Layout, all_finite
from dps.errors import ConfigurationError
from tests.support.strategies import DTYPES, models

PARAMS = {
    "w": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b": np.arange(3, dtype=np.float64),
    "scale": np.array(2.0, np.float32),
}

shard_counts = st.integers(1, 5)
block_sizes = st.sampled_from([1, 8, 60, 1 << 10, 1 << 18])


def layout_of(params: dict[str, np.ndarray], shards: int, block_bytes: int) -> Layout:
    assume(sum(a.size for a in params.values()) >= shards)
    return Layout.of(params, shards, block_bytes)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@given(models(), shard_counts, block_sizes)
def test_arrays_come_back_from_the_shards_bit_by_bit(
    params: dict[str, np.ndarray], shards: int, block_bytes: int
) -> None:
    layout = layout_of(params, shards, block_bytes)
    parts = [layout.gather(shard, params) for shard in range(shards)]
    assert all(pieces == () for _, pieces in parts)
    back = layout.scatter({shard: buffer for shard, (buffer, _) in enumerate(parts)})
    assert back.keys() == params.keys()
    assert all(same_bits(back[name], params[name]) for name in params)


@given(models(), shard_counts, block_sizes, st.data())
def test_some_of_the_arrays_touch_their_own_pieces_only(
    params: dict[str, np.ndarray], shards: int, block_bytes: int, data: st.DataObject
) -> None:
    layout = layout_of(params, shards, block_bytes)
    names = data.draw(st.sets(st.sampled_from(sorted(params)), min_size=1))
    some = {name: params[name] for name in names}
    whole = [np.zeros(shard.nbytes, np.uint8) for shard in layout.shards]
    for shard in layout.shards_of(some):
        buffer, pieces = layout.gather(shard, some)
        at = 0
        for i in pieces or range(len(layout.shards[shard].pieces)):
            piece = layout.shards[shard].pieces[i]
            whole[shard][piece.offset : piece.end] = buffer[at : at + piece.block.nbytes]
            at += piece.block.nbytes
        assert at == buffer.nbytes > 0
    back = layout.scatter(dict(enumerate(whole)))
    for name in params:
        assert same_bits(back[name], some.get(name, np.zeros_like(params[name])))


@given(models(), shard_counts, block_sizes)
def test_blocks_cover_every_element_once_and_lie_aligned(
    params: dict[str, np.ndarray], shards: int, block_bytes: int
) -> None:
    layout = layout_of(params, shards, block_bytes)
    seen = {name: np.zeros(a.size, int) for name, a in params.items()}
    for shard in layout.shards:
        end = 0
        for piece in shard.pieces:
            itemsize = params[piece.block.name].itemsize
            seen[piece.block.name][piece.block.start : piece.block.stop] += 1
            assert piece.block.nbytes <= max(block_bytes, itemsize)
            assert piece.offset == end
            assert piece.offset % itemsize == 0
            end = piece.end
        assert end == shard.nbytes
    assert all((count == 1).all() for count in seen.values())


def test_weights_that_were_read_cannot_be_written_to() -> None:
    layout = Layout.of(PARAMS, 1)
    buffer = layout.gather(0, PARAMS)[0]
    for array in layout.scatter({0: buffer}).values():
        assert not array.flags.writeable
    assert buffer.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0)[::2], np.arange(3.0)[::-1], np.broadcast_to(1.0, 3), np.ones((3, 2))[:, 1]],
)
def test_an_array_with_steps_is_gathered_where_it_is_all_that_there_is(array: np.ndarray) -> None:
    buffer, _ = Layout.of({"w": array}, 1, block_bytes=80).gather(0, {"w": array})
    assert same_bits(buffer.view(np.float64), array.copy())


@pytest.mark.parametrize(
    ("params", "shards", "message"),
    [
        ({}, 1, "params is empty"),
        (PARAMS, 0, "shards=0, expected 1 or more whole shards"),
        (PARAMS, "2", "shards='2', expected 1 or more"),
        ({"n": np.arange(3)}, 1, r"params\['n'\] is int64, expected float32 or float64"),
        ({"e": np.zeros((0, 3))}, 1, r"params\['e'\] is empty, \[0, 3\], and .*create it"),
        ({"m": np.ma.masked_array([1.0], [True])}, 1, r"params\['m'\] is a masked array"),
        ({1: np.zeros(3), "b": np.zeros(1)}, 1, "an array under the name 1, expected a text"),
        ({"w": np.zeros(3)}, 4, "shards=4, but the parameters have only 3 elements"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused(
    params: dict[str, np.ndarray], shards: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Layout.of(params, shards)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_whose_squares_overflow_are_finite(dtype: str) -> None:
    array = np.full(1000, np.finfo(dtype).max, dtype)
    assert all_finite(array)
    array[500] = np.inf
    assert not all_finite(array)


@given(models(), shard_counts, block_sizes)
def test_no_row_is_cut_where_rows_are_to_stay_whole(
    params: dict[str, np.ndarray], shards: int, block_bytes: int
) -> None:
    assume(sum(p.shape[0] if p.ndim > 1 else p.size for p in params.values()) >= shards)
    layout = Layout.of(params, shards, block_bytes, whole_rows=True)
    for shard in layout.shards:
        assert shard.pieces
        for block in (piece.block for piece in shard.pieces):
            shape = params[block.name].shape
            row = shape[1] if len(shape) > 1 else 1
            assert block.row == row
            assert (block.start % row, block.stop % row) == (0, 0)
            assert block.nbytes <= max(block_bytes, row * np.dtype(block.dtype).itemsize)
    back = layout.scatter({s: layout.gather(s, params)[0] for s in range(shards)})
    assert all(same_bits(back[name], params[name]) for name in params)


def test_more_shards_than_whole_rows_are_refused() -> None:
    params = {"w": np.zeros((2, 50))}
    assert len(Layout.of(params, 3).shards) == 3
    with pytest.raises(ConfigurationError, match=r"shards=3, but .* only 2 rows, which the opti"):
        Layout.of(params, 3, whole_rows=True)


@pytest.mark.parametrize(
    ("params", "shards"),
    [
        (
            {
                "w": np.zeros((2, 784)),
                "b": np.zeros(2),
                "w2": np.zeros((10, 2)),
                "b2": np.zeros(10),
            },
            8,
        ),
        ({"w": np.zeros((2, 1000)), "b": np.zeros(10)}, 12),
    ],
)
def test_every_shard_gets_some_row_while_there_are_enough(
    params: dict[str, np.ndarray], shards: int
) -> None:
    layout = Layout.of(params, shards, whole_rows=True)
    assert all(shard.pieces for shard in layout.shards)
