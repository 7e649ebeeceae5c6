"""Owns the server-side update rules: SGD, momentum and Adam.

A rule is a pure function of old arrays to new arrays. It never writes into what it is given: a
shard's state is replaced, not changed, so a snapshot is a reference and no reader sees half a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from dps.errors import ConfigurationError

Array = np.ndarray


class UpdateRule(Protocol):
    """How a gradient changes parameters.

    `slots` names the arrays of optimizer state that go with each parameter array.
    """

    @property
    def slots(self) -> tuple[str, ...]: ...

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the new values and the new optimizer state after one step.

        Parameters
        ----------
        values, gradient
            1-D arrays of equal length and dtype (float32 or float64).
        slots
            Optimizer state: for each name in `slots`, an array like `values`; zeros at first.
        t
            The number of this step, from 1.
        scale
            Factor on the learning rate, 1 but for replay policies that reduce it.
        out
            Where to put the new values; None: in a fresh array.
        """
        ...


@dataclass(frozen=True, slots=True)
class SGD:
    """Plain stochastic gradient descent: w ← w − η·g."""

    learning_rate: float
    slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _learning_rate(self)

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the new values; there is no optimizer state."""
        new = np.multiply(gradient, self.learning_rate * scale, out=out)
        np.subtract(values, new, out=new)
        return new, {}


@dataclass(frozen=True, slots=True)
class Momentum:
    """SGD with heavy-ball momentum, as in torch: m ← μ·m + g; w ← w − η·m."""

    learning_rate: float
    momentum: float = 0.9
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        _learning_rate(self)
        _fraction(self, "momentum")

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the new values and the new momentum."""
        momentum = np.multiply(slots["momentum"], self.momentum)
        momentum += gradient
        new = np.multiply(momentum, self.learning_rate * scale, out=out)
        np.subtract(values, new, out=new)
        return new, {"momentum": momentum}


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam with bias correction (Kingma and Ba 2015), as in torch with its default settings."""

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    slots: ClassVar[tuple[str, ...]] = ("mean", "square")

    def __post_init__(self) -> None:
        _learning_rate(self)
        _fraction(self, "beta1")
        _fraction(self, "beta2")
        _positive(self, "eps")

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the new values and the new running mean and mean square of the gradient."""
        scratch = np.multiply(gradient, 1 - self.beta1)
        mean = np.multiply(slots["mean"], self.beta1)
        mean += scratch
        np.multiply(gradient, gradient, out=scratch)
        scratch *= 1 - self.beta2
        square = np.multiply(slots["square"], self.beta2)
        square += scratch
        np.sqrt(square, out=scratch)
        scratch *= 1 / float(np.sqrt(1 - self.beta2**t))
        scratch += self.eps
        np.divide(mean, scratch, out=scratch)
        scratch *= self.learning_rate * scale / (1 - self.beta1**t)
        new = np.subtract(values, scratch, out=scratch if out is None else out)
        return new, {"mean": mean, "square": square}


def _learning_rate(rule: SGD | Momentum | Adam) -> None:
    # 0 learns nothing: what an experiment compares with to see that its verdicts can be trusted.
    _require(rule, "learning_rate", 0 <= rule.learning_rate < math.inf, "a number, 0 or above")


def _positive(rule: object, field: str) -> None:
    value = getattr(rule, field)
    _require(rule, field, 0 < value < math.inf, "a number above 0")


def _fraction(rule: object, field: str) -> None:
    value = getattr(rule, field)
    _require(rule, field, 0 <= value < 1, "0 or more and below 1")


def _require(rule: object, field: str, holds: bool, expected: str) -> None:
    value = getattr(rule, field)
    if not holds:
        raise ConfigurationError(f"{type(rule).__name__}: {field}={value}, expected {expected}")
    # numpy's own scalars would turn float32 arrays into float64.
    object.__setattr__(rule, field, float(value))
