"""The sections of a configuration for update rules, and the penalties and schedules with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from dps.core.rules.clipping import Clipped
from dps.core.rules.compensation import DelayCompensated
from dps.core.rules.decay import WeightDecay
from dps.core.rules.ftrl import FTRL
from dps.core.rules.penalties import L1, L2, ElasticNet, GroupL1, Penalty
from dps.core.rules.per_array import Frozen, PerArray
from dps.core.rules.proximal import DelayedProximal, Proximal
from dps.core.rules.rule import SGD, AdaGrad, Adam, AdamW, Momentum, UpdateRule
from dps.core.rules.schedules import Constant, Cosine, Schedule, Scheduled, StepDecay, WarmUp
from dps.core.rules.staleness import StalenessAware
from flows.config.base import Built, Section
from flows.config.errors import refuse
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


class ConstantSection(Built[Schedule]):
    """The learning rate as it is."""

    makes = Constant
    kind: Literal["constant"]


class StepSection(Built[Schedule]):
    """It is multiplied by the same number every so many updates."""

    makes = StepDecay
    kind: Literal["step"]
    every: PositiveInt
    by: PositiveFloat = 0.1


class CosineSection(Built[Schedule]):
    """It falls along half a cosine to a part of itself."""

    makes = Cosine
    kind: Literal["cosine"]
    updates: PositiveInt
    least: Fraction = 0.0


FollowingSection = Annotated[
    ConstantSection | StepSection | CosineSection, Field(discriminator="kind")
]


class WarmUpSection(Section):
    """It rises evenly, and another schedule follows."""

    kind: Literal["warm_up"]
    updates: PositiveInt
    then: FollowingSection = ConstantSection(kind="constant")
    start: Fraction = 0.0

    def build(self) -> Schedule:
        """Return the schedule."""
        return WarmUp(self.updates, self.then.build(), self.start)


ScheduleSection = Annotated[
    ConstantSection | StepSection | CosineSection | WarmUpSection, Field(discriminator="kind")
]


class ClipSection(Section):
    """What workers clip whole gradients to before they push them."""

    norm: PositiveFloat | None = None
    value: PositiveFloat | None = None

    @model_validator(mode="after")
    def _clips_something(self) -> ClipSection:
        if self.norm is None and self.value is None:
            refuse("expected norm, value or both, such as {norm: 1.0}")
        return self


class _RuleSection(Section):
    """What all update rules have in common: what goes around a rule.

    Learning rates may follow a schedule, gradients be clipped; steps may be divided by the
    staleness, and gradients corrected for what they have missed.
    """

    makes: ClassVar[Callable[..., Any]]
    staleness_aware: bool = False
    delay_compensation: NonNegativeFloat | None = None
    schedule: ScheduleSection | None = None
    clip: ClipSection | None = None

    def build(self) -> UpdateRule:
        """Return the update rule."""
        rule = self._rule()
        if self.schedule is not None:
            rule = Scheduled(rule, self.schedule.build())
        if self.clip is not None:
            rule = Clipped(rule, self.clip.norm, self.clip.value)
        rule = StalenessAware(rule) if self.staleness_aware else rule
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


class _DecayingSection(_RuleSection):
    """Rules that may have weight decay in their gradients, as torch's optimizers have it."""

    weight_decay: NonNegativeFloat = 0.0

    def _rule(self) -> UpdateRule:
        common = {"kind", *_DecayingSection.model_fields}
        rule: UpdateRule = self.makes(**self.model_dump(exclude=common))
        return WeightDecay(rule, self.weight_decay) if self.weight_decay else rule


class SgdSection(_DecayingSection):
    """Plain stochastic gradient descent."""

    makes = SGD
    kind: Literal["sgd"]
    learning_rate: NonNegativeFloat


class MomentumSection(_DecayingSection):
    """Gradient descent with heavy-ball momentum."""

    makes = Momentum
    kind: Literal["momentum"]
    learning_rate: NonNegativeFloat
    momentum: Fraction = 0.9


class AdaGradSection(_DecayingSection):
    """Learning rates that fall as squared gradients add up."""

    makes = AdaGrad
    kind: Literal["adagrad"]
    learning_rate: NonNegativeFloat = 0.01
    eps: PositiveFloat = 1e-10


class AdamSection(_DecayingSection):
    """Adam with bias correction."""

    makes = Adam
    kind: Literal["adam"]
    learning_rate: NonNegativeFloat = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8


class AdamWSection(_RuleSection):
    """Adam with decoupled weight decay."""

    makes = AdamW
    kind: Literal["adamw"]
    learning_rate: NonNegativeFloat = 0.001
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01


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


class FrozenSection(Built[UpdateRule]):
    """What is not trained."""

    makes = Frozen
    kind: Literal["frozen"]


RULES = Group("dps.rules", _RegisteredRule, needed=("slots", "step"), on_wire=True)

_OneRule = (
    SgdSection
    | MomentumSection
    | AdaGradSection
    | AdamSection
    | AdamWSection
    | FtrlSection
    | ProximalSection
    | DelayedProximalSection
)
_NamedRule = Annotated[_OneRule | FrozenSection, Field(discriminator="kind"), RULES]


class ByNameSection(_RuleSection):
    """A rule for each array of the model, by names in which `*` stands for any characters."""

    kind: Literal["by_name"]
    rules: dict[str, _NamedRule]

    def _rule(self) -> UpdateRule:
        return PerArray(tuple((name, rule.build()) for name, rule in self.rules.items()))


OptimizerSection = Annotated[_OneRule | ByNameSection, Field(discriminator="kind"), RULES]
