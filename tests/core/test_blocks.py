"""Blocks: arrays come back from the shards as they were, and what does not fit is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dps.core.blocks import Layout, all_finite
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch
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
            assert shard.name_at(piece.offset) == piece.block.name
            assert shard.name_at(piece.end - 1) == piece.block.name
            end = piece.end
        assert end == shard.nbytes
    assert all((count == 1).all() for count in seen.values())


def test_an_array_appears_only_when_all_of_its_shards_have_been_read() -> None:
    layout = Layout.of(PARAMS, 2)
    buffers = {shard: layout.gather(shard, PARAMS)[0] for shard in range(2)}
    for shard in range(2):
        expected = {name for name in PARAMS if layout.shards_of([name]) == [shard]}
        assert layout.scatter({shard: buffers[shard]}).keys() == expected
    assert layout.scatter({}) == {}


def test_weights_that_were_read_cannot_be_written_to() -> None:
    layout = Layout.of(PARAMS, 1)
    buffer = layout.gather(0, PARAMS)[0]
    for array in layout.scatter({0: buffer}).values():
        assert not array.flags.writeable
    assert buffer.flags.writeable


class CountsFlattening(np.ndarray):
    """An array that counts how often it is flattened, which copies it if it is not contiguous."""

    times = 0

    def reshape(self, *shape: int) -> np.ndarray:
        type(self).times += 1
        return np.asarray(self).reshape(*shape)


def test_an_array_that_is_not_contiguous_is_gathered_the_same_and_flattened_once() -> None:
    params = {"w": np.arange(2000.0).reshape(40, 50), "b": np.arange(30.0)}
    layout = Layout.of(params, 1)
    strided = np.asfortranarray(params["w"]).view(CountsFlattening)
    assert not strided.flags.c_contiguous
    buffer, _ = layout.gather(0, params | {"w": strided})
    assert same_bits(buffer, layout.gather(0, params)[0])
    assert len(layout.shards[0].pieces) > 5
    assert CountsFlattening.times == 1


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0)[::2], np.arange(3.0)[::-1], np.broadcast_to(1.0, 3), np.ones((3, 2))[:, 1]],
)
def test_an_array_with_steps_is_gathered_where_it_is_all_that_there_is(array: np.ndarray) -> None:
    buffer, _ = Layout.of({"w": array}, 1, block_bytes=80).gather(0, {"w": array})
    assert same_bits(buffer.view(np.float64), array.copy())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), np.float32), r"'w' is float32\[3, 4\], expected float32\[4, 3\]"),
        (np.zeros((4, 3), np.float64), r"'w' is float64\[4, 3\], expected float32\[4, 3\]"),
        (np.zeros(12, np.float32), r"'w' is float32\[12\], expected float32\[4, 3\]"),
    ],
)
def test_an_array_that_does_not_fit_is_shown_beside_what_was_expected(
    array: np.ndarray, message: str
) -> None:
    with pytest.raises(ShapeMismatch, match=message):
        Layout.of(PARAMS, 1).check({"w": array})


def test_an_unknown_name_is_shown_with_the_names_there_are() -> None:
    with pytest.raises(ShapeMismatch, match="no parameter is named 'v'; there are: w, b, scale"):
        Layout.of(PARAMS, 1).check({"v": PARAMS["w"]})


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", PARAMS)
def test_a_gradient_that_is_not_finite_is_refused_by_name(name: str, wrong: float) -> None:
    gradients = {n: a.copy() for n, a in PARAMS.items()}
    gradients[name].reshape(-1)[-1] = wrong
    layout = Layout.of(PARAMS, 2)
    with pytest.raises(NonFiniteGradient, match=f"array '{name}' holds NaN or infinity; nothing"):
        layout.check(gradients)
    layout.check(gradients, values=False)
    layout.check(PARAMS)


@pytest.mark.parametrize(
    ("params", "shards", "message"),
    [
        ({}, 1, "params is empty"),
        (PARAMS, 0, "shards=0, expected 1 or more whole shards"),
        (PARAMS, 2.0, "shards=2.0, expected 1 or more whole shards"),
        (PARAMS, "2", "shards='2', expected 1 or more"),
        (PARAMS, True, "shards=True, expected 1 or more"),
        ({"n": np.arange(3)}, 1, r"params\['n'\] is int64, expected float32 or float64"),
        ({"h": np.zeros(3, np.float16)}, 1, r"params\['h'\] is float16"),
        ({"e": np.zeros((0, 3))}, 1, r"params\['e'\] is empty, \[0, 3\]: .*Leave it out"),
        ({"m": np.ma.masked_array([1.0], [True])}, 1, r"params\['m'\] is a masked array"),
        ({"c": np.zeros(3, np.complex128)}, 1, r"params\['c'\] is complex128"),
        ({"o": np.array([None])}, 1, r"params\['o'\] is object"),
        ({1: np.zeros(3), "b": np.zeros(1)}, 1, "an array under the name 1, expected a text"),
        ({"\udc80": np.zeros(3)}, 1, r"an array under the name '\\udc80', expected a text"),
        ({"": np.zeros(3)}, 1, "an array under the name '', expected a text"),
        ({"w": np.zeros(3)}, 4, "shards=4, but the parameters have only 3 elements"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused(
    params: dict[str, np.ndarray], shards: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Layout.of(params, shards)


@given(
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_side=0, max_side=6))
    )
)
def test_all_finite_agrees_with_looking_at_every_element(array: np.ndarray) -> None:
    assert all_finite(array) == np.isfinite(array).all()
    assert all_finite(array.T) == np.isfinite(array).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_whose_squares_overflow_are_finite(dtype: str) -> None:
    array = np.full(1000, np.finfo(dtype).max, dtype)
    assert all_finite(array)
    array[500] = np.inf
    assert not all_finite(array)


# -- whole rows ----------------------------------------------------------------------------------


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


def test_rows_are_all_that_has_the_same_first_index() -> None:
    params = {
        "kernel": np.zeros((4, 3, 2), np.float32),
        "bias": np.zeros(4, np.float32),
        "scale": np.array(1.0, np.float32),
    }
    layout = Layout.of(params, 1, whole_rows=True)
    assert {s.name: s.row for s in layout.arrays} == {"kernel": 6, "bias": 1, "scale": 1}


def test_rows_may_be_cut_unless_they_are_to_stay_whole() -> None:
    pieces = Layout.of(PARAMS, 2).shards[0].pieces
    assert {piece.block.row for piece in pieces} == {0}


def test_more_shards_than_whole_rows_are_refused() -> None:
    params = {"w": np.zeros((2, 50))}
    assert len(Layout.of(params, 3).shards) == 3
    with pytest.raises(ConfigurationError, match=r"shards=3, but .* only 2 rows, which the opti"):
        Layout.of(params, 3, whole_rows=True)


@pytest.mark.parametrize(
    ("params", "shards"),
    [
        ({"w": np.zeros((2, 100_000)), "bias": np.zeros(2), "v": np.zeros((2, 16))}, 4),
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
