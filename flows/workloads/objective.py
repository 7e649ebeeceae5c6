"""The objective of a training problem, and how far a point is from being stationary.

F(w) = f(w) + h(w): f is the mean loss over all training data, h the penalty of the update rule, if
it has one. Both figures are of all data, as no worker ever sees them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dps.core.rules.proximal import Penalty
from flows.workloads.base import Array, Arrays, Workload

ROWS = 4096  # differentiated at once: memory does not depend on the number of examples


@dataclass(frozen=True, slots=True)
class Objective:
    """The function that is minimised.

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

        The mapping is (w − prox(w − η·∇f(w))) / η, with the proximal operator of η·h. It is 0 if
        and only if w is stationary, also where h has a kink; without a penalty it is ∇f(w).
        Neither is finite where the loss is not.
        """
        loss = 0.0
        gradients = {name: np.zeros(array.shape) for name, array in params.items()}
        for start in range(0, len(y), ROWS):
            part = slice(start, start + ROWS)
            share = len(y[part]) / len(y)
            mean, of_part = self.workload.gradient(params, x[part], y[part])
            loss += mean * share
            for name, gradient in of_part.items():
                gradients[name] += gradient.astype(np.float64) * share
        squares = 0.0
        for name, gradient in gradients.items():
            values = params[name].astype(np.float64)
            moved = values - self.step * gradient
            if self.penalty is not None:  # by rows, each of which may be a group
                loss += self.penalty.value(values.reshape(len(values), -1))
                self.penalty.shrink(moved.reshape(len(moved), -1), self.step)
            squares += float(np.sum(((values - moved) / self.step) ** 2))
        return loss, math.sqrt(squares)
