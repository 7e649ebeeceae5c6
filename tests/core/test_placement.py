"""Placement: shards are balanced, and where a block goes depends on the model alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dps.core.blocks import Layout
from dps.core.placement import place
from tests.support.strategies import models

weights = st.dictionaries(st.text(max_size=4), st.integers(1, 1000), min_size=1, max_size=60)


@given(models(largest=30), st.integers(1, 12), st.sampled_from([1, 6, 8, 100, 1 << 18]))
def test_every_shard_is_within_a_tenth_of_the_mean(
    params: dict[str, np.ndarray], shards: int, block_bytes: int
) -> None:
    assume(sum(a.size for a in params.values()) >= shards)
    layout = Layout.of(params, shards, block_bytes)
    assume(sum(len(shard.pieces) for shard in layout.shards) >= 10 * shards)
    mean = sum(a.nbytes for a in params.values()) / shards
    assert all(0.9 * mean <= shard.nbytes <= 1.1 * mean for shard in layout.shards)


def test_one_large_array_among_small_ones_is_spread_over_all_shards() -> None:
    params = {"embedding": np.zeros((784, 256)), "b1": np.zeros(256), "b2": np.zeros(10)}
    layout = Layout.of(params, 4)
    assert layout.shards_of(["embedding"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("shards", [1, 7])
def test_every_shard_gets_something_while_there_are_blocks_enough(shards: int) -> None:
    layout = Layout.of({"w": np.zeros(shards)}, shards)
    assert [shard.nbytes for shard in layout.shards] == [8] * shards


@given(weights, st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_order_of_the_blocks_does_not_matter(
    blocks: dict[str, int], shards: int, random: object
) -> None:
    shuffled = list(blocks.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    homes = place(blocks, shards)
    assert place(dict(shuffled), shards) == homes
    assert homes.keys() == blocks.keys()
    assert set(homes.values()) <= set(range(shards))


def test_every_process_places_alike() -> None:
    blocks = {f"w[{i}]": 10 + i % 3 for i in range(40)}
    program = (
        "import json; from dps.core.placement import place;"
        "print(json.dumps(place({f'w[{i}]': 10 + i % 3 for i in range(40)}, 3)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    )
    assert json.loads(other.stdout) == place(blocks, 3)


@pytest.mark.parametrize(("shards", "blocks"), [(3, 400), (8, 100)])
def test_one_more_shard_moves_at_most_twice_its_share(shards: int, blocks: int) -> None:
    equal = {f"w[{i}]": 1000 for i in range(blocks)}
    before, after = place(equal, shards), place(equal, shards + 1)
    moved = sum(before[key] != after[key] for key in equal)
    assert 0 < moved <= 2 * blocks / (shards + 1)
