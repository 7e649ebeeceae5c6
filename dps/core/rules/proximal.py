"""Proximal gradient descent, and the step size with which it stands bounded delays.

Workers push the gradients of the loss alone; the penalty is taken care of here, where a step can be
exact where the penalty has a kink. A push of some of the arrays is a step of these blocks alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from dps.core import ranges

Array = np.ndarray


class _ProximalStep:
    """The step of rules with a `learning_rate` and a `penalty`."""

    __slots__ = ()
    slots: ClassVar[tuple[str, ...]] = ()

    @property
    def by_rows(self: Any) -> bool:
        """Whether the penalty needs whole rows."""
        return bool(self.penalty.by_rows)

    def step(
        self: Any,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return the new values; the optimizer state is empty."""
        rate = self.learning_rate * scale
        new: Array = np.multiply(gradient, rate, out=out)
        np.subtract(values, new, out=new)
        self.penalty.shrink(new, rate)
        return new, {}


@dataclass(frozen=True, slots=True)
class Proximal(_ProximalStep):
    """Proximal gradient descent: w ← prox(w − γ·g), with the proximal operator of γ·h.

    It makes loss + h least (Parikh and Boyd 2014, section 4.2), where the loss is what one push has
    the gradient of. A fixed step γ ≤ 1/L converges if each push has the gradient of the whole loss,
    and L bounds how much that changes per unit of change of the weights. With gradients of batches
    it comes near only, and zeros come and go.

    Parameters
    ----------
    learning_rate
        γ, 0 or above. What reduces the learning rate of a step reduces the penalty's part as well.
    penalty
        h: `L1`, `L2`, `ElasticNet` or `GroupL1`.

    Notes
    -----
    Each step pays the penalty once, also one with the sum of several gradients, as after an outage
    or on a chain that aggregates: there h weighs less beside the loss.
    """

    learning_rate: float
    penalty: Penalty

    def __post_init__(self) -> None:
        ranges.not_negative(self, "learning_rate")
        _require_penalty(self, self.penalty)


@dataclass(frozen=True, slots=True)
class DelayedProximal(_ProximalStep):
    """Delayed block proximal gradient descent (Li et al., NIPS 2014; OSDI 2014, section 5.1).

    The step is that of `Proximal`, at the largest learning rate for which the paper's theorem
    promises a stationary point though gradients are late, also where the loss is not convex: γ =
    M / (L_var + τ·L_cov + ε), with M = 1 as the proximal operator measures plain distances. A block
    is what one push covers: any of the arrays.

    Parameters
    ----------
    l_var
        L_var, 0 or above: how much the gradient of a block changes at most, per unit by which that
        block changes. In units of the loss per squared unit of weight.
    l_cov
        L_cov, likewise for the gradients of the blocks of the τ steps that follow. If each push
        covers all arrays, both are the largest eigenvalue of the loss's second derivative.
    tau
        τ, 0 or above: how many updates of its shard a gradient may miss. With n workers under
        ``SSP(bound)`` that is (n − 1)·(2·bound + 1) at most; `ASP` gives no bound.
    penalty
        h: `L1`, `L2`, `ElasticNet` or `GroupL1`.
    eps
        ε, above 0 as in the theorem, in the unit of `l_var`.

    Notes
    -----
    In a step of the paper the gradients of all workers are summed, and the constants are sums over
    workers. Here each push is a step: the constants are those of what one push has the gradient of,
    which has to stand for the whole loss, and τ counts pushes.
    """

    l_var: float
    l_cov: float
    tau: int
    penalty: Penalty
    eps: float = 1e-6

    def __post_init__(self) -> None:
        ranges.not_negative(self, "l_var", "l_cov")
        ranges.positive(self, "eps")
        ranges.count(self, "tau", 0, "updates")
        _require_penalty(self, self.penalty)

    @property
    def learning_rate(self) -> float:
        """γ, the step size that follows from the constants and the bound of delays."""
        return 1 / (self.l_var + self.tau * self.l_cov + self.eps)


def _require_penalty(rule: object, penalty: object) -> None:
    if isinstance(penalty, type) or not hasattr(penalty, "shrink"):
        raise ranges.refused(
            f"{type(rule).__name__}: penalty",
            penalty,
            "a penalty such as L1(0.01) or GroupL1(0.1)",
        )


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
