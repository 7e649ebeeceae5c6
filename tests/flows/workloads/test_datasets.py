"""Digits, batches, and what every data set has in common."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.workloads import Array, Dataset, Digits, batches

DIGITS_DIGEST = "805b7f3e30710e33976e20de9312d6bd2b63806f21292cd3ed73360e824daa9f"


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Digits().load()


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


def test_the_split_is_the_same_everywhere(digits: Dataset) -> None:
    assert digits.digest == DIGITS_DIGEST


# -- batches -----------------------------------------------------------------------------------


def test_every_epoch_draws_each_example_once_in_an_order_of_the_seed() -> None:
    epochs = list(islice(batches(np.random.default_rng(7), 64, 64), 3))
    assert all(sorted(epoch.tolist()) == list(range(64)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    again = next(batches(np.random.default_rng(7), 64, 64))
    np.testing.assert_array_equal(epochs[0], again)


@pytest.mark.parametrize("size", [0, -1, 101])
def test_a_batch_that_cannot_be_filled_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"batch_size={size}, expected 1 to 100"):
        next(batches(np.random.default_rng(0), 100, size))
