"""The learning rate that falls with the staleness of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from dps.core.rules.rule import OfAnother, factor, needs_base
from dps.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class StalenessAware(OfAnother):
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

    def __post_init__(self) -> None:
        OfAnother.__post_init__(self)  # super() knows no class that was made anew for its slots
        if needs_base(self.rule):
            raise ConfigurationError(
                "StalenessAware: delay compensation comes first; write DelayCompensated("
                "StalenessAware(...), strength)"
            )

    def factor(self, staleness: float) -> float:
        """The factor on the learning rate; one of the rule's own comes on top."""
        return factor(self.rule, staleness) / max(1.0, staleness)
