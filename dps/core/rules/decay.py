"""Weight decay: weights that are drawn towards zero with every gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dps.core import ranges
from dps.core.rules.rule import OfAnother

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class WeightDecay(OfAnother):
    """Another rule, with weight decay in its gradient: g ← g + λ·w.

    What torch's optimizers do with their argument ``weight_decay`` (but for `AdamW`, which is a
    rule of its own): the gradient of λ/2·Σw², which goes through momentum and all else that the
    rule makes of gradients.

    Parameters
    ----------
    rule
        Any update rule.
    strength
        λ, 0 or above, in units of the loss per squared unit of weight.

    Notes
    -----
    It is done on the server, with the weights that the gradient meets. Rows of sparse tables decay
    when they are pushed to, all others stay as they are. Gradients that are summed into one step
    decay the weights once.
    """

    strength: float

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        ranges.not_negative(self, "strength")

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return what the rule makes of the gradient with the decay in it."""
        whole = np.multiply(values, self.strength)
        whole += gradient
        return self.rule.step(values, whole, slots, t, scale, out)
