"""A data set of another maker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flows.workloads import Array, Dataset, DatasetShape, Part


@dataclass(frozen=True)
class Clouds:
    """Points around a centre for each class, drawn from a seed."""

    examples: int = 600
    features: int = 8
    classes: int = 3
    seed: int = 0

    @property
    def shape(self) -> DatasetShape:
        """The shape of the points."""
        return DatasetShape(self.features, self.classes)

    def load(self, part: Part = "both") -> Dataset:
        """Draw the points; one in three is for tests."""
        rng = np.random.default_rng(self.seed)
        y = rng.integers(0, self.classes, self.examples)
        centres = rng.normal(size=(self.classes, self.features))
        x = (centres[y] + 0.7 * rng.normal(size=(self.examples, self.features))).astype(np.float32)
        test = np.arange(self.examples) % 3 == 0
        train_rows = ~test if part != "test" else np.zeros_like(test)
        test_rows = test if part != "train" else np.zeros_like(test)
        return Dataset("clouds", *_rows(x, y, train_rows), *_rows(x, y, test_rows), self.classes)


def _rows(x: Array, y: Array, rows: Array) -> tuple[Array, Array]:
    return x[rows], y[rows]
