"""The sections of a configuration for update rules and the penalties that go with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from dps.core.rules.compensation import DelayCompensated
from dps.core.rules.ftrl import FTRL
from dps.core.rules.penalties import L1, L2, ElasticNet, GroupL1, Penalty
from dps.core.rules.proximal import DelayedProximal, Proximal
from dps.core.rules.rule import SGD, AdaGrad, Adam, Momentum, UpdateRule
from dps.core.rules.staleness import StalenessAware
from flows.config.base import Built, Section
from flows.config.plugins import Group, Registered

Fraction = Annotated[float, Field(ge=0, lt=1)]


class L1Section(Built[Penalty]):
    """The sum of the weights' magnitudes."""

    makes = L1
    kind: Literal["l1"]
    strength: NonNegativeFloat


class L2Section(Built[Penalty]):
    """Half the sum of the weights' squares."""

    makes = L2
    kind: Literal["l2"]
    strength: NonNegativeFloat


class ElasticNetSection(Built[Penalty]):
    """Both, each with its strength."""

    makes = ElasticNet
    kind: Literal["elastic_net"]
    l1: NonNegativeFloat
    l2: NonNegativeFloat


class GroupL1Section(Built[Penalty]):
    """The sum of the lengths of the arrays' rows."""

    makes = GroupL1
    kind: Literal["group_l1"]
    strength: NonNegativeFloat


PenaltySection = Annotated[
    L1Section | L2Section | ElasticNetSection | GroupL1Section, Field(discriminator="kind")
]


class _RuleSection(Section):
    """What all update rules have in common: what may be done about stale gradients.

    Steps may be divided by the staleness, and gradients corrected for what they have missed.
    """

    makes: ClassVar[Callable[..., Any]]
    # Left out of what is recorded unless it is set: without it, a trial is the one it always was.
    staleness_aware: bool = Field(default=False, exclude_if=lambda aware: not aware)
    delay_compensation: NonNegativeFloat | None = Field(
        default=None, exclude_if=lambda strength: strength is None
    )

    def build(self) -> UpdateRule:
        """Return the update rule."""
        rule = StalenessAware(self._rule()) if self.staleness_aware else self._rule()
        strength = self.delay_compensation
        return rule if strength is None else DelayCompensated(rule, strength)

    def build_penalty(self) -> Penalty | None:
        """Return what the rule adds to the loss; None where that is nothing."""
        return None

    def _rule(self) -> UpdateRule:
        """Return the update rule with its own steps."""
        made: UpdateRule = self.makes(
            **self.model_dump(exclude={"kind", *_RuleSection.model_fields})
        )
        return made


class SgdSection(_RuleSection):
    """Plain stochastic gradient descent."""

    makes = SGD
    kind: Literal["sgd"]
    learning_rate: NonNegativeFloat


class MomentumSection(_RuleSection):
    """Gradient descent with heavy-ball momentum."""

    makes = Momentum
    kind: Literal["momentum"]
    learning_rate: NonNegativeFloat
    momentum: Fraction = 0.9


class AdaGradSection(_RuleSection):
    """Learning rates that fall as squared gradients add up."""

    makes = AdaGrad
    kind: Literal["adagrad"]
    learning_rate: NonNegativeFloat = 0.01
    eps: PositiveFloat = 1e-10


class AdamSection(_RuleSection):
    """Adam with bias correction."""

    makes = Adam
    kind: Literal["adam"]
    learning_rate: NonNegativeFloat = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8


class FtrlSection(_RuleSection):
    """Follow the proximally regularised leader."""

    makes = FTRL
    kind: Literal["ftrl"]
    alpha: PositiveFloat = 0.1
    beta: NonNegativeFloat = 1.0
    l1: NonNegativeFloat = 0.0
    l2: NonNegativeFloat = 0.0

    def build_penalty(self) -> Penalty | None:
        """Return both penalties."""
        return ElasticNet(self.l1, self.l2)


class ProximalSection(_RuleSection):
    """Proximal gradient descent on the loss with a penalty."""

    kind: Literal["proximal"]
    learning_rate: NonNegativeFloat
    penalty: PenaltySection

    def build_penalty(self) -> Penalty | None:
        """Return the penalty."""
        return self.penalty.build()

    def _rule(self) -> UpdateRule:
        return Proximal(self.learning_rate, self.penalty.build())


class DelayedProximalSection(_RuleSection):
    """The same at the step size that stands delays of `tau` updates."""

    kind: Literal["delayed_proximal"]
    l_var: NonNegativeFloat
    l_cov: NonNegativeFloat
    tau: NonNegativeInt
    penalty: PenaltySection
    eps: PositiveFloat = 1e-6

    def build_penalty(self) -> Penalty | None:
        """Return the penalty."""
        return self.penalty.build()

    def _rule(self) -> UpdateRule:
        return DelayedProximal(self.l_var, self.l_cov, self.tau, self.penalty.build(), self.eps)


class _RegisteredRule(Registered, _RuleSection):
    """An update rule that an installed package registers."""

    def _rule(self) -> UpdateRule:
        rule: UpdateRule = self.made()
        return rule


RULES = Group("dps.rules", _RegisteredRule, needed=("slots", "step"), on_wire=True)

OptimizerSection = Annotated[
    SgdSection
    | MomentumSection
    | AdaGradSection
    | AdamSection
    | FtrlSection
    | ProximalSection
    | DelayedProximalSection,
    Field(discriminator="kind"),
    RULES,
]
