"""Which units go into a partial checkpoint: what changed most, and none too seldom."""

from __future__ import annotations

import numpy as np
import pytest

from dps.protocol.storage.part_choice import NEVER, choose, parts_until_all

EQUAL = np.full(8, 100)


def test_what_was_never_saved_is_written_whatever_the_share() -> None:
    saved_in = np.array([NEVER] * 7 + [3])
    assert choose(EQUAL, saved_in, np.zeros(8), 0.01).tolist() == list(range(8))


def test_half_is_the_oldest_and_half_what_changed_most() -> None:
    saved_in = np.array([5, 4, 3, 2, 1, 6, 7, 8])
    distances = np.array([0.1, 9.0, 0.2, 0.3, 0.1, 8.0, 0.0, 0.4])
    assert choose(EQUAL, saved_in, distances, 0.5).tolist() == [1, 3, 4, 5]


def test_what_has_not_changed_is_not_written_for_its_distance() -> None:
    assert choose(EQUAL, np.arange(8), np.zeros(8), 0.5).tolist() == [0, 1]


def test_of_units_of_different_sizes_those_come_first_whose_bytes_tell_most() -> None:
    nbytes = np.array([100, 1000, 100, 100])
    distances = np.array([0.0, 5.0, 0.0, 1.0])
    chosen = choose(nbytes, np.array([0, 1, 2, 3]), distances, 0.1)
    assert chosen.tolist() == [0, 3], "the oldest, and what changed most for each byte"


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.25, 0.1, 0.03])
@pytest.mark.parametrize("seed", range(4))
def test_no_unit_is_left_out_for_longer_than_it_takes_to_write_all_twice(
    share: float, seed: int
) -> None:
    """Also one that never changes, beside others that always change more."""
    random = np.random.default_rng(seed)
    nbytes = random.integers(1, 1000, 40)
    favourites = random.permutation(40)[:10]
    saved_in = np.zeros(40, int)
    for number in range(1, 6 * parts_until_all(share)):
        distances = random.random(40)
        distances[favourites] += 100
        saved_in[choose(nbytes, saved_in, distances, share)] = number
        assert number - saved_in.min() < parts_until_all(share)


def test_a_part_is_no_larger_than_its_share_and_two_units() -> None:
    random = np.random.default_rng(1)
    nbytes = random.integers(1, 100, 200)
    chosen = choose(nbytes, random.integers(0, 9, 200), random.random(200), 0.2)
    assert 0.2 * nbytes.sum() <= nbytes[chosen].sum() <= 0.2 * nbytes.sum() + 2 * 100
