"""FTRL-proximal: online learning with zeros, and a learning rate for each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dps.core import ranges
from dps.core.rules.penalties import soft_threshold

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class FTRL:
    """Follow the (proximally) regularised leader (McMahan et al. 2013, section 3, algorithm 1).

    For each weight, after gradients g₁ … g_t and with w₁ … w_t as the weights were before them, the
    new weight is the one with the least

        Σ g_s·w + ½·Σ σ_s·(w − w_s)² + λ₁·|w| + ½·λ₂·w²,

    where σ₁ + … + σ_t = 1/η_t = (β + √Σ g_s²) / α. Without penalties that is w − η_t·g_t: gradient
    descent at a learning rate that falls for each weight as its gradients add up.

    Parameters
    ----------
    alpha
        α, above 0, in the unit of weights: η_t = α / (β + √Σ g_s²). The best depends on the data.
    beta
        β, 0 or above, in the unit of gradients: keeps the first steps short. The paper uses 1.
    l1, l2
        λ₁ and λ₂, 0 or above, in units of gradients, and of gradients per unit of weight. They
        enter once, not with each step: beside the sum of all gradients so far they weigh less and
        less.

    Notes
    -----
    The paper starts at w₁ = 0. From other values, and where the optimizer's state starts anew
    beside weights that were saved, what holds here is the problem above, where algorithm 1 would
    take β/α·w₁ for nothing and so forget most of them in the first step. As in the paper, a weight
    that has had no gradient but 0 stays as it is, whatever the penalties.

    A factor on the learning rate of a step is one on g_s in the sum (but not on its square in η);
    without penalties that is the same.
    """

    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    slots: ClassVar[tuple[str, ...]] = ("linear", "squares")

    def __post_init__(self) -> None:
        ranges.positive(self, "alpha")
        ranges.not_negative(self, "beta", "l1", "l2")

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the new values, and the new z = Σ(g_s − σ_s·w_s) and Σ g_s²."""
        before = slots["squares"]
        squares = np.multiply(gradient, gradient)
        squares += before
        # A gradient may be finite and its square not; the weight would be no number ever after.
        np.minimum(squares, np.finfo(squares.dtype).max, out=squares)
        root = np.sqrt(squares)
        # σ: what 1/η grows by. Before the first gradient it is 0, and not β/α.
        linear = np.sqrt(before)
        np.subtract(root, linear, out=linear)
        np.add(linear, self.beta, out=linear, where=before == 0)
        linear *= 1 / self.alpha
        linear *= values
        np.subtract(slots["linear"], linear, out=linear)
        linear += np.multiply(gradient, scale)

        root += self.beta
        root *= 1 / self.alpha
        root += self.l2
        new = np.negative(linear, out=out)
        soft_threshold(new, self.l1)
        touched = squares > 0
        np.divide(new, root, out=new, where=touched)
        untouched = np.logical_not(touched, out=touched)
        np.copyto(new, values, where=untouched)
        np.copyto(linear, 0, where=untouched)
        return new, {"linear": linear, "squares": squares}
