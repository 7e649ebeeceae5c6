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
    """Slow gradients."""

    factor: Annotated[float, Field(ge=1)]
    """Multiple of `compute_seconds` that a slow gradient takes."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability that a gradient is slow, drawn for each worker from the seed."""
    workers: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] | None = None
    """Numbers of the affected workers; `null`: all."""


class TrainingSection(Section):
    """Number of gradients and workers, and how workers draw their batches."""

    workers: Many = 2
    """Number of workers."""
    updates: PositiveInt
    """Total number of gradients, or of updates if `local_steps` is above 1."""
    batch_size: PositiveInt = 32
    """Examples per gradient."""
    compute_seconds: NonNegativeFloat = 0.0
    """Minimum time of a gradient, without use of the core."""
    workers_per_node: PositiveInt = 1
    """Workers that share a node, as threads."""
    straggling: StragglingSection | None = None
    """Slow gradients; needs `compute_seconds`."""
    partition: Literal["shared", "by_class"] = "shared"
    """Workers draw from all examples, or each from its part in the order of classes."""
    ahead: NonNegativeInt = 0
    """Updates of a worker in flight while it computes: up to `tau` under `ssp`, 0 under `bsp`."""
    local_steps: PositiveInt = 1
    """Gradients per update."""
    inner: OptimizerSection | None = None
    """Rule of a worker for its local steps."""
    epochs: PositiveInt | None = None
    """Lease `updates / epochs` batches in each epoch, instead of equal shares."""
    lease: PositiveInt = LEASE
    """Batches per lease, with `epochs`."""
    stop: Literal["share", "together"] = "share"
    """A worker ends after its equal share of the gradients, or together with all others."""

    @model_validator(mode="after")
    def _straggling_slows_something(self) -> TrainingSection:
        if self.straggling is None:
            return self
        if not self.compute_seconds:
            reason = "it multiplies compute_seconds, which is 0; set that to a time, such as 0.01"
            refuse(reason, key="straggling")
        unknown = [n for n in self.straggling.workers or () if n >= self.workers]
        if unknown:
            reason = f"no worker {unknown[0]}; expected 0 to {self.workers - 1}"
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
            reason = (
                "expected 0 with inner: weights without the worker's last update undo local steps"
            )
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
            reason = (
                f"expected a divisor of the {self.updates} updates: each epoch has the same number"
            )
            refuse(reason, key="epochs")
        others = {"partition": "shared", "stop": "share"}
        for key, needed in others.items():
            if getattr(self, key) != needed:
                refuse(f"expected {needed} with epochs", key=key)
        return self

    def leases(self, seed: int) -> dict[str, Any]:
        """Return the arguments of `ParameterServer.run` to lease data, if workers do so."""
        if self.epochs is None:
            return {}
        size = self.batch_size * self.local_steps
        sizes = {"data": self.updates // self.epochs * size, "batch_size": size}
        return {**sizes, "epochs": self.epochs, "shuffle": seed, "lease": self.lease}


class ChangeSection(Section):
    """A new number of servers, workers or both, at a moment."""

    at_updates: PositiveInt | None = None
    """When all shards have applied these updates."""
    at_seconds: NonNegativeFloat | None = None
    """Seconds after the start of the training."""
    servers: Many | None = None
    """New number of servers."""
    workers: Many | None = None
    """New number of workers."""

    @model_validator(mode="after")
    def _has_moment_and_change(self) -> ChangeSection:
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
    """The parameter server: shards, nodes and timings."""

    shards: Many = 2
    """Number of shards."""
    servers: Many | None = None
    """Initial nodes that hold replicas; `null`: one for each replica."""
    spares: Annotated[int, Field(ge=0, le=MOST)] = 0
    """Idle, warm nodes that replace lost ones."""
    lease: PositiveFloat = Timings().lease
    """Seconds for which an unreachable node or worker is treated as alive."""
    patience: PositiveFloat = Timings().patience
    """Seconds for which dps waits for a busy node or worker."""
    transport: TransportChoice = "auto"
    """How nodes send arrays to each other."""
    placement: PlacementSection = PLACEMENTS.default(Balanced)
    """How shards are assigned to servers."""


class BudgetSection(Section):
    """Equal nodes for every strategy; nodes that a strategy does not need are spares."""

    nodes: Many
    """Number of servers, replicas, spares and stores together."""


def _kinds(recovery: dps.Recovery) -> dict[str, str]:
    """Return the kinds by which a preset is known; their settings may differ."""
    axes = {"durability": recovery.durability, "outage": recovery.outage}
    return {axis: kind_of(type(choice)) for axis, choice in axes.items()}


class RecoverySection(Section):
    """A choice on each axis of recovery; a preset's name stands for its choices."""

    durability: DurabilityChoice = DURABILITIES.default(dps.NoDurability)
    """Where the state of a shard survives."""
    outage: OutageSection = OUTAGES.default(dps.Wait)
    """Behaviour of workers during an outage of a shard."""
    replay: section_of(dps.Replay) = Field(  # type: ignore[valid-type]
        default_factory=section_of(dps.Replay)
    )
    """How buffered gradients are applied after an outage."""
    spares: Annotated[int, Field(ge=0, le=MOST)] | None = None
    """Spares of this strategy, instead of `server.spares`."""

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
        about = "Strategy whose choices the other keys change."
        preset = {"enum": list(PRESETS), "description": about}
        inner["properties"] = {"preset": preset, **inner["properties"]}
        # With a preset, its kinds may be left out.
        inner["properties"] |= {
            axis: {**choice, "anyOf": [*choice["anyOf"], {"type": "object"}]}
            for axis, choice in inner["properties"].items()
            if axis in ("durability", "outage")
        }
        return {"anyOf": [{"enum": list(PRESETS)}, section]}

    def build(self) -> dps.Recovery:
        """Return the recovery of the parameter server."""
        return dps.Recovery(self.durability.build(), self.outage.build(), self.replay.build())


class ObjectiveSection(Section):
    """The objective of the training problem, with the penalty of the update rule."""

    reference: PositiveFloat | None = None
    """Objective to compare with, such as the optimum of a convex problem."""
    target: PositiveFloat | None = None
    """Relative excess over `reference`; adds metrics of the time until it is reached."""
    step: PositiveFloat = 1.0
    """Step of the gradient mapping that measures stationarity."""

    @model_validator(mode="after")
    def _excess_over_something(self) -> ObjectiveSection:
        if self.target is not None and self.reference is None:
            refuse("an excess needs a reference; give the reference as well", key="target")
        return self


class EvaluationSection(Section):
    """Evaluation of snapshots on the test examples."""

    every_seconds: PositiveFloat = 0.25
    """Seconds between two evaluations, on a separate node."""
    metric: Literal["accuracy", "auc", "r2", "rmse", "loss"] | None = None
    """Score; `null`: `accuracy` for classes, `r2` for numbers."""
    target: PositiveFloat | None = None
    """Score whose time and gradients are metrics; reached from above for `rmse` and `loss`."""
    objective: ObjectiveSection | None = None
    """Record the training loss with penalty, and the distance from a stationary point."""

    @model_validator(mode="after")
    def _target_can_be_reached(self) -> EvaluationSection:
        score = SCORES[self.metric or ACCURACY.key]
        if self.target is not None and self.target > score.highest:
            refuse(
                f"expected at most 1, got {self.target:g}: the default score is a share. For a "
                "loss or RMSE, give metric as well",
                key="target",
            )
        return self


class ComparisonSection(Section):
    """Exploratory comparison of strategies."""

    baseline: str | None = None
    """Label of a strategy; `null`: `none`, otherwise the first one."""
    metrics: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = (
        "effect_time_mean",  # effects are compared where there are faults
        "effect_gradients_mean",
        "effect_money_mean",
        "updates_lost",
        "accuracy_final",
        "gradients_per_second",
        "cost_usd",
    )
    """Keys of metrics with a better direction."""

    @field_validator("metrics")
    @classmethod
    def _can_be_compared(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        comparable = [column.key for column in METRICS if column.better]
        for key in keys:
            check_known(key, comparable, "metric with a better direction")
        if len(set(keys)) < len(keys):
            refuse("a metric is given twice; keep one of them")
        return keys
