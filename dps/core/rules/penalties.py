"""The penalties that proximal rules put on parameters, as their proximal operators.

The proximal operator of a penalty h takes x to the y with the least h(y) + ‖y − x‖² / (2γ): a step
of length γ down the penalty that is exact where it has a kink. Weights get to be exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from dps.core import ranges

Array = np.ndarray


class Penalty(Protocol):
    """What is added to the loss that workers differentiate, and taken care of on the server.

    `by_rows` tells whether it needs whole rows, as 2-D arrays (see `dps.core.rules.rule.by_rows`).
    """

    @property
    def by_rows(self) -> bool:
        """Whether `shrink` needs whole rows, as 2-D arrays."""
        ...

    def shrink(self, values: Array, step: float) -> None:
        """Put the proximal operator's value into the place of its argument.

        Parameters
        ----------
        values
            Float32 or float64; written to.
        step
            γ, the learning rate of this step, 0 or above; at 0 nothing changes.
        """
        ...

    def value(self, values: Array) -> float:
        """Return what is added to the loss; `values` are as for `shrink`, and stay as they are."""
        ...


@dataclass(frozen=True, slots=True)
class L1:
    """The lasso's penalty: h(w) = λ·Σ|w|, which makes weights zero one by one.

    Its proximal operator is the soft threshold, sign(x)·max(|x| − γλ, 0).

    Parameters
    ----------
    strength
        λ, 0 or above, in units of the loss per unit of weight.
    """

    strength: float
    by_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ranges.not_negative(self, "strength")

    def shrink(self, values: Array, step: float) -> None:
        """Apply the soft threshold γλ."""
        soft_threshold(values, step * self.strength)

    def value(self, values: Array) -> float:
        """Return λ·Σ|w|."""
        return self.strength * float(np.abs(values).sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class L2:
    """Ridge or weight decay: h(w) = ½·λ·Σw².

    Its proximal operator is x / (1 + γλ).

    Parameters
    ----------
    strength
        λ, 0 or above, in units of the loss per squared unit of weight.
    """

    strength: float
    by_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ranges.not_negative(self, "strength")

    def shrink(self, values: Array, step: float) -> None:
        """Divide by 1 + γλ."""
        values /= 1 + step * self.strength

    def value(self, values: Array) -> float:
        """Return ½·λ·Σw²."""
        return self.strength / 2 * float(np.square(values, dtype=np.float64).sum())


@dataclass(frozen=True, slots=True)
class ElasticNet:
    """Both: h(w) = λ₁·Σ|w| + ½·λ₂·Σw² (Zou and Hastie 2005).

    Its proximal operator is the soft threshold γλ₁, divided by 1 + γλ₂.

    Parameters
    ----------
    l1, l2
        λ₁ and λ₂, 0 or above, as for `L1` and `L2`.
    """

    l1: float
    l2: float
    by_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ranges.not_negative(self, "l1", "l2")

    def shrink(self, values: Array, step: float) -> None:
        """Apply the soft threshold γλ₁ and divide by 1 + γλ₂."""
        soft_threshold(values, step * self.l1)
        values /= 1 + step * self.l2

    def value(self, values: Array) -> float:
        """Return λ₁·Σ|w| + ½·λ₂·Σw²."""
        return L1(self.l1).value(values) + L2(self.l2).value(values)


@dataclass(frozen=True, slots=True)
class GroupL1:
    """The group lasso's penalty: h(w) = λ·Σ‖row‖₂, which makes whole rows zero (Yuan and Lin 2006).

    A group is a row of a parameter array: all of it with the same first index. In a matrix of
    features × outputs it is what belongs to one feature. In an array of one dimension each element
    is a group, as with `L1`. Rows stay whole however many shards there are: a row is the least that
    can be placed, so few long rows may spread unevenly.

    Its proximal operator is row·max(1 − γλ / ‖row‖₂, 0).

    Parameters
    ----------
    strength
        λ, 0 or above, the same for rows of every length, in units of the loss per unit of weight.
    """

    strength: float
    by_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.not_negative(self, "strength")

    def shrink(self, values: Array, step: float) -> None:
        """Shorten each row by γλ; rows that are no longer than that become zero."""
        threshold = step * self.strength
        if threshold == 0:
            return
        # A fresh array, so that the order of the summands depends on the row's length alone and
        # replicas stay bitwise equal; and of float64, as float32 would overflow.
        norms = np.sqrt(np.square(values, dtype=np.float64).sum(axis=1, keepdims=True))
        kept = np.zeros_like(norms)
        np.divide(threshold, norms, out=kept, where=norms > threshold)
        np.subtract(1, kept, out=kept, where=norms > threshold)
        values *= kept.astype(values.dtype)

    def value(self, values: Array) -> float:
        """Return λ·Σ‖row‖₂."""
        norms = np.sqrt(np.square(values, dtype=np.float64).sum(axis=1))
        return self.strength * float(norms.sum())


def soft_threshold(values: Array, threshold: float) -> None:
    """Bring each element nearer to zero by `threshold`, and to zero if it is nearer already."""
    values -= np.clip(values, -threshold, threshold)
