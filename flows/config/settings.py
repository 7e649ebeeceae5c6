"""The sections that every configuration has: training, servers, recovery and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    computed_field,
    field_validator,
    model_validator,
)

import dps
from dps.core.leases import LEASE
from dps.core.placement import Balanced
from dps.core.rules.rule import by_rows, is_per_array, within
from dps.protocol.timings import Timings
from dps.protocol.transport import TransportChoice
from dps.recovery.strategy import PRESETS
from flows.config.errors import check_known, refuse, refusing
from flows.config.kinds import (
    DURABILITIES,
    OUTAGES,
    PLACEMENTS,
    DurabilityChoice,
    OptimizerSection,
    OutageSection,
    PlacementSection,
)
from flows.config.sections import Section, kind_of, section_of
from flows.metrics import METRICS
from flows.metrics.score import ACCURACY, SCORES

# Rules that no worker can have for its local steps.
OF_SERVER = (dps.Accumulated, dps.Clipped, dps.DelayCompensated, dps.StalenessAware)
MOST = 10_000  # workers, shards or nodes of one kind
Many = Annotated[int, Field(ge=1, le=MOST)]


class StragglingSection(Section):
    """Gradients that take `factor` times `compute_seconds`.

    Each gradient is one of them with the probability `share`, drawn for every worker from the seed
    of the trial; `workers` are the numbers of the affected workers, null is all.
    """

    factor: Annotated[float, Field(ge=1)]
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    workers: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] | None = None


class TrainingSection(Section):
    """The number of gradients, of workers, and how workers draw their batches.

    `updates` gradients in all are split evenly over the workers, each of which ends when its
    `share` is computed; or the workers stop `together`, when the shards have applied them all. A
    gradient takes at least `compute_seconds`, which stands for a heavier model without using the
    core, and longer if it is `straggling`. Workers draw their batches from all examples (`shared`),
    or each from its part of them in the order of their classes (`by_class`). They compute on
    weights that may lack their own last `ahead` updates, which are still on their way. With
    `local_steps` an update takes that number of gradients: a worker takes a step with each by its
    own rule, `inner`, and pushes the decrease of its weights.

    With `epochs` workers have no shares, but lease batches of the first `updates / epochs` of the
    training data, `lease` at a time, until each was applied once in every epoch.
    """

    workers: Many = 2
    updates: PositiveInt
    batch_size: PositiveInt = 32
    compute_seconds: NonNegativeFloat = 0.0
    workers_per_node: PositiveInt = 1
    straggling: StragglingSection | None = None
    partition: Literal["shared", "by_class"] = "shared"
    ahead: NonNegativeInt = 0
    local_steps: PositiveInt = 1
    inner: OptimizerSection | None = None
    epochs: PositiveInt | None = None
    lease: PositiveInt = LEASE
    stop: Literal["share", "together"] = "share"

    @model_validator(mode="after")
    def _straggling_slows_something(self) -> TrainingSection:
        if self.straggling is None:
            return self
        if not self.compute_seconds:
            reason = "it makes compute_seconds longer, which is 0; give it a time, such as 0.01"
            refuse(reason, key="straggling")
        unknown = [n for n in self.straggling.workers or () if n >= self.workers]
        if unknown:
            reason = f"there is no worker {unknown[0]}; expected 0 to {self.workers - 1}"
            refuse(reason, key="straggling.workers")
        return self

    @model_validator(mode="after")
    def _local_steps_have_a_rule(self) -> TrainingSection:
        if self.inner is None:
            if self.local_steps > 1:
                reason = "expected a rule for local steps, such as {kind: adamw}"
                refuse(reason, key="inner")
            return self
        if self.ahead:
            reason = "expected 0 with inner: weights without the last update would undo local steps"
            refuse(reason, key="ahead")
        rule = self.inner.build()
        if is_per_array(rule) or by_rows(rule) or any(within(rule, each) for each in OF_SERVER):
            refuse(
                "expected one rule for all elements, without clip, accumulate, staleness_aware and "
                "delay_compensation",
                key="inner",
            )
        return self

    @model_validator(mode="after")
    def _can_be_leased(self) -> TrainingSection:
        if self.epochs is None:
            return self
        if self.updates % self.epochs:
            reason = f"expected a divisor of the {self.updates} updates: as many in each epoch"
            refuse(reason, key="epochs")
        others = {"partition": "shared", "stop": "share", "local_steps": 1}
        for key, needed in others.items():
            if getattr(self, key) != needed:
                refuse(f"expected {needed} with epochs", key=key)
        return self

    def leases(self, seed: int) -> dict[str, Any]:
        """Return the arguments of `ParameterServer.run` to lease data, if workers do so."""
        if self.epochs is None:
            return {}
        examples = self.updates // self.epochs * self.batch_size
        sizes = {"data": examples, "batch_size": self.batch_size, "epochs": self.epochs}
        return {**sizes, "shuffle": seed, "lease": self.lease}


class ChangeSection(Section):
    """Another number of servers, of workers or of both, from a moment of the training on."""

    at_updates: PositiveInt | None = None
    at_seconds: NonNegativeFloat | None = None
    servers: Many | None = None
    workers: Many | None = None

    @model_validator(mode="after")
    def _says_when_and_what(self) -> ChangeSection:
        if (self.at_updates is None) == (self.at_seconds is None):
            refuse("expected one moment: at_updates or at_seconds")
        if self.servers is None and self.workers is None:
            refuse("expected what changes: servers, workers or both")
        return self

    def is_due(self, updates: int, seconds: float) -> bool:
        """Whether its moment has come, this many updates and seconds after the start."""
        if self.at_updates is not None:
            return updates >= self.at_updates
        return self.at_seconds is not None and seconds >= self.at_seconds


class ServerSection(Section):
    """The parameter server: its shards, and nodes kept idle and warm for a loss.

    `lease` is for how many seconds an unreachable node or worker is treated as alive, `patience`
    for how many dps waits for a busy one; `servers` is how many nodes hold the shards at first,
    null: one for each replica of each; `transport` is how nodes send each other arrays; `placement`
    decides which of the `servers` holds which shard.
    """

    shards: Many = 2
    servers: Many | None = None
    spares: Annotated[int, Field(ge=0, le=MOST)] = 0
    lease: PositiveFloat = Timings().lease
    patience: PositiveFloat = Timings().patience
    transport: TransportChoice = "auto"
    placement: PlacementSection = Field(default_factory=lambda: PLACEMENTS.default(Balanced))


class BudgetSection(Section):
    """The number of nodes of every strategy: servers, replicas, spares and the store together.

    What a strategy does not need to serve is kept idle and warm, as spares.
    """

    nodes: Many


def _kinds(recovery: dps.Recovery) -> dict[str, str]:
    """Return the kinds by which a preset is known; their settings may differ."""
    axes = {"durability": recovery.durability, "outage": recovery.outage}
    return {axis: kind_of(type(choice)) for axis, choice in axes.items()}


class RecoverySection(Section):
    """One choice on each axis of recovery; a preset's name stands for its choices.

    `spares` is how many nodes this strategy keeps idle and warm, instead of `server.spares`.
    """

    durability: DurabilityChoice = Field(
        default_factory=lambda: DURABILITIES.default(dps.NoDurability)
    )
    outage: OutageSection = Field(default_factory=lambda: OUTAGES.default(dps.Wait))
    replay: section_of(dps.Replay) = Field(  # type: ignore[valid-type]
        default_factory=section_of(dps.Replay)
    )
    spares: Annotated[int, Field(ge=0, le=MOST)] | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def name(self) -> str:
        """The preset with these kinds of durability and outage (and replay), or "custom"."""
        made = self.build()
        if isinstance(made.outage, dps.Continue) and made.replay.policy != "sum":
            return "custom"
        kinds = _kinds(made)
        return next((name for name, each in PRESETS.items() if _kinds(each) == kinds), "custom")

    # Runs before the check for unknown keys, because validators before run in reverse order.
    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"preset": data}
        if not isinstance(data, dict):
            return data
        # A resolved configuration carries the name that follows from the axes.
        written = {k: v for k, v in data.items() if k != "name" or v not in (*PRESETS, "custom")}
        preset = written.pop("preset", None)
        if preset is None:
            return written
        check_known(str(preset), PRESETS, "recovery strategy")
        for axis, kind in _kinds(PRESETS[str(preset)]).items():
            given = written.get(axis, {})
            written[axis] = {"kind": kind, **given} if isinstance(given, dict) else given
        return written

    @model_validator(mode="after")
    def _goes_together(self) -> RecoverySection:
        with refusing():
            self.build()
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        section = handler(schema)
        inner = handler.resolve_ref_schema(section)
        inner["properties"] = {"preset": {"enum": list(PRESETS)}, **inner["properties"]}
        # With a preset, its kinds may be left out.
        inner["properties"] |= {
            axis: {"anyOf": [inner["properties"][axis], {"type": "object"}]}
            for axis in ("durability", "outage")
        }
        return {"anyOf": [{"enum": list(PRESETS)}, section]}

    def build(self) -> dps.Recovery:
        """Return the recovery of the parameter server."""
        return dps.Recovery(self.durability.build(), self.outage.build(), self.replay.build())


class ObjectiveSection(Section):
    """The objective of the training problem, and its distance from being stationary.

    Both are of all training data, with the penalty of the update rule; `step` is that of the
    proximal step by which stationarity is measured. `reference` is an objective to compare with,
    such as the optimum of a convex problem, and `target` the excess over it, as a fraction of it,
    whose time is of interest.
    """

    reference: PositiveFloat | None = None
    target: PositiveFloat | None = None
    step: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _excess_over_something(self) -> ObjectiveSection:
        if self.target is not None and self.reference is None:
            refuse("an excess over what? Give the reference as well", key="target")
        return self


class EvaluationSection(Section):
    """How often the evaluator scores a snapshot, by which `metric`, and which value is a `target`.

    Null is the accuracy, or R² where targets are numbers. Of RMSE and the loss less is better, so
    that a target is reached from above. With `objective`, the objective of the training problem is
    computed as well.
    """

    every_seconds: PositiveFloat = 0.25
    metric: Literal["accuracy", "auc", "r2", "rmse", "loss"] | None = None
    target: PositiveFloat | None = None
    objective: ObjectiveSection | None = None

    @model_validator(mode="after")
    def _target_can_be_reached(self) -> EvaluationSection:
        score = SCORES[self.metric or ACCURACY.key]
        if self.target is not None and self.target > score.highest:
            refuse(
                f"expected at most 1, got {self.target:g}: the score is a share. Of a loss, or of "
                "RMSE, give metric as well",
                key="target",
            )
        return self


class ComparisonSection(Section):
    """How strategies are compared: with which one, and by which metrics.

    `baseline` is a strategy's label; null selects `none` if it exists, otherwise the first one.
    """

    baseline: str | None = None
    metrics: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = (
        "effect_time_mean",  # effects are compared where there are faults
        "effect_gradients_mean",
        "effect_money_mean",
        "updates_lost",
        "accuracy_final",
        "gradients_per_second",
        "cost_usd",
    )

    @field_validator("metrics")
    @classmethod
    def _can_be_compared(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        comparable = [column.key for column in METRICS if column.better]
        for key in keys:
            check_known(key, comparable, "metric with a better direction")
        if len(set(keys)) < len(keys):
            refuse("a metric is given twice; keep one of them")
        return keys
