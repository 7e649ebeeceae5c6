"""Proximal gradient descent, its step size under bounded delays, its penalties, and FTRL.

Workers push the gradients of the loss alone; the server adds the penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np

from dps.core.ranges import Checked, NotNegative, Positive, refused, whole_from
from dps.core.rules.rule import Array, Out, Slots, Stepped


class _ProximalStep(Checked):
    """The step of rules with a `learning_rate` and a `penalty`."""

    __slots__ = ()
    slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self: Any) -> None:
        Checked.__post_init__(self)
        if isinstance(self.penalty, type) or not hasattr(self.penalty, "shrink"):
            what = f"{type(self).__name__}: penalty"
            raise refused(what, self.penalty, "a penalty such as L1(0.01) or GroupL1(0.1)")

    @property
    def by_rows(self: Any) -> bool:
        return bool(self.penalty.by_rows)

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        rule: Any = self
        rate = rule.learning_rate * scale
        new: Array = np.multiply(gradient, rate, out=out)
        np.subtract(values, new, out=new)
        rule.penalty.shrink(new, rate)
        return new, {}


@dataclass(frozen=True, slots=True)
class Proximal(_ProximalStep):
    """Proximal gradient descent: w ← prox(w − γ·g), with the proximal operator of γ·h.

    It minimises loss + h (Parikh and Boyd 2014, section 4.2), where the loss is that of one push. A
    fixed step γ ≤ 1/L converges if each push has the gradient of the whole loss, and L is its
    Lipschitz constant; with gradients of batches it only comes near. Each step pays the penalty
    once, also a step with the sum of several gradients.

    Parameters
    ----------
    learning_rate
        γ, 0 or above. A factor on the learning rate is one on the penalty of the step as well.
    penalty
        Penalty h: `L1`, `L2`, `ElasticNet` or `GroupL1`.

    Examples
    --------
    >>> rule = Proximal(learning_rate=0.5, penalty=L1(1.0))
    >>> rule.step(np.array([2.0, 0.1]), np.zeros(2), {}, t=1, scale=1.0)[0]
    array([1.5, 0. ])
    """

    learning_rate: NotNegative
    penalty: Penalty


@dataclass(frozen=True, slots=True)
class DelayedProximal(_ProximalStep):
    """Delayed block proximal gradient descent (Li et al., NIPS 2014; OSDI 2014, section 5.1).

    `Proximal` at the largest learning rate for which the paper's theorem promises a stationary
    point with late gradients, also of a loss that is not convex: γ = 1 / (L_var + τ·L_cov + ε). A
    block is the set of arrays of one push. In the paper, a step sums the gradients of all workers;
    here each push is a step with the gradient of the whole loss, and τ counts pushes.

    Parameters
    ----------
    l_var
        L_var, 0 or above: the Lipschitz constant of the gradient of a block, as that block changes.
        In units of the loss per squared unit of weight.
    l_cov
        L_cov, likewise for the gradients of the blocks of the next τ steps. If each push covers all
        arrays, both are the largest eigenvalue of the loss's second derivative.
    tau
        τ, 0 or above: the number of updates of its shard that a gradient may miss. With n workers
        under ``SSP(bound)`` it is (n − 1)·(2·bound + 1) at most; `ASP` gives no bound.
    penalty
        Penalty h: `L1`, `L2`, `ElasticNet` or `GroupL1`.
    eps
        ε, above 0 as in the theorem, in the unit of `l_var`.

    Examples
    --------
    >>> DelayedProximal(l_var=1.0, l_cov=0.5, tau=2, penalty=L1(0.1), eps=0.5).learning_rate
    0.4
    """

    l_var: NotNegative
    l_cov: NotNegative
    tau: Annotated[int, whole_from(0, "updates")]
    penalty: Penalty
    eps: Positive = 1e-6

    @property
    def learning_rate(self) -> float:
        """γ, the step size."""
        return 1 / (self.l_var + self.tau * self.l_cov + self.eps)


class Penalty(Protocol):
    """A term h(w) that the server adds to the loss of the workers."""

    @property
    def by_rows(self) -> bool:
        """Whether `shrink` needs whole rows, as 2-D arrays."""
        ...

    def shrink(self, values: Array, step: float) -> None:
        """Replace float32 or float64 values by their proximal operator.

        `step` is γ, the learning rate of this step, 0 or above; at 0 nothing changes.
        """
        ...

    def value(self, values: Array) -> float:
        """Return h(values), without changing them; they are as for `shrink`."""
        ...


@dataclass(frozen=True, slots=True)
class _Weighted(Checked):
    strength: NotNegative
    by_rows: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class L1(_Weighted):
    """The lasso's penalty: h(w) = λ·Σ|w|, which makes weights zero one by one.

    Parameters
    ----------
    strength
        λ, 0 or above, in units of the loss per unit of weight.

    Examples
    --------
    >>> L1(0.5).value(np.array([1.0, -3.0]))
    2.0
    """

    def shrink(self, values: Array, step: float) -> None:
        """Apply the soft threshold: sign(x)·max(|x| − γλ, 0)."""
        soft_threshold(values, step * self.strength)

    def value(self, values: Array) -> float:
        """Return λ·Σ|w|."""
        return self.strength * float(np.abs(values).sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class L2(_Weighted):
    """Ridge or weight decay: h(w) = ½·λ·Σw².

    Parameters
    ----------
    strength
        λ, 0 or above, in units of the loss per squared unit of weight.

    Examples
    --------
    >>> L2(0.5).value(np.array([1.0, -3.0]))
    2.5
    """

    def shrink(self, values: Array, step: float) -> None:
        """Divide by 1 + γλ."""
        values /= 1 + step * self.strength

    def value(self, values: Array) -> float:
        """Return ½·λ·Σw²."""
        return self.strength / 2 * float(np.square(values, dtype=np.float64).sum())


@dataclass(frozen=True, slots=True)
class ElasticNet(Checked):
    """Both: h(w) = λ₁·Σ|w| + ½·λ₂·Σw² (Zou and Hastie 2005).

    Parameters
    ----------
    l1, l2
        λ₁ and λ₂, 0 or above, as for `L1` and `L2`.

    Examples
    --------
    >>> ElasticNet(l1=0.5, l2=0.5).value(np.array([1.0, -3.0]))
    4.5
    """

    l1: NotNegative
    l2: NotNegative
    by_rows: ClassVar[bool] = False

    def shrink(self, values: Array, step: float) -> None:
        """Apply the soft threshold γλ₁ and divide by 1 + γλ₂."""
        soft_threshold(values, step * self.l1)
        values /= 1 + step * self.l2

    def value(self, values: Array) -> float:
        """Return λ₁·Σ|w| + ½·λ₂·Σw²."""
        return L1(self.l1).value(values) + L2(self.l2).value(values)


@dataclass(frozen=True, slots=True)
class GroupL1(_Weighted):
    """The group lasso's penalty: h(w) = λ·Σ‖row‖₂, which makes whole rows zero (Yuan and Lin 2006).

    A group is a row of a parameter array: its elements with the same first index, such as the
    weights of one feature in a matrix of features × outputs. In an array of one dimension each
    element is a group. Shards hold whole rows, so few long rows may spread unevenly.

    Parameters
    ----------
    strength
        λ, 0 or above, the same for rows of every length, in units of the loss per unit of weight.

    Examples
    --------
    >>> GroupL1(0.5).value(np.array([[3.0, 4.0], [0.0, 0.0]]))
    2.5
    """

    by_rows: ClassVar[bool] = True

    def shrink(self, values: Array, step: float) -> None:
        """Shorten each row by γλ, at most to zero: row·max(1 − γλ / ‖row‖₂, 0)."""
        threshold = step * self.strength
        if threshold == 0:
            return
        # In a fresh array the order of the summands depends on the row's length alone, so replicas
        # stay bitwise equal. Float32 would overflow.
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
    """Move each element towards zero by `threshold`, at most to zero."""
    values -= np.clip(values, -threshold, threshold)


@dataclass(frozen=True, slots=True)
class FTRL(Checked):
    """Follow the (proximally) regularised leader (McMahan et al. 2013, section 3, algorithm 1).

    After gradients g₁ … g_t, at weights w₁ … w_t, the new weight minimises

        Σ g_s·w + ½·Σ σ_s·(w − w_s)² + λ₁·|w| + ½·λ₂·w²,

    where σ₁ + … + σ_t = 1/η_t = (β + √Σ g_s²) / α. Without penalties it is w − η_t·g_t: gradient
    descent with a learning rate that falls for each weight as its gradients add up.

    The paper starts at w₁ = 0. With other first values, algorithm 1 would omit β/α·w₁ and so forget
    most of them in the first step; here the new weight still minimises the sum. A weight whose
    gradients were all 0 stays. A factor on the learning rate is one on g_s in the sum, not in η.

    Parameters
    ----------
    alpha
        α, above 0, in the unit of weights: η_t = α / (β + √Σ g_s²). The best depends on the data.
    beta
        β, 0 or above, in the unit of gradients: keeps the first steps short. The paper uses 1.
    l1, l2
        λ₁ and λ₂, 0 or above, in units of gradients, and of gradients per unit of weight. They
        enter once, not with each step, so they weigh less and less beside the sum of gradients.

    Examples
    --------
    >>> zero, state = np.zeros(2), {"linear": np.zeros(2), "squares": np.zeros(2)}
    >>> FTRL(alpha=1.0, l1=1.0).step(zero, np.array([0.5, -3.0]), state, t=1, scale=1.0)[0]
    array([0. , 0.5])
    """

    alpha: Positive = 0.1
    beta: NotNegative = 1.0
    l1: NotNegative = 0.0
    l2: NotNegative = 0.0
    slots: ClassVar[tuple[str, ...]] = ("linear", "squares")

    def step(
        self, values: Array, gradient: Array, slots: Slots, t: int, scale: float, out: Out = None
    ) -> Stepped:
        """Return the new values, and the new z = Σ(g_s − σ_s·w_s) and Σ g_s²."""
        before = slots["squares"]
        squares = np.multiply(gradient, gradient)
        squares += before
        # The square of a finite gradient may overflow, and the weight would become NaN for good.
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
