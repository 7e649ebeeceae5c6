"""The objective of a training problem, and how far a point is from being stationary.

F(w) = f(w) + h(w): f is the mean loss over all training data, h the penalty that the update rule
takes care of, if it has one. Both figures are of all data, as no worker ever sees them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dps.core.rules.penalties import Penalty
from flows.workloads.base import Array, Arrays, Workload

ROWS = 4096  # differentiated at once: memory does not depend on how many there are


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised, and how near a point is to where that cannot go on.

    Parameters
    ----------
    workload
        Has the loss.
    penalty
        h; None: there is none.
    step
        η of the proximal step that stationarity is measured by, above 0.
    """

    workload: Workload
    penalty: Penalty | None = None
    step: float = 1.0

    def score(self, params: Arrays, x: Array, y: Array) -> tuple[float, float]:
        """Return the objective, and the norm of the proximal gradient mapping.

        The mapping is (w − prox(w − η·∇f(w))) / η, with the proximal operator of η·h. It is 0 where
        w is stationary and nowhere else, also where h has a kink; without a penalty it is ∇f(w).
        Neither is finite where the loss is not.
        """
        loss, gradients = self._loss(params, x, y)
        return loss + self._penalty(params), self._mapping(params, gradients)

    def _loss(self, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
        """The mean loss over all examples, and its gradient in float64."""
        loss = 0.0
        gradients = {name: np.zeros(array.shape) for name, array in params.items()}
        for start in range(0, len(y), ROWS):
            part = y[start : start + ROWS]
            mean, found = self.workload.gradient(params, x[start : start + ROWS], part)
            loss += mean * len(part) / len(y)
            for name, gradient in found.items():
                gradients[name] += gradient.astype(np.float64) * (len(part) / len(y))
        return loss, gradients

    def _penalty(self, params: Arrays) -> float:
        if self.penalty is None:
            return 0.0
        return sum(self.penalty.value(_rows(array.astype(np.float64))) for array in params.values())

    def _mapping(self, params: Arrays, gradients: Arrays) -> float:
        squares = 0.0
        for name, gradient in gradients.items():
            values = params[name].astype(np.float64)
            moved = values - self.step * gradient
            if self.penalty is not None:
                self.penalty.shrink(_rows(moved), self.step)
            squares += float(np.sum(((values - moved) / self.step) ** 2))
        return math.sqrt(squares)


def _rows(array: Array) -> Array:
    """A view of an array as rows, of which each is a group of a penalty by rows."""
    return array.reshape(len(array), -1)
