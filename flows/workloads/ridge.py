"""What convex workloads share: a weight and a bias, from zeros, with a penalty on the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dps.errors import ConfigurationError
from flows.workloads.base import Arrays, DatasetShape, check_dtype


@dataclass(frozen=True, slots=True)
class Ridge:
    """A model of one weight and one bias, whose squared weights are penalised.

    Parameters
    ----------
    shape
        Of the data.
    l2
        The loss has l2/2 times the sum of squared weights (not of the bias) added to it.
    dtype
        Of the parameters and of all arithmetic: float32 or float64.
    """

    name: ClassVar[str]
    parameters: ClassVar[tuple[str, ...]]  # the name of the weight, then that of the bias
    shape: DatasetShape
    l2: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 <= self.l2 < float("inf"):
            raise ConfigurationError(f"{self.name}: l2={self.l2}, expected 0 or more")
        check_dtype(self.name, self.dtype)

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the weight and of the bias."""
        raise NotImplementedError

    def initial(self, rng: np.random.Generator) -> Arrays:
        """Return zeros: the problem is convex, so there is no symmetry to break."""
        named = zip(self.parameters, self.sizes, strict=True)
        return {name: np.zeros(size, self.dtype) for name, size in named}

    def penalise(self, params: Arrays, gradients: Arrays) -> float:
        """Add the gradient of the penalty to that of the weight, in place; return the penalty."""
        weight = self.parameters[0]
        if self.l2:
            gradients[weight] += self.l2 * params[weight]
        return self.penalty(params)

    def penalty(self, params: Arrays) -> float:
        """Return what the penalty adds to the loss."""
        weight = params[self.parameters[0]].reshape(-1)
        return self.l2 / 2 * float(weight @ weight) if self.l2 else 0.0
