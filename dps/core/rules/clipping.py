"""Clipping: gradients that are too large are made smaller by the worker that pushes them.

No server of a sharded group sees a whole gradient, so none could tell its norm. A worker does: it
clips the gradient over all arrays and rows together, before filters and before it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dps.core import ranges
from dps.core.blocks import all_finite
from dps.core.rules.rule import OfAnother, UpdateRule, within
from dps.errors import ConfigurationError

Array = np.ndarray

STRETCH = 1 << 16  # elements whose squares are made at a time
TINY = 1e-6  # what torch adds to the norm before it divides by it


@dataclass(frozen=True, slots=True)
class Clipped(OfAnother):
    """Another rule, with gradients that workers clip before they push them.

    Parameters
    ----------
    rule
        Any update rule.
    norm
        The largest Euclidean norm of a whole gradient, above 0: of all arrays and rows of one push
        together, as in ``torch.nn.utils.clip_grad_norm_``. A gradient whose norm is larger is
        multiplied by norm / (its norm + 1e-6). None: any.
    value
        The largest magnitude of an element, above 0, as in ``torch.nn.utils.clip_grad_value_``;
        before the norm is taken. None: any.

    Notes
    -----
    Gradients are clipped one by one: the sum of several, as after an outage, may be larger, and so
    may what filters send with what they had withheld before.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        given = [name for name in ("norm", "value") if getattr(self, name) is not None]
        if not given:
            raise ConfigurationError("Clipped: expected norm=…, value=… or both")
        ranges.positive(self, *given)
        if clipping_of(self.rule) is not None:
            raise ConfigurationError(
                "Clipped: the rule within is clipped already; give norm and value at once"
            )

    def clipped(
        self, parts: Sequence[Array], fresh: Callable[[], Sequence[Array]]
    ) -> Sequence[Array]:
        """Return the parts of one gradient, clipped together.

        Parameters
        ----------
        parts
            Arrays of float32 or float64 of any shape, which are not written to; together they are
            the whole gradient.
        fresh
            Makes arrays like these to put the result into.

        Returns
        -------
        parts
            Those that were given if nothing had to be done, else the fresh ones. If anything is not
            finite, it is those that were given, for whoever checks them.
        """
        value, norm = self.value, self.norm
        now = parts
        if value is not None and not all(_is_within(part, value) for part in parts):
            if not all(all_finite(part) for part in parts):
                return parts
            now = fresh()
            for part, out in zip(parts, now, strict=True):
                np.clip(part, -value, value, out=out)
        if norm is not None:
            found = norm_of(now) + TINY
            if norm < found < math.inf:
                before, now = now, fresh() if now is parts else now
                for part, out in zip(before, now, strict=True):
                    np.multiply(part, norm / found, out=out)
        return now


def clipping_of(rule: UpdateRule | None) -> Clipped | None:
    """How a rule has gradients clipped, whatever is around it; None: not at all."""
    return within(rule, Clipped)


def norm_of(parts: Iterable[Array]) -> float:
    """The Euclidean norm of arrays together; NaN or infinity if something in them is."""
    flat = [part.reshape(-1) for part in parts]
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(sum(_squares(part, 1.0) for part in flat))
        if math.isfinite(norm):
            return norm
        # Squares may be too large where the norm is not.
        largest = max(float(np.abs(part).max()) for part in flat if part.size)
        if not math.isfinite(largest):
            return largest
        return largest * math.sqrt(sum(_squares(part, 1 / largest) for part in flat))


def _squares(flat: Array, scale: float) -> float:
    """The sum of the squares of scaled elements, in float64, with little memory."""
    total = 0.0
    for begin in range(0, flat.size, STRETCH):
        part = np.multiply(flat[begin : begin + STRETCH], scale, dtype=np.float64)
        part *= part
        total += float(part.sum())
    return total


def _is_within(part: Array, most: float) -> bool:
    """Whether no element is larger; what is no number is."""
    flat = part.reshape(-1)
    pieces = (flat[begin : begin + STRETCH] for begin in range(0, flat.size, STRETCH))
    return all(bool((np.abs(piece) <= most).all()) for piece in pieces)
