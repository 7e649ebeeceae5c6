"""Delay compensation: late gradients are brought up to the weights that they meet.

A gradient then travels with the weights that it was computed from, twice the bytes. No server has
to remember what it gave to whom, so it survives every way to recover.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dps.core import ranges
from dps.core.blocks import ShardLayout, all_finite
from dps.core.rules import rule as rules
from dps.core.rules.rule import OfAnother, UpdateRule
from dps.core.updates import Operation
from dps.errors import ShapeMismatch

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class DelayCompensated(OfAnother):
    """Another rule, with gradients that are corrected for what they have missed.

    g + λ·g⊙g⊙(w − w'), where w' are the weights that g was computed from and w the present ones: a
    step of Taylor's series in which λ·g⊙g stands for the second derivative ("Asynchronous
    Stochastic Gradient Descent with Delay Compensation", Zheng et al., ICML 2017, section 3, with a
    constant λ). Gradients that are summed into one step are each corrected to the weights before
    it.

    Parameters
    ----------
    rule
        Any update rule, `StalenessAware` included.
    strength
        λ, 0 or above, in units of one over the loss.

    Notes
    -----
    Each push carries the weights as well, whatever filters do to its gradient. A worker that has
    read no weights yet sends none, and its gradient is taken as it is; so are elements whose
    correction is too large for their dtype.
    """

    strength: float

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        ranges.not_negative(self, "strength")

    @property
    def needs_base(self) -> bool:
        """Gradients have to come with the weights that they were computed from."""
        return True

    def compensated(self, values: Array, gradient: Array, base: Array) -> Array:
        """Return the corrected gradient; three 1-D arrays of equal shape and dtype."""
        with np.errstate(over="ignore", invalid="ignore"):
            new: Array = np.subtract(values, base)
            new *= gradient
            new *= gradient
            new *= self.strength
            new += gradient
        return new if all_finite(new) else np.where(np.isfinite(new), new, gradient)


def compensated(layout: ShardLayout, rule: UpdateRule, values: Array, op: Operation) -> Operation:
    """Return the operation with its gradient corrected to these values of the shard.

    One that carries no weights, or meets a rule that has no use for them, stays as it is.

    Raises
    ------
    ShapeMismatch
        Gradient and weights do not fit.
    """
    if op.base is None or not rules.needs_base(rule):
        return op
    check_base(op)
    assert op.gradient is not None
    present = layout.taken(values, op.pieces)
    if present.nbytes != op.gradient.nbytes:
        size = op.gradient.nbytes
        raise ShapeMismatch(f"update {op.id}: {size} bytes of gradient, expected {present.nbytes}")
    gradient, at = np.empty_like(op.gradient), 0
    chosen = [layout.pieces[i] for i in op.pieces] if op.pieces else layout.pieces
    for piece in chosen:
        part = slice(at, at + piece.block.nbytes)
        at = part.stop
        own = rules.rule_for(rule, piece.block.name)
        if not rules.needs_base(own):
            gradient[part] = op.gradient[part]
            continue
        correct: Callable[..., Array] = getattr(own, "compensated")  # noqa: B009 - not of every rule
        three = (buffer[part].view(piece.block.dtype) for buffer in (present, op.gradient, op.base))
        gradient[part].view(piece.block.dtype)[:] = correct(*three)
    return replace(op, gradient=gradient, base=None)


def check_base(op: Operation) -> None:
    """Refuse weights of another size than the gradient; raises `ShapeMismatch`."""
    if op.base is not None and op.gradient is not None and op.base.nbytes != op.gradient.nbytes:
        raise ShapeMismatch(
            f"update {op.id}: {op.base.nbytes} bytes of weights, expected {op.gradient.nbytes}"
        )
