"""The sections of a configuration, one pydantic model for each, and what they build of `dps`.

Types are exact (a text is no number), unknown keys are refused with the nearest known one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    computed_field,
    field_validator,
    model_validator,
)

import dps
from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.outage import Outage
from dps.core.placement.hash_ring import (
    BALANCED,
    MOST_VIRTUAL_NODES,
    VIRTUAL_NODES,
    ConsistentHash,
)
from dps.protocol.durabilities.checkpoint import CHECKPOINT_EVERY, LEAST, MOST
from dps.protocol.durability import Durability
from dps.protocol.timings import Timings
from dps.protocol.transport import TransportChoice
from flows.config.errors import refuse, refusing, suggest
from flows.config.limits import LONGEST_NAME, MOST_NODES
from flows.config.plugins import Group, Registered
from flows.config.yaml_document import EVERY_ENTRY, FromCommandLine
from flows.metrics import COLUMNS
from flows.metrics.score import ACCURACY, SCORES
from flows.quoting import quoted

T = TypeVar("T")

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


# With this as context, what was recorded is read: files that it names were there then.
OF_RECORD = {"of_record": True}


def is_of_record(info: ValidationInfo) -> bool:
    """Whether a section is read from a record; then only who uses what it names looks for it."""
    return info.context is not None and OF_RECORD.items() <= info.context.items()


def in_folder(folder: Path) -> dict[str, Any]:
    """Return the context of what is read from a file in `folder`, which paths are relative to."""
    return {"folder": folder}


def absolute(path: Any, info: ValidationInfo) -> Any:
    """Return a path as absolute: see `InputPath`."""
    if not isinstance(path, str) or is_of_record(info):
        return path
    folder = Path() if isinstance(path, FromCommandLine) else folder_of(info)
    # Unlike that of pathlib, it leaves the name of a user whom nobody knows as it is.
    return str(Path(folder, os.path.expanduser(path)).absolute())


# A file or folder that is read: relative to the configuration file, or if --set names it, to the
# working directory. It is recorded as absolute.
InputPath = Annotated[str, BeforeValidator(absolute)]


def folder_of(info: ValidationInfo) -> Path:
    """Return the folder of the configuration that a section is read from."""
    folder: Path = (info.context or {}).get("folder", Path())
    return folder


def _safe(name: str) -> str:
    if not _SAFE_NAME.fullmatch(name):
        refuse(f"{quoted(name)} names a folder: use letters, digits and . _ - only")
    if len(name) > LONGEST_NAME:
        refuse(f"names a folder: expected {LONGEST_NAME} characters at most, got {len(name):,}")
    return name


SafeName = Annotated[str, AfterValidator(_safe)]

# A number of nodes, or of what nodes hold.
Count = Annotated[int, Field(gt=0, le=MOST_NODES)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST_NODES)]


def is_key(model: type[BaseModel], key: str) -> bool:
    """Whether a model, or a section in it, may have a dotted key; of kinds of dps's own only."""
    models, parts = [model], key.split(".")
    for number, part in enumerate(parts):
        if part == EVERY_ENTRY or part.isdigit():
            continue
        found = [each.model_fields[part].annotation for each in models if part in each.model_fields]
        if part in ("kind", "preset") and number == len(parts) - 1:
            return bool(models)
        if not found:
            return False
        if any(map(_has_any_key, found)):
            return True
        models = [inner for annotation in found for inner in _models_in(annotation)]
    return True


def _has_any_key(annotation: Any) -> bool:
    return get_origin(annotation) is dict


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a value of a type may be, or hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


class Section(BaseModel):
    """Base of every section: immutable, exact types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    # Unknown keys by which more than one of the known may be meant, each with what to ask.
    ambiguous: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, dict) else ():
            if key not in cls.model_fields:
                told = cls.ambiguous.get(str(key)) or suggest(str(key), cls.model_fields)
                refuse(f"unknown key; {told}", key=str(key))
        return data


def _of_kind(data: Any) -> Any:
    return {"kind": data} if isinstance(data, str) else data


# Of a section that is chosen by its `kind`: the kind alone stands for it with all else left out.
KIND_ALONE = BeforeValidator(_of_kind)


class Built(Section, Generic[T]):
    """A section that stands for an object of dps: its keys are the fields of what it `makes`."""

    makes: ClassVar[Callable[..., Any]]

    def build(self) -> T:
        """Return the object."""
        made: T = self.makes(**self.model_dump(exclude={"kind"}))
        return made


class StragglingSection(Section):
    """Gradients that take `factor` times `compute_seconds`.

    Each gradient is one of them with the probability `share`, drawn for every worker from the seed
    of the trial; `workers` are the numbers of those that it happens to, null is all.
    """

    factor: Annotated[float, Field(ge=1)]
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    workers: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1)] | None = None


class TrainingSection(Section):
    """How much is computed, by how many, and of what.

    `updates` gradients in all are split evenly over the workers, each of whom ends when its `share`
    is computed; or the workers stop `together`, when the shards have applied as many. A gradient
    takes at least `compute_seconds`, which stands for a heavier model without using the core, and
    longer if it is `straggling`. Workers draw their batches from all examples (`shared`), or each
    from its part of them in the order of their classes (`by_class`). They compute on weights that
    may lack their own last `ahead` updates, which are still on their way.
    """

    workers: Count = 2
    updates: PositiveInt
    batch_size: PositiveInt = 32
    compute_seconds: NonNegativeFloat = 0.0
    workers_per_node: Count = 1
    straggling: StragglingSection | None = None
    partition: Literal["shared", "by_class"] = "shared"
    ahead: NonNegativeInt = 0
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


class ChangeSection(Section):
    """Another number of servers, of workers or of both, from a moment of the training on."""

    at_updates: PositiveInt | None = None
    at_seconds: NonNegativeFloat | None = None
    servers: Count | None = None
    workers: Count | None = None

    @model_validator(mode="after")
    def _says_when_and_what(self) -> ChangeSection:
        if (self.at_updates is None) == (self.at_seconds is None):
            refuse("expected one moment: at_updates or at_seconds")
        if self.servers is None and self.workers is None:
            refuse("expected what changes: servers, workers or both")
        return self

    def is_due(self, updates: int, seconds: float) -> bool:
        """Whether its moment has come, so many updates and seconds after the start."""
        if self.at_updates is not None:
            return updates >= self.at_updates
        return self.at_seconds is not None and seconds >= self.at_seconds


class BspSection(Built[Consistency]):
    """Bulk synchronous."""

    makes = BSP
    kind: Literal["bsp"]


class SspSection(Built[Consistency]):
    """Stale synchronous with bound `tau`."""

    makes = SSP
    kind: Literal["ssp"]
    tau: NonNegativeInt


class AspSection(Built[Consistency]):
    """Asynchronous."""

    makes = ASP
    kind: Literal["asp"] = "asp"


ConsistencySection = Annotated[
    BspSection | SspSection | AspSection, Field(discriminator="kind"), KIND_ALONE
]


class BalancedSection(Section):
    """Whichever server has the fewest shards gets the next."""

    kind: Literal["balanced"] = "balanced"

    def build(self) -> str:
        """Return the choice as `ParameterServer` takes it."""
        return BALANCED


class ConsistentHashSection(Built[ConsistentHash]):
    """Each shard goes to the server that comes next on a ring of `virtual_nodes` for each."""

    makes = ConsistentHash
    kind: Literal["consistent_hash"]
    virtual_nodes: Annotated[int, Field(ge=1, le=MOST_VIRTUAL_NODES)] = VIRTUAL_NODES


PlacementSection = Annotated[BalancedSection | ConsistentHashSection, Field(discriminator="kind")]


class ServerSection(Section):
    """The parameter server: its shards, and nodes kept idle and warm for a loss.

    `lease` is for how many seconds an unreachable node or worker is treated as alive, `patience`
    for how many dps waits for a busy one; `servers` is how many nodes hold the shards at first,
    None: one for each replica of each; `transport` is how nodes send each other arrays; `placement`
    decides which of the `servers` holds which shard.
    """

    shards: Count = 2
    servers: Count | None = None
    spares: CountOrNone = 0
    lease: PositiveFloat = Timings().lease
    patience: PositiveFloat = Timings().patience
    transport: TransportChoice = "auto"
    placement: PlacementSection = BalancedSection()


class BudgetSection(Section):
    """How many nodes every strategy has for servers, replicas, spares and the store together.

    What a strategy does not need to serve is kept idle and warm, as spares.
    """

    nodes: Count


class NoDurabilitySection(Built[Durability]):
    """Shard state survives nothing."""

    makes = dps.NoDurability
    kind: Literal["none"] = "none"


def _seen_by_all_nodes(path: str | None) -> str | None:
    from dps.cluster.driver.setup import shared_path

    with refusing():
        if path is not None:
            shared_path(path)
    return path


class _CheckpointInterval(Section):
    """Where checkpoints are written, and how often: every 100 updates if nothing is said."""

    every: PositiveInt | Literal["auto"] | None = None
    seconds: PositiveFloat | None = None
    path: str | None = None
    keep: PositiveInt = 2

    _all_nodes_see_it = field_validator("path")(_seen_by_all_nodes)

    @model_validator(mode="after")
    def _some_interval(self) -> Self:
        if self.every is None and self.seconds is None:
            # Not as if it had been written: an axis over `seconds` must be able to replace it.
            self.__dict__["every"] = CHECKPOINT_EVERY
        return self


class CheckpointSection(_CheckpointInterval, Built[Durability]):
    """Shard state survives in files, written in an interval of updates, of seconds, or of both.

    With `every: auto` the interval follows from what writes cost and how often shards are lost; it
    is from `least` to `most` updates, and begins by the `mtbf` that is given, if one is.
    """

    makes = dps.Checkpoint
    kind: Literal["checkpoint"]
    mode: Literal["sync", "async"] = "async"
    scope: Literal["shard", "all"] = "shard"
    least: PositiveInt = LEAST
    most: PositiveInt = MOST
    mtbf: PositiveFloat | None = None

    @model_validator(mode="after")
    def _is_accepted(self) -> Self:
        with refusing():
            self.build()
        return self


class PartialCheckpointSection(Built[Durability]):
    """Shard state survives in files, of which each holds what has changed most."""

    makes = dps.PartialCheckpoint
    kind: Literal["partial_checkpoint"]
    every: PositiveInt = CHECKPOINT_EVERY
    share: Annotated[float, Field(gt=0, le=1)] = 0.25
    mode: Literal["sync", "async"] = "async"
    path: str | None = None
    keep: PositiveInt = 1

    _all_nodes_see_it = field_validator("path")(_seen_by_all_nodes)


class LayerSection(_CheckpointInterval):
    """Checkpoints that are written in the background, below what acks wait for."""

    every: PositiveInt | None = None


class _AboveLayer(Built[Durability]):
    """A durability that may have a layer of checkpoints below."""

    below: LayerSection | None = None

    def build(self) -> Durability:
        """Return the durability, with the layer below if there is one."""
        above = self.makes(**self.model_dump(exclude={"kind", "below"}))
        if self.below is None:
            return above  # type: ignore[no-any-return]
        return dps.Layered(above, dps.Checkpoint(**self.below.model_dump()))


class ChainSection(_AboveLayer):
    """Shard state lives on a chain of nodes."""

    makes = dps.Chain
    kind: Literal["chain"]
    replicas: Count = 2
    reads: Literal["tail", "any"] = "tail"
    aggregate: PositiveInt = 1
    linger: PositiveFloat = 0.01


class SharedStoreSection(_AboveLayer):
    """Shard state lives in a state store on another node, or in each of several."""

    makes = dps.SharedStore
    kind: Literal["shared_store"]
    every: PositiveInt = 16
    stores: Count = 1


class WorkerCacheSection(Built[Durability]):
    """Shard state is rebuilt from the freshest copy that workers hold."""

    makes = dps.WorkerCache
    kind: Literal["worker_cache"]


class _RegisteredDurability(Registered, Section):
    """A durability that an installed package registers."""

    def build(self) -> Durability:
        """Return the choice of durability."""
        durability: Durability = self.made()
        return durability


def _wrong_durability(kind: str, cls: type) -> str | None:
    return None if issubclass(cls, Durability) else "is not derived from dps.Durability"


DURABILITIES = Group(
    "dps.durabilities", _RegisteredDurability, on_wire=True, objection=_wrong_durability
)

DurabilitySection = Annotated[
    NoDurabilitySection
    | CheckpointSection
    | PartialCheckpointSection
    | ChainSection
    | SharedStoreSection
    | WorkerCacheSection,
    Field(discriminator="kind"),
    DURABILITIES,
    KIND_ALONE,
]


class WaitSection(Built[Outage]):
    """A worker whose shard is down waits."""

    makes = dps.Wait
    kind: Literal["wait"] = "wait"


class ContinueSection(Built[Outage]):
    """A worker whose shard is down computes on and buffers its gradients."""

    makes = dps.Continue
    kind: Literal["continue"]
    limit: PositiveInt = 32
    buffer: Literal["mailbox", "worker"] = "mailbox"


OutageSection = Annotated[WaitSection | ContinueSection, Field(discriminator="kind"), KIND_ALONE]


class ReplaySection(Built[dps.Replay]):
    """How buffered updates are applied after an outage."""

    makes = dps.Replay
    policy: Literal[
        "sum", "mean", "each", "staleness_scaled", "clip", "drop_older", "published"
    ] = "sum"
    clip_norm: PositiveFloat = 1.0
    drop_older_than: NonNegativeInt = 100


# The axes of each preset by kind; their settings are the defaults of the sections.
PRESET_KINDS: Mapping[str, Mapping[str, str]] = {
    "none": {"durability": "none", "outage": "wait"},
    "checkpoint": {"durability": "checkpoint", "outage": "wait"},
    "chain": {"durability": "chain", "outage": "wait"},
    "stateless": {"durability": "shared_store", "outage": "continue"},
}


class RecoverySection(Section):
    """One choice on each axis of recovery; a preset's name stands for its three choices."""

    durability: DurabilitySection = NoDurabilitySection()
    outage: OutageSection = WaitSection()
    replay: ReplaySection = ReplaySection()
    # How many nodes this strategy keeps idle and warm, instead of `server.spares`.
    spares: CountOrNone | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def name(self) -> str:
        """The preset with these kinds of durability and outage (and replay), else "custom"."""
        if getattr(self.durability, "below", None) is not None:
            return "custom"
        kinds = {"durability": self.durability.kind, "outage": self.outage.kind}
        if self.outage.kind == "continue" and self.replay.policy != "sum":
            return "custom"
        return next((name for name, axes in PRESET_KINDS.items() if axes == kinds), "custom")

    # Runs before the check for unknown keys, for validators before run in reverse order.
    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, data: Any) -> Any:
        if isinstance(data, str):
            return _preset_axes(data)
        if not isinstance(data, dict):
            return data
        # A resolved configuration carries the name that follows from the axes.
        written = {
            k: v for k, v in data.items() if k != "name" or v not in (*PRESET_KINDS, "custom")
        }
        axes = _preset_axes(written.pop("preset")) if "preset" in written else {}
        for axis, kind in axes.items():
            given = written.get(axis, {})
            written[axis] = {**kind, **given} if isinstance(given, dict) else given
        return written

    @model_validator(mode="after")
    def _goes_together(self) -> RecoverySection:
        with refusing():
            self.build()
        return self

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
    that a target is reached from above. With `objective`, it tells the objective of the training
    problem as well.
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
    """What strategies are compared by: with which one, in which figures of `flows.metrics`.

    `baseline` is a strategy's label; null takes `none` if there is one, else the first. `resolve`
    names differences worth finding: the repeats needed are those for them instead of for the
    difference that was seen.
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
    resolve: dict[str, PositiveFloat] = Field(default_factory=dict)

    @field_validator("metrics")
    @classmethod
    def _can_be_compared(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        for index, key in enumerate(metrics):
            _require_comparable(key)
            if key in metrics[:index]:
                refuse(f"{quoted(key)} is given twice; keep one of them")
        return metrics

    @field_validator("resolve")
    @classmethod
    def _can_be_resolved(cls, resolve: dict[str, float]) -> dict[str, float]:
        for key in resolve:
            _require_comparable(key)
        return resolve


def _require_comparable(key: str) -> None:
    comparable = [column.key for column in COLUMNS if column.better]
    if key not in comparable:
        refuse(
            f"{quoted(key)} is no figure of which more or less is better; "
            f"{suggest(key, comparable)}"
        )


def _preset_axes(name: Any) -> dict[str, dict[str, str]]:
    if not isinstance(name, str) or name not in PRESET_KINDS:
        refuse(f"unknown recovery strategy {quoted(name)}; {suggest(str(name), PRESET_KINDS)}")
    return {axis: {"kind": kind} for axis, kind in PRESET_KINDS[name].items()}
