"""What every data set must do: fit its shape, and be the same wherever and in part it is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed.protocol import deserialize, serialize


class DatasetContract:
    """The contract of data sets (`flows.workloads.DatasetSource`).

    Override the fixture `dataset`; with `params`, for several of them.
    """

    @pytest.fixture
    def dataset(self) -> Any:
        """The data set that is tested."""
        raise NotImplementedError("override the fixture `dataset` to return the one to be tested")

    def test_the_shape_is_known_before_the_data_are_loaded(self, dataset: Any) -> None:
        assert dataset.shape == dataset.load("both").shape

    def test_examples_are_finite_rows_of_float32(self, dataset: Any) -> None:
        whole = dataset.load("both")
        for x in (whole.x_train, whole.x_test):
            assert x.dtype == np.float32
            assert x.shape == (len(x), dataset.shape.features)
            assert len(x)
            assert np.isfinite(x).all()

    def test_each_example_has_a_class_from_0(self, dataset: Any) -> None:
        whole = dataset.load("both")
        for x, y in ((whole.x_train, whole.y_train), (whole.x_test, whole.y_test)):
            assert y.dtype == np.int64
            assert y.shape == (len(x),)
            assert y.min() >= 0
            assert y.max() < dataset.shape.classes

    def test_a_part_is_what_it_is_in_the_whole(self, dataset: Any) -> None:
        whole, train, test = (dataset.load(part) for part in ("both", "train", "test"))
        np.testing.assert_array_equal(train.x_train, whole.x_train)
        np.testing.assert_array_equal(train.y_train, whole.y_train)
        np.testing.assert_array_equal(test.x_test, whole.x_test)
        np.testing.assert_array_equal(test.y_test, whole.y_test)
        assert len(train.x_test) == len(train.y_test) == 0
        assert len(test.x_train) == len(test.y_train) == 0
        assert train.shape == test.shape == whole.shape

    def test_what_is_loaded_again_is_the_same(self, dataset: Any) -> None:
        assert dataset.load("both").digest == dataset.load("both").digest

    def test_a_data_set_travels_to_other_processes_and_is_the_same_there(
        self, dataset: Any
    ) -> None:
        there = deserialize(*serialize(dataset))
        assert there == dataset
        assert hash(there) == hash(dataset)
        assert there.load("test").digest == dataset.load("test").digest
