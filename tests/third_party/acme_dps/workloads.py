"""A workload of another maker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flows.workloads import Array, Arrays, DatasetShape

CENTRES, SHIFT = "centres", "shift"


@dataclass(frozen=True)
class Centroids:
    """A classifier by the distance to a centre for each class, trained by cross-entropy.

    `offsets` are what the first classes begin with as an advantage over the others.
    """

    shape: DatasetShape
    sharpness: float = 1.0
    offsets: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """What reports call it."""
        return "centroids"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return CENTRES, SHIFT

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Draw small centres."""
        size = self.shape.classes, self.shape.features
        centres = 0.1 * rng.normal(size=size)
        shift = np.zeros(self.shape.classes, np.float32)
        shift[: len(self.offsets)] = self.offsets
        return {CENTRES: centres.astype(np.float32), SHIFT: shift}

    def gradient(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """Return the mean loss over a batch, and the gradients."""
        x = x.astype(np.float32, copy=False)
        delta = self._log_probabilities(params, x)
        loss = -float(delta[np.arange(len(y)), y].mean())
        delta = np.exp(delta)
        delta[np.arange(len(y)), y] -= 1
        delta *= np.float32(self.sharpness / len(y))
        centres = delta.T @ x - delta.sum(axis=0)[:, None] * params[CENTRES]
        return loss, {CENTRES: centres, SHIFT: delta.sum(axis=0)}

    def evaluate(self, params: Arrays, x: Array, y: Array) -> tuple[float, float]:
        """Return the mean loss and the accuracy."""
        if not len(y):
            raise ValueError("there are no examples")
        found = self._log_probabilities(params, x.astype(np.float32, copy=False))
        loss = -float(found[np.arange(len(y)), y].mean())
        return loss, float((found.argmax(axis=1) == y).mean())

    def _log_probabilities(self, params: Arrays, x: Array) -> Array:
        centres = params[CENTRES]
        scores = x @ centres.T - (centres * centres).sum(axis=1) / 2 + params[SHIFT]
        scores *= np.float32(self.sharpness)
        scores -= scores.max(axis=1, keepdims=True)
        found: Array = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return found
