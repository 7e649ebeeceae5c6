"""Digits, batches, and what every data set has in common."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.workloads import (
    SHAPES,
    Array,
    Dataset,
    batches,
    ensure_dataset,
    find_dataset,
    load_dataset,
)
from flows.workloads import datasets as module

DIGITS_DIGEST = "805b7f3e30710e33976e20de9312d6bd2b63806f21292cd3ed73360e824daa9f"


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


def rows_of(*arrays: Array) -> Array:
    """Examples as rows, each with its class, in an order that does not depend on theirs."""
    table = np.concatenate(arrays)
    return table[np.lexsort(table.T)]


def test_digits_are_scikit_learns_scaled_to_one(digits: Dataset) -> None:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    train = np.column_stack([digits.x_train, digits.y_train])
    test = np.column_stack([digits.x_test, digits.y_test])
    np.testing.assert_array_equal(rows_of(train, test), rows_of(np.column_stack([x / 16, y])))
    assert (digits.x_train.min(), digits.x_train.max()) == (0, 1)


def test_digits_have_the_shapes_and_types_that_workloads_expect(digits: Dataset) -> None:
    assert digits.x_train.shape == (1437, 64)
    assert digits.x_test.shape == (360, 64)
    assert digits.x_train.dtype == digits.x_test.dtype == np.float32
    assert digits.y_train.dtype == digits.y_test.dtype == np.int64
    assert digits.shape == SHAPES["digits"]


def test_digits_are_split_by_class(digits: Dataset) -> None:
    of_test, of_train = np.bincount(digits.y_test), np.bincount(digits.y_train)
    share = len(digits.y_test) / (len(digits.y_test) + len(digits.y_train))
    assert np.abs(of_test - share * (of_test + of_train)).max() < 1


def test_the_split_is_the_same_everywhere(digits: Dataset) -> None:
    assert digits.digest == DIGITS_DIGEST


def test_digits_come_from_scikit_learn_itself_when_its_file_moves(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert load_dataset("digits").digest == digits.digest


@pytest.mark.slow
def test_loading_digits_does_not_import_scikit_learn() -> None:
    code = (
        "import sys; from flows.workloads import load_dataset; load_dataset('digits');"
        "sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_part_is_what_it_is_in_the_whole(digits: Dataset) -> None:
    train, test = load_dataset("digits", part="train"), load_dataset("digits", part="test")
    np.testing.assert_array_equal(train.x_train, digits.x_train)
    np.testing.assert_array_equal(train.y_train, digits.y_train)
    np.testing.assert_array_equal(test.x_test, digits.x_test)
    np.testing.assert_array_equal(test.y_test, digits.y_test)
    assert len(train.x_test) == len(train.y_test) == len(test.x_train) == len(test.y_train) == 0
    assert train.shape == test.shape == digits.shape


def test_the_digest_tells_contents_apart(digits: Dataset) -> None:
    y = digits.y_test.copy()
    y[0] = (y[0] + 1) % 10
    other = Dataset("digits", digits.x_train, digits.y_train, digits.x_test, y, 10)
    assert other.digest != digits.digest
    assert load_dataset("digits", part="train").digest != digits.digest


def test_digits_are_always_at_hand() -> None:
    assert find_dataset("digits") == ensure_dataset("digits") == "scikit-learn"


def test_an_unknown_data_set_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"'digit' is unknown; .*digits, fashion_mnist"):
        load_dataset("digit")


def test_digits_take_no_folder() -> None:
    with pytest.raises(ConfigurationError, match="leave out its folder"):
        load_dataset("digits", folder="/data")


def test_fewer_test_examples_are_the_first_ones(digits: Dataset) -> None:
    fewer = load_dataset("digits", test_examples=100)
    np.testing.assert_array_equal(fewer.x_test, digits.x_test[:100])
    np.testing.assert_array_equal(fewer.y_test, digits.y_test[:100])
    np.testing.assert_array_equal(fewer.x_train, digits.x_train)


# -- batches -----------------------------------------------------------------------------------


def draw(seed: int, n: int, size: int, count: int) -> list[Array]:
    return list(islice(batches(np.random.default_rng(seed), n, size), count))


def test_an_epoch_draws_no_example_twice_and_leaves_out_less_than_a_batch() -> None:
    epoch = np.concatenate(draw(0, n=100, size=32, count=3))
    assert len(set(epoch.tolist())) == 96
    assert set(epoch.tolist()) <= set(range(100))


def test_every_epoch_is_another_shuffle() -> None:
    drawn = draw(0, n=64, size=64, count=3)
    assert all(sorted(batch.tolist()) == list(range(64)) for batch in drawn)
    assert not np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[1], drawn[2])


def test_batches_repeat_from_their_seed() -> None:
    np.testing.assert_array_equal(draw(7, 50, 8, 20), draw(7, 50, 8, 20))
    assert not np.array_equal(draw(7, 50, 8, 1), draw(8, 50, 8, 1))


@pytest.mark.parametrize("size", [0, -1, 101])
def test_a_batch_that_cannot_be_filled_is_refused_at_once(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"batch_size={size}, expected 1 to 100"):
        batches(np.random.default_rng(0), 100, size)
