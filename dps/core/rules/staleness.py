"""The learning rate that falls with the staleness of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dps.core.rules import rule as rules
from dps.core.rules.rule import UpdateRule, by_rows, needs_base
from dps.errors import ConfigurationError

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class StalenessAware:
    """Another rule, at its learning rate divided by how stale the gradient is.

    The learning rate of a step is η / max(1, s), where s is the version of the shard before the
    step less the one that the gradient was computed from ("Staleness-aware Async-SGD", Zhang,
    Gupta, Lian and Liu, IJCAI 2016). Where gradients are summed into one step, s is their mean. A
    factor of the replay policy comes on top.

    Parameters
    ----------
    rule
        Any update rule.

    Notes
    -----
    It is meant for `ASP` and `SSP`. Under `BSP` the updates of a round are applied one after the
    other, so that each is as stale as its place in the round.
    """

    rule: UpdateRule

    def __post_init__(self) -> None:
        rule = self.rule
        if isinstance(rule, type | StalenessAware) or not hasattr(rule, "step"):
            raise ConfigurationError(
                f"StalenessAware: rule={rule!r}, expected another update rule such as SGD(0.1)"
            )
        if needs_base(rule):
            raise ConfigurationError(
                "StalenessAware: delay compensation comes first; write DelayCompensated("
                "StalenessAware(...), strength)"
            )

    @property
    def slots(self) -> tuple[str, ...]:
        """The optimizer state of the rule."""
        return self.rule.slots

    @property
    def by_rows(self) -> bool:
        """Whether the rule has to see whole rows."""
        return by_rows(self.rule)

    def factor(self, staleness: float) -> float:
        """The factor on the learning rate; one of the rule's own comes on top."""
        return rules.factor(self.rule, staleness) / max(1.0, staleness)

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Return what the rule returns."""
        return self.rule.step(values, gradient, slots, t, scale, out)
