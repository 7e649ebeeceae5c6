"""Proximal gradient descent, and the step size with which it stands bounded delays.

Workers push the gradients of the loss alone; the penalty is taken care of here, where a step can be
exact where the penalty has a kink. A push of some of the arrays is a step of these blocks alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dps.core import ranges
from dps.core.rules.penalties import Penalty

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Proximal:
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
    slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        ranges.not_negative(self, "learning_rate")
        _require_penalty(self, self.penalty)

    @property
    def by_rows(self) -> bool:
        """Whether the penalty needs whole rows."""
        return self.penalty.by_rows

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
        return _stepped(values, gradient, self.learning_rate * scale, self.penalty, out), {}


@dataclass(frozen=True, slots=True)
class DelayedProximal:
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
    slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        ranges.not_negative(self, "l_var", "l_cov")
        ranges.positive(self, "eps")
        ranges.count(self, "tau", 0, "updates")
        _require_penalty(self, self.penalty)

    @property
    def learning_rate(self) -> float:
        """γ, the step size that follows from the constants and the bound of delays."""
        return 1 / (self.l_var + self.tau * self.l_cov + self.eps)

    @property
    def by_rows(self) -> bool:
        """Whether the penalty needs whole rows."""
        return self.penalty.by_rows

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
        return _stepped(values, gradient, self.learning_rate * scale, self.penalty, out), {}


def _stepped(
    values: Array, gradient: Array, rate: float, penalty: Penalty, out: Array | None
) -> Array:
    new: Array = np.multiply(gradient, rate, out=out)
    np.subtract(values, new, out=new)
    penalty.shrink(new, rate)
    return new


def _require_penalty(rule: object, penalty: object) -> None:
    if isinstance(penalty, type) or not hasattr(penalty, "shrink"):
        raise ranges.refused(
            f"{type(rule).__name__}: penalty",
            penalty,
            "a penalty such as L1(0.01) or GroupL1(0.1)",
        )
