"""The fault plan of a configuration: a section for each kind of fault, its target and moment.

Sections say what was written; `build` hands on entries that `dps.core.faults.expansion` makes a
plan of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from dps.core.faults import plan as faults
from dps.core.faults.expansion import (
    LEAST_SHAPE,
    Between,
    Distribution,
    Drawn,
    Each,
    Entry,
    Flapping,
    Process,
    Recorded,
    Recurring,
    Unit,
)
from dps.core.names import NODE_ROLES
from flows.config.base import InputPath, Section
from flows.config.errors import refuse, refusing, suggest
from flows.config.faults.failure_models import FAILURE_MODELS
from flows.config.faults.trace import Row, check_row, fault_of, read_trace
from flows.config.plugins import Group, Registered
from flows.quoting import quoted

Nodes = Mapping[str, Sequence[str]]  # the names of a trial's nodes by role
POSITIONS = ("head", "middle", "tail")
MOMENTS = ("at_updates", "at_seconds", "phase", "after", "every")


# -- whom -------------------------------------------------------------------------------------


def _known_role(role: Any) -> Any:
    if role is not None and role not in NODE_ROLES:
        refuse(f"unknown role {quoted(role)}; {suggest(str(role), NODE_ROLES)}")
    return role


def _known_position(position: Any) -> Any:
    number = isinstance(position, int) and not isinstance(position, bool)
    if position is None or position in POSITIONS or (number and position >= 0):
        return position
    refuse(f"expected head, middle, tail, or a number from 0 (the head), got {quoted(position)}")


class PlaceSection(Section):
    """A target by what it is at the moment of the fault, not by its name.

    `role` and `index` stand for the node that has that place, or its replacement; `shard` and
    `position` for a replica by its place in the chain; `pick` draws one of the living nodes of a
    role, of a shard or of all, or takes all of them. With `each`, every node of a role has faults
    of its own; a trial without such nodes has none.
    """

    role: Annotated[str | None, BeforeValidator(_known_role)] = None
    index: NonNegativeInt | None = None
    shard: NonNegativeInt | None = None
    position: Annotated[Any, BeforeValidator(_known_position)] = None
    pick: Literal["random", "all", "each"] | None = None

    @model_validator(mode="after")
    def _is_a_place(self) -> PlaceSection:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        allowed = (
            {"pick", "role"},
            {"pick", "shard"},
            {"role", "index"},
            {"shard", "position"},
        )
        enough = given & {"pick", "role", "shard"}
        if not enough or not any(given <= keys for keys in allowed):
            refuse(
                "expected {role, index}, {shard, position}, or pick with a role or a shard; got "
                + (", ".join(sorted(given)) or "nothing")
            )
        if self.pick == "each" and self.role is None:
            refuse("each is of a role; expected {role: server, pick: each}", key="pick")
        return self

    @model_serializer(mode="wrap")
    def _only_what_is_said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}

    def build(self, nodes: Nodes) -> faults.Target:
        """Return the target; `nodes` are those of the trial."""
        if self.pick in ("random", "all"):
            return faults.Among(self.pick, self.role, self.shard)
        if self.shard is not None:
            return faults.InChain(self.shard, self.position or "head")
        here = nodes.get(str(self.role), ())
        index = self.index or 0
        # One that is not there is refused by its name, when the whole plan is checked.
        return faults.Seat(here[index] if index < len(here) else f"{self.role}-{index}")


def _form_of(target: Any) -> str:
    if isinstance(target, dict | PlaceSection):
        return "place"
    return "names" if isinstance(target, list | tuple) else "name"


def _some_form(target: Any) -> Any:
    if not target or not isinstance(target, str | list | tuple | dict | PlaceSection):
        refuse(
            "expected the name of a node, a list of names, or a place such as "
            "{shard: 0, position: head}"
        )
    return target


TargetSection = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[tuple[str, ...], Field(strict=False), Tag("names")]
    | Annotated[PlaceSection, Tag("place")],
    Discriminator(_form_of),
    BeforeValidator(_some_form),
]


# -- when -------------------------------------------------------------------------------------


class AfterSection(Section):
    """So many seconds after another fault, given by its place in the list, took effect."""

    fault: NonNegativeInt
    seconds: NonNegativeFloat = 0.0


class UpdatesRangeSection(Section):
    """A number of updates that is drawn uniformly, from the first up to below the second."""

    between: Annotated[tuple[int, int], Field(strict=False)]

    @model_validator(mode="after")
    def _is_a_range(self) -> UpdatesRangeSection:
        self.build()
        return self

    def build(self) -> Between:
        """Return the range."""
        with refusing("between"):
            return Between(*self.between, "updates")


class SecondsRangeSection(Section):
    """A number of seconds that is drawn uniformly, from the first up to the second."""

    between: Annotated[tuple[float, float], Field(strict=False)]

    @model_validator(mode="after")
    def _is_a_range(self) -> SecondsRangeSection:
        self.build()
        return self

    def build(self) -> Between:
        """Return the range."""
        with refusing("between"):
            return Between(*self.between, "seconds")


RANGES = (dict, UpdatesRangeSection, SecondsRangeSection)


def _form_of_moment(moment: Any) -> str:
    return "range" if isinstance(moment, RANGES) else "number"


def _some_updates(moment: Any) -> Any:
    if isinstance(moment, RANGES):
        return moment
    if not isinstance(moment, int) or isinstance(moment, bool):
        refuse(f"expected a whole number, or {{between: [200, 400]}}; got {quoted(moment)}")
    if moment <= 0:
        refuse(f"expected more than 0, got {moment}")
    return moment


def _some_seconds(moment: Any) -> Any:
    if isinstance(moment, RANGES):
        return moment
    if not isinstance(moment, int | float) or isinstance(moment, bool):
        refuse(f"expected a number, or {{between: [1, 3]}}; got {quoted(moment)}")
    if not 0 <= moment < math.inf:
        refuse(f"expected at least 0.0, got {moment}")
    return moment


UpdatesMoment = Annotated[
    Annotated[int, Tag("number")] | Annotated[UpdatesRangeSection, Tag("range")],
    Discriminator(_form_of_moment),
    BeforeValidator(_some_updates),
]
SecondsMoment = Annotated[
    Annotated[float, Tag("number")] | Annotated[SecondsRangeSection, Tag("range")],
    Discriminator(_form_of_moment),
    BeforeValidator(_some_seconds),
]


class EverySection(Section):
    """Again and again, at moments of a renewal process drawn from the trial's seed.

    The mean gap is `mtbf` seconds, or so many `updates`, or it follows from published figures:
    `like` names whose (`flows.config.faults.failure_models`), and one second of the trial stands
    for `hours_per_second` of that system's time.
    """

    mtbf: PositiveFloat | None = None
    updates: PositiveFloat | None = None
    like: str | None = None
    hours_per_second: PositiveFloat | None = None
    failures_per_year: PositiveFloat | None = None
    until: PositiveFloat
    distribution: Distribution = "exponential"
    shape: Annotated[float, Field(ge=LEAST_SHAPE)] = 1.0

    @field_validator("like")
    @classmethod
    def _is_known(cls, like: str | None) -> str | None:
        if like is not None and like not in FAILURE_MODELS:
            refuse(f"unknown failure model {quoted(like)}; {suggest(like, FAILURE_MODELS)}")
        return like

    @model_validator(mode="after")
    def _one_mean(self) -> EverySection:
        means = ("mtbf", "updates", "like")
        given = [name for name in means if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            refuse(f"expected exactly one of {', '.join(means)}; got {got}", key="mtbf")
        if self.like is None:
            for name in ("hours_per_second", "failures_per_year"):
                if getattr(self, name) is not None:
                    refuse("goes with like: only", key=name)
        elif self.hours_per_second is None:
            refuse(
                "is missing; say how many hours of that system's time one second of the trial "
                "stands for",
                key="hours_per_second",
            )
        return self

    @model_validator(mode="after")
    def _shape_of_something(self) -> EverySection:
        if self.like is not None and (self.distribution, self.shape) != ("exponential", 1.0):
            refuse("follows from like:; leave out distribution and shape", key="distribution")
        if self.shape != 1.0 and self.distribution == "exponential":
            refuse("only distribution: weibull or lognormal has a shape", key="shape")
        self.build()
        return self

    def build(self) -> Process:
        """Return the process."""
        if self.like is not None and self.hours_per_second is not None:
            model = FAILURE_MODELS[self.like]
            return model.process(self.until, self.hours_per_second, self.failures_per_year)
        unit: Unit = "seconds" if self.updates is None else "updates"
        mean = self.mtbf if self.updates is None else self.updates
        with refusing("shape"):
            return Process(mean or 0.0, self.until, self.distribution, self.shape, unit)


class MomentSection(Section):
    """What every fault says: when, in exactly one way."""

    at_updates: UpdatesMoment | None = None
    at_seconds: SecondsMoment | None = None
    phase: Literal["checkpoint", "recovery"] | None = None
    after: AfterSection | None = None
    every: EverySection | None = None

    @model_validator(mode="after")
    def _one_moment(self) -> MomentSection:
        given = [name for name in MOMENTS if getattr(self, name, None) is not None]
        if len(given) != 1:
            known = [name for name in MOMENTS if name in type(self).model_fields]
            got = " and ".join(given) or "none of them"
            reason = f"expected exactly one moment of {', '.join(known)}; got {got}"
            refuse(reason, key=given[-1] if given else known[0])
        return self

    @model_serializer(mode="wrap")
    def _only_one_moment(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        said = {k: v for k, v in handler(self).items() if k not in MOMENTS or v is not None}
        return {"kind": said.pop("kind"), **said}

    def moment(self) -> faults.When:
        """Return when it is to come; for what is drawn or recurs, this does not count."""
        if isinstance(self.at_updates, int):
            return faults.AtUpdates(self.at_updates)
        if self.phase is not None:
            return faults.During(self.phase)
        if self.after is not None:
            return faults.After(self.after.fault, self.after.seconds)
        return faults.AtSeconds(self.at_seconds if isinstance(self.at_seconds, float) else 0.0)

    def repeated(self, fault: faults.Fault) -> Entry:
        """Return the fault, or how it recurs, or which range its moment is drawn from."""
        return self.drawn(fault) if self.every is None else Recurring(fault, self.every.build())

    def drawn(self, entry: faults.Fault | Flapping) -> Entry:
        """Return the entry, with the range that its moment is drawn from if there is one."""
        for moment in (self.at_updates, self.at_seconds):
            if isinstance(moment, UpdatesRangeSection | SecondsRangeSection):
                return Drawn(entry, moment.build())
        return entry


class AimedSection(MomentSection):
    """What every fault says that hits nodes: whom and when."""

    target: TargetSection

    @model_validator(mode="after")
    def _each_by_itself(self) -> AimedSection:
        if isinstance(self.target, PlaceSection) and self.target.pick == "each" and not self.every:
            refuse("each node has moments of its own only with every:", key="target.pick")
        return self

    def aim(self, nodes: Nodes) -> faults.Target:
        """Return the target; `nodes` are those of the trial."""
        return self.target.build(nodes) if isinstance(self.target, PlaceSection) else self.target

    def aimed(self, nodes: Nodes, made: Callable[[faults.Target], faults.Fault]) -> Entry:
        """Return the entry of the plan: one fault, or one of each node that is meant."""
        target = self.target
        if self.every and isinstance(target, PlaceSection) and target.pick == "each":
            names = nodes.get(str(target.role), ())
            return Each(tuple(made(faults.Seat(name)) for name in names), self.every.build())
        return self.repeated(made(self.aim(nodes)))


# -- what -------------------------------------------------------------------------------------


class NodeFaultSection(AimedSection):
    """What a fault says whose own keys are fields of what it `makes`."""

    makes: ClassVar[Callable[..., faults.Fault]]

    def build(self, nodes: Nodes) -> Entry:
        """Return the entry of the plan."""
        own = type(self).model_fields.keys() - AimedSection.model_fields.keys() - {"kind"}
        settings = {name: getattr(self, name) for name in own}
        return self.aimed(nodes, lambda target: self.makes(target, self.moment(), **settings))


class KillSection(NodeFaultSection):
    """SIGKILL to the process of a node; a fresh one takes its place `back_after` seconds later.

    null: never. `by: requeue` has its job end and be queued again instead, from where it comes back
    by itself; `by: host` sets its host down, with all nodes on it, until they are replaced.
    """

    makes = faults.Kill
    ambiguous: ClassVar[Mapping[str, str]] = {
        "seconds": "did you mean 'back_after' (it is back so many seconds later), or 'at_seconds' "
        "(it is killed so many seconds into the training)?"
    }
    kind: Literal["kill"]
    back_after: NonNegativeFloat | None = 1.0
    by: faults.Way = "signal"

    @model_validator(mode="after")
    def _comes_back_by_itself(self) -> KillSection:
        if self.by == "requeue" and self.back_after != 1.0:
            refuse("a requeued job comes back by itself; leave it out", key="back_after")
        return self


class PauseSection(NodeFaultSection):
    """SIGSTOP to the process of a node; SIGCONT follows `seconds` later.

    With `host`, the monitor of its host is silent too, as if the whole host hung.
    """

    makes = faults.Pause
    kind: Literal["pause"]
    seconds: PositiveFloat = 2.0
    host: bool = False


class SlowSection(NodeFaultSection):
    """A node takes `factor` times as long for everything, for so many seconds."""

    makes = faults.Slow
    kind: Literal["slow"]
    factor: Annotated[float, Field(gt=1)] = 4.0
    seconds: PositiveFloat = 2.0


class CutSection(NodeFaultSection):
    """The links of a node are cut for so many seconds, for what it sends, or is sent, or both."""

    makes = faults.Cut
    kind: Literal["cut"]
    seconds: PositiveFloat = 2.0
    direction: Literal["both", "in", "out"] = "both"


class DelaySection(AimedSection):
    """Every message to and from a node takes `delay_seconds` longer, for so many seconds."""

    kind: Literal["delay"]
    delay_seconds: PositiveFloat = 0.05
    seconds: PositiveFloat = 2.0

    def build(self, nodes: Nodes) -> Entry:
        """Return the entry of the plan."""
        lasts = (self.delay_seconds, self.seconds)
        return self.aimed(nodes, lambda target: faults.Delay(target, self.moment(), *lasts))


class DiskFullSection(NodeFaultSection):
    """Every write of a node to its disk fails for so many seconds."""

    makes = faults.DiskFull
    kind: Literal["disk_full"]
    seconds: PositiveFloat = 2.0


class CorruptSection(MomentSection):
    """The newest checkpoint of a shard is damaged."""

    kind: Literal["corrupt"]
    shard: NonNegativeInt

    def build(self, nodes: Nodes) -> Entry:
        """Return the entry of the plan."""
        return self.repeated(faults.Corrupt(self.shard, self.moment()))


class FlapSection(AimedSection):
    """A node goes down and comes back, `times` times: paused, or killed and replaced."""

    kind: Literal["flap"]
    by: Literal["pause", "kill"] = "pause"
    times: Annotated[int, Field(ge=2, le=1000)] = 3
    up_seconds: NonNegativeFloat = 1.0
    down_seconds: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _once(self) -> FlapSection:
        if self.every is not None:
            refuse("flapping recurs by itself; expected one of the other moments", key="every")
        return self

    def build(self, nodes: Nodes) -> Entry:
        """Return the entry of the plan."""
        cls = faults.Kill if self.by == "kill" else faults.Pause
        fault = cls(self.aim(nodes), self.moment(), self.down_seconds)
        return self.drawn(Flapping(fault, self.times, self.up_seconds))


class TraceSection(Section):
    """The faults of a recorded trace, a CSV file; the rows that were read are part of the trial."""

    kind: Literal["trace"]
    csv: InputPath
    rows: Annotated[tuple[Row, ...] | None, Field(strict=False)] = None

    @field_validator("rows")
    @classmethod
    def _can_happen(cls, rows: tuple[Row, ...] | None) -> tuple[Row, ...] | None:
        with refusing():
            for number, row in enumerate(rows or (), 1):
                check_row(f"row {number}", row)
        return rows

    @model_validator(mode="after")
    def _read(self) -> TraceSection:
        if self.rows is None:
            with refusing("csv"):
                # Not as if it had been written: what is read later may be another file.
                self.__dict__["rows"] = read_trace(Path(self.csv))
        return self

    def build(self, nodes: Nodes) -> Entry:
        """Return the entry of the plan."""
        return Recorded(tuple(map(fault_of, self.rows or ())))


class _RegisteredFault(Registered, AimedSection):
    """A disturbance of a kind that an installed package registers."""

    def build(self, nodes: Nodes) -> Entry:
        """Return the entry of the plan; raises `ConfigurationError`."""
        return self.aimed(nodes, self._aimed_at)

    def check_settings(self) -> None:
        """Refuse settings that the class refuses; raises `ConfigurationError`."""
        self._aimed_at(self.aim({}))  # whatever nodes there are: each of none would check nothing

    def _aimed_at(self, target: faults.Target) -> faults.Disturbing:
        fault: faults.Disturbing = self.made(target=target, when=self.moment())
        return fault


def _wrong_fault(kind: str, cls: type) -> str | None:
    from dps.chaos.kinds import is_carried_out

    if not issubclass(cls, faults.Disturbing):
        return "is not derived from dps.core.faults.plan.Disturbing"
    if cls.kind != kind:
        return f"has the kind {cls.kind!r}, which its entry point must be named"
    if not is_carried_out(cls):
        return "is carried out by nothing: enter that with dps.chaos.kinds.effect_of"
    return None


FAULTS = Group(
    "dps.faults",
    _RegisteredFault,
    needed=("kind",),
    given=("target", "when"),
    objection=_wrong_fault,
)

FaultSection = Annotated[
    KillSection
    | PauseSection
    | SlowSection
    | CutSection
    | DelaySection
    | DiskFullSection
    | CorruptSection
    | FlapSection
    | TraceSection,
    Field(discriminator="kind"),
    FAULTS,
]
