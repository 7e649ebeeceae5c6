"""The kinds of dps that a configuration may choose, and wrappers of update rules and stores.

Their keys are the fields of the classes (see `flows.config.sections`). The kinds are the classes
that `dps` exports: a class with a `step` is an update rule, a class with `selected` a filter.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

import dps.public
from dps.core.placement import Balanced
from dps.core.replay import Outage
from dps.recovery.files import shared_path
from flows.config.errors import refusing
from flows.config.sections import Derived, Group, Section, section_of


def _exported(has: str, lacks: str) -> tuple[type, ...]:
    """Return the exported dataclasses of dps that have one attribute and lack another."""
    exported = (vars(dps.public).get(name) for name in dps.__all__)
    classes = [cls for cls in exported if isinstance(cls, type) and is_dataclass(cls)]
    return tuple(cls for cls in classes if hasattr(cls, has) and not hasattr(cls, lacks))


# -- update rules ----------------------------------------------------------------------------------

PENALTIES = Group(_exported("shrink", "step"), of=dps.Penalty)
SCHEDULES = Group(_exported("factor", "step"), of=dps.Schedule)


class ClipSection(Section):
    """Limits of whole gradients, on the worker."""

    norm: PositiveFloat | None = None
    """Maximum Euclidean norm."""
    value: PositiveFloat | None = None
    """Maximum absolute value of an element."""


class RuleSection(Derived):
    """Common part of all update rules: the wrappers of a rule.

    Learning rates may follow a schedule, gradients be clipped, and several be averaged for one
    step; steps may be divided by the staleness, and gradients corrected for what they have missed.
    """

    staleness_aware: bool = False
    """Divide the learning rate by a staleness above 1."""
    delay_compensation: NonNegativeFloat | None = None
    """Strength λ of the correction of stale gradients; pushes then carry the weights too."""
    schedule: Annotated[Derived, SCHEDULES] | None = None
    """Factor of the learning rate, by the version of the shard."""
    clip: ClipSection | None = None
    """Clip the gradient of each worker."""
    accumulate: PositiveInt = 1
    """Gradients whose mean makes one step."""

    def build(self) -> dps.UpdateRule:
        """Return the update rule."""
        rule = self._rule()
        if self.accumulate > 1:
            rule = dps.Accumulated(rule, self.accumulate)
        if self.schedule is not None:
            rule = dps.Scheduled(rule, self.schedule.build())
        if self.clip is not None:
            rule = dps.Clipped(rule, self.clip.norm, self.clip.value)
        rule = dps.StalenessAware(rule) if self.staleness_aware else rule
        strength = self.delay_compensation
        return rule if strength is None else dps.DelayCompensated(rule, strength)

    def build_penalty(self) -> dps.Penalty | None:
        """Return what the rule adds to the loss; None where that is nothing."""
        rule = self._rule()
        if isinstance(rule, dps.FTRL):
            return dps.ElasticNet(rule.l1, rule.l2)
        return getattr(rule, "penalty", None)

    def _rule(self) -> dps.UpdateRule:
        rule: dps.UpdateRule = self.made()
        return rule


class DecayingSection(RuleSection):
    """Rules that may have weight decay in their gradients, as torch's optimizers have it."""

    weight_decay: NonNegativeFloat = 0.0
    """Multiple of the weights that is added to the gradient."""

    def _rule(self) -> dps.UpdateRule:
        rule: dps.UpdateRule = self.made()
        return dps.WeightDecay(rule, self.weight_decay) if self.weight_decay else rule


def _decays(rule: type) -> bool:
    keys = {field.name for field in fields(rule)}
    return "learning_rate" in keys and not keys & {"penalty", "weight_decay"}


_RULES = _exported("step", lacks="rule_for")  # only rules that wrap others have rule_for
_DECAYING = dict.fromkeys(filter(_decays, _RULES), DecayingSection)
RULES = Group(_RULES, RuleSection, _DECAYING, name="dps.rules")


class ByNameSection(RuleSection):
    """A rule for each array of the model, by names in which `*` stands for any characters."""

    kind: Literal["by_name"]
    rules: dict[str, Annotated[RuleSection, RULES]]
    """Rule by array name; `*` stands for any characters. `{kind: frozen}` excludes an array."""

    def _rule(self) -> dps.UpdateRule:
        with refusing("rules"):
            return dps.PerArray(tuple((name, rule.build()) for name, rule in self.rules.items()))


OptimizerSection = Annotated[RuleSection | ByNameSection, RULES]

# -- filters, consistency, placement ---------------------------------------------------------------

FILTERS = Group((*_exported("selected", "step"), dps.Quantise, dps.Lossless), name="dps.filters")
FilterSection = Annotated[Derived, FILTERS]
CONSISTENCIES = Group(get_args(dps.Consistency))
ConsistencySection = Annotated[Derived, CONSISTENCIES]
PLACEMENTS = Group((Balanced, dps.ConsistentHash))
PlacementSection = Annotated[Derived, PLACEMENTS]

# -- recovery --------------------------------------------------------------------------------------


class DurabilitySection(Derived):
    """Common part of all durabilities: all nodes can read where they write."""

    @model_validator(mode="after")
    def _all_nodes_see_its_path(self) -> Self:
        path = getattr(self, "path", None)
        with refusing("path"):
            if path is not None:
                shared_path(path)
        return self


class AboveLayerSection(DurabilitySection):
    """A durability that may have a layer of checkpoints below."""

    below: section_of(dps.Checkpoint, DurabilitySection) | None = None  # type: ignore[valid-type]
    """Background checkpoints."""

    def build(self) -> dps.Durability:
        """Return the durability, with the layer below if there is one."""
        above: Any = self.made()
        return above if self.below is None else dps.Layered(above, self.below.build())


DURABILITIES = Group(
    tuple(cls for cls in _exported("persistence", "step") if cls is not dps.Layered),
    DurabilitySection,
    dict.fromkeys(get_args(get_type_hints(dps.Layered)["above"]), AboveLayerSection),
    name="dps.durabilities",
    parent=dps.Durability,
)
DurabilityChoice = Annotated[DurabilitySection, DURABILITIES]
OUTAGES = Group(get_args(Outage))
OutageSection = Annotated[Derived, OUTAGES]
