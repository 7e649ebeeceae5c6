"""The update rule that steps along the sum of all workers' latest gradients.

It shows a custom update rule: any class with `slots` and `step` can be passed as `optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dps import UpdateRule

SUM = "sum"


@dataclass(frozen=True, slots=True)
class Aggregated:
    """Another rule, applied to the sum of all pushes instead of the gradient.

    A worker pushes the change of its part of the gradient since its last push, so the sum is that
    of every worker's latest part: incremental aggregated gradients (Blatt, Hero and Gauchman 2007;
    with proximal steps Aytekin, Feyzmahdavian and Johansson 2016). Unlike steps with each worker's
    part in turn, these come to rest at the optimum of the whole; and a worker that leaves out a
    small change can make up for it later.

    It needs exactly-once updates: the error of a lost or repeated update stays in the sum.

    Parameters
    ----------
    rule
        Update rule for the sum.
    """

    rule: UpdateRule

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of the rule, and the sum."""
        return (SUM, *self.rule.slots)

    @property
    def by_rows(self) -> bool:
        """Whether the rule needs whole rows."""
        return bool(getattr(self.rule, "by_rows", False))

    def step(
        self,
        values: np.ndarray,
        gradient: np.ndarray,
        slots: Mapping[str, np.ndarray],
        t: int,
        scale: float,
        out: np.ndarray | None = None,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Add the change to the sum, and take the rule's step with it."""
        total = slots[SUM] + gradient
        own = {name: array for name, array in slots.items() if name != SUM}
        new, kept = self.rule.step(values, total, own, t, scale, out)
        return new, {SUM: total, **kept}
