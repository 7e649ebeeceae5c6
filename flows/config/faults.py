"""The fault plan of a configuration: a section for each kind of fault, and what cannot happen.

Sections are derived from the dataclasses of `dps.faults`, which check their own values. This module
defines the notation of targets and moments, and checks a plan against the rest of the trial.
"""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
    model_validator,
)

from dps import faults as dps_faults
from dps.core.names import original, role_of
from dps.errors import ConfigurationError
from dps.faults import (
    KINDS,
    Among,
    Corrupt,
    DiskFull,
    Fault,
    FaultPlan,
    InChain,
    Kill,
    Lasting,
    Seat,
    Target,
    When,
)
from dps.faults.expansion import Entry
from flows.config.errors import refuse, refusing, suggest
from flows.config.sections import Derived, Group, InputPath, Section, section_of
from flows.quoting import quoted

if TYPE_CHECKING:
    from flows.config.experiment import TrialConfig

Objection = tuple[str, str]  # a dotted key and a reason

MOMENTS = ("at_updates", "at_seconds", "phase", "after", "every")
NO_CHECKPOINTS = "no checkpoints are written; expected recovery.durability: checkpoint"
NO_FILES = "needs files on this machine; expected a folder as recovery.durability.path, or none"


class _Sparse(Derived):
    """A derived section whose keys that are null by default are not recorded."""

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        return {k: v for k, v in handler(self).items() if v is not None or defaults[k] is not None}


# -- targets and moments -----------------------------------------------------------------------


class SeatSection(Section):
    """The node that has the place of a node of a role at the start, or its replacement."""

    role: Literal["server", "replica", "spare", "store", "worker", "evaluator"]
    """Role of the node."""
    index: NonNegativeInt = 0
    """Number of the node in its role."""

    def build(self, names: Sequence[str]) -> Seat:
        """Return the target; one that is not there is refused with the whole plan."""
        here = [name for name in names if role_of(name) == self.role]
        return Seat(here[self.index] if self.index < len(here) else f"{self.role}-{self.index}")


class BetweenSection(Section):
    """A moment that each seed draws uniformly, from the first number up to below the second."""

    between: Annotated[tuple[float, float], Field(strict=False)]
    """First number, and the number above the last one."""


IN_CHAIN, AMONG = section_of(InChain, _Sparse), section_of(Among, _Sparse)


def _target(target: Any) -> Any:
    if isinstance(target, dict) and target:
        place = AMONG if "pick" in target else IN_CHAIN if "shard" in target else SeatSection
        return place.model_validate(target)
    several = isinstance(target, list | tuple) and all(isinstance(name, str) for name in target)
    if not target or not (several or isinstance(target, str | Section)):
        places = "{role: server, index: 0}, {shard: 0, position: head} or {pick: random}"
        refuse(f"expected the name of a node, a list of names, or a place such as {places}")
    return tuple(target) if several else target


TargetSection = Annotated[
    str | tuple[str, ...] | SeatSection | SerializeAsAny[Derived],
    BeforeValidator(
        _target, json_schema_input_type=str | list[str] | SeatSection | IN_CHAIN | AMONG
    ),
]


def _or_range(number: Any) -> BeforeValidator:
    """Let a number be a range; each is refused by its own type, and not by the union."""
    exact = TypeAdapter(number, config=ConfigDict(strict=True, allow_inf_nan=False))

    def check(moment: Any) -> Any:
        if isinstance(moment, dict):
            return BetweenSection.model_validate(moment)
        return moment if isinstance(moment, BetweenSection) else exact.validate_python(moment)

    return BeforeValidator(check, json_schema_input_type=number | BetweenSection)


# -- faults ------------------------------------------------------------------------------------


class MomentSection(_Sparse):
    """Common part of all faults: exactly one moment."""

    given = ("target", "when")
    kind: str
    at_updates: Annotated[
        int | BetweenSection | None, _or_range(Annotated[int, Field(gt=0)] | None)
    ] = None
    """When all shards have applied these updates."""
    at_seconds: Annotated[
        float | BetweenSection | None, _or_range(Annotated[float, Field(ge=0)] | None)
    ] = None
    """Seconds after the start of the training."""
    phase: dps_faults.Phase | None = None
    """During a checkpoint, or while a shard is not served; of the target's shard if it has one."""
    after: section_of(dps_faults.After) | None = None  # type: ignore[valid-type]
    """After an earlier fault."""
    every: section_of(dps_faults.Every, _Sparse) | None = None  # type: ignore[valid-type]
    """Repeatedly, at random moments."""

    def build(self, names: Sequence[str] = ()) -> Entry:
        """Return the entry of the plan; `names` are those of the trial's nodes."""
        entry: Entry = self.made(target=self._hit(names), when=self._moment())
        return entry

    @abstractmethod
    def _hit(self, names: Sequence[str]) -> Any: ...

    def _moment(self) -> When:
        given = {name: value for name in MOMENTS if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            reason = f"expected exactly one moment of {', '.join(MOMENTS)}; got {got}"
            refuse(reason, key=next(reversed(given), MOMENTS[0]))
        ((name, value),) = given.items()
        with refusing(name):
            if isinstance(value, BetweenSection):
                return dps_faults.Between(
                    *value.between, "updates" if name == "at_updates" else "seconds"
                )
            if isinstance(value, Derived):
                moment: When = value.build()
                return moment
            match name:
                case "at_updates":
                    return dps_faults.AtUpdates(value)
                case "at_seconds":
                    return dps_faults.AtSeconds(value)
        return dps_faults.During(value)


class NodeFaultSection(MomentSection):
    """A fault that hits nodes."""

    target: TargetSection
    """Node, list of nodes, or place."""

    def _hit(self, names: Sequence[str]) -> Target:
        if isinstance(self.target, SeatSection):
            return self.target.build(names)
        target: Target = self.target.build() if isinstance(self.target, Derived) else self.target
        return target


class ShardFaultSection(MomentSection):
    """A fault that hits the checkpoints of a shard."""

    shard: NonNegativeInt
    """Number of the shard."""

    def _hit(self, names: Sequence[str]) -> int:
        return self.shard


class Row(NamedTuple):
    """One fault of a trace. `duration` is None for a kill of a node that is never replaced."""

    seconds: float
    kind: str
    target: str
    duration: float | None


TRACED: dict[str, Any] = {
    cls.kind: cls for cls in (Kill, dps_faults.Pause, dps_faults.Cut, DiskFull)
}


def read_trace(path: Path) -> tuple[Row, ...]:
    """Read a CSV file with a fault in each row, whose columns are those of `Row`.

    Raises `ConfigurationError` if the file cannot be read, or a row is invalid: the message names
    the line.
    """
    rows, place, columns = [], str(path), Row._fields
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True, strict=True)
            for cells in reader:
                place = f"{path}, line {reader.line_num}"
                if sorted(map(str, cells)) != sorted(columns):
                    raise ValueError(f"the columns are {', '.join(map(str, cells))}")
                seconds, kind, target, duration = ((cells[c] or "").strip() for c in columns)
                row = Row(float(seconds), kind, target, float(duration) if duration else None)
                rows.append(row)
                fault_of(row)
        if not rows:
            raise ValueError("it has no rows")
    except (OSError, ValueError, csv.Error, ConfigurationError) as error:
        expected = f"expected a CSV file with the columns {', '.join(columns)}"
        raise ConfigurationError(f"{place}: {error}; {expected}") from error
    return tuple(rows)


def fault_of(row: Row) -> Fault:
    """Return the fault that a row stands for; it lapses if the training ends before."""
    if row.kind not in TRACED:
        known = suggest(row.kind, TRACED)
        raise ConfigurationError(f"unknown kind {quoted(row.kind)}; {known}")
    last = row.duration if row.kind == "kill" else row.duration or 0.0
    fault: Fault = TRACED[row.kind](
        row.target, dps_faults.AtSeconds(row.seconds, optional=True), last
    )
    return fault


class TraceSection(Section):
    """The faults of a recorded trace."""

    kind: Literal["trace"]
    csv: InputPath
    """Path of the trace, with the columns `seconds`, `kind`, `target` and `duration`."""
    rows: Annotated[tuple[Row, ...] | None, Field(strict=False)] = None
    """Rows of the file; filled in by dps."""

    @model_validator(mode="after")
    def _read(self) -> TraceSection:
        with refusing("csv"):
            if self.rows is None:
                # Not as if it had been written: a later read may see another file.
                self.__dict__["rows"] = read_trace(Path(self.csv))
            self.build()
        return self

    def build(self, names: Sequence[str] = ()) -> Entry:
        """Return the entry of the plan."""
        return tuple(map(fault_of, self.rows or ()))


FAULTS = Group(
    KINDS,
    NodeFaultSection,
    {cls: ShardFaultSection for cls in KINDS if cls.hits == "shard"},
    name="dps.faults",
    parent=Lasting,
    own_parts=("kind", "effect"),
)
FaultSection = Annotated[NodeFaultSection | ShardFaultSection | TraceSection, FAULTS]


# -- what cannot happen ------------------------------------------------------------------------


def objections(entries: Sequence[Entry], trial: TrialConfig) -> Iterator[Objection]:
    """Yield faults that cannot happen in a trial: a dotted key, and the reason."""
    for number, entry in enumerate(entries):
        if isinstance(entry, tuple):
            for row, fault in enumerate(entry, 1):
                for _, reason in _wrong_fault_of(fault, trial):
                    yield f"faults.{number}.csv", f"row {row}: {reason}"
            continue
        wrong = (*_wrong_fault_of(entry, trial), *_wrong_moment(number, entry.when, entries, trial))
        yield from ((f"faults.{number}.{key}", reason) for key, reason in wrong)


def _wrong_fault_of(fault: Fault, trial: TrialConfig) -> Iterator[Objection]:
    """Yield what is wrong with the nodes that a fault hits, and with what it does."""
    yield from _wrong_target(fault, trial)
    if isinstance(fault, Kill) and fault.by not in trial.cluster.ways:
        ways, slurm = " or ".join(trial.cluster.ways), f"cluster: {{kind: slurm}} for {fault.by!r}"
        yield "by", f"nodes of this kind of cluster are killed by {ways}; expected {slurm}"
    if isinstance(fault, Corrupt | DiskFull) and (reason := _without_files(trial)):
        yield "shard" if isinstance(fault, Corrupt) else "kind", reason


def _without_files(trial: TrialConfig) -> str | None:
    """Return why shards write no files of this machine; None: they do."""
    recovery = trial.recovery.build()
    if not recovery.durability.writes_checkpoints:
        return NO_CHECKPOINTS
    path: str = recovery.path or ""
    return NO_FILES if "://" in path and not path.startswith(("file://", "local://")) else None


def _wrong_target(fault: Fault, trial: TrialConfig) -> Iterator[Objection]:
    """Yield a node, a shard or a place in a chain that the trial does not have."""
    names: tuple[str, ...] = ()
    shards, replicas = trial.server.shards, trial.replicas
    match fault.target:
        case int(shard) | InChain(shard) | Among(shard=int(shard)) if shard >= shards:
            key = "shard" if isinstance(fault.target, int) else "target"
            yield key, f"no shard {shard}; expected 0 to {shards - 1}"
        case InChain(_, "middle") if replicas < 3:
            yield "target", f"a chain of {replicas} has no middle; expected 3 replicas or more"
        case InChain(_, int(position)) if position >= replicas:
            last = f"expected 0 to {replicas - 1}"
            yield "target", f"a chain of {replicas} has no position {position}; {last}"
        case Among(pick, str(role)) if pick != "each" and role not in map(
            role_of, trial.node_names
        ):
            near = suggest(role, trial.node_names)
            yield "target", f"no {role} to {fault.kind}; {near}"
        case str(name) | Seat(name):
            names = (name,)
        case tuple():
            names = fault.target
    for name in names:
        if original(name) not in trial.node_names:
            near = suggest(name, trial.node_names)
            yield "target", f"no node {quoted(name)} to {fault.kind}; {near}"
    if len(set(names)) < len(names):
        yield "target", f"a node is named twice in {quoted(list(names))}; keep one of them"


def _wrong_moment(
    number: int, when: When, entries: Sequence[Entry], trial: TrialConfig
) -> Iterator[Objection]:
    """Yield a time that is never reached."""
    match when:
        case dps_faults.After(other) if other >= number:
            yield "after.fault", f"fault {other} is not earlier than this fault, number {number}"
        case dps_faults.After(other):
            entry = entries[other]
            if isinstance(entry, tuple) or isinstance(entry.when, dps_faults.Every):
                yield (
                    "after.fault",
                    f"fault {other} has recurrences; name a fault that happens once",
                )
        case dps_faults.During("checkpoint") if trial.cluster.kind == "virtual":
            yield (
                "phase",
                "on virtual time a checkpoint takes no time, so no fault can hit its write",
            )
        case dps_faults.During("checkpoint") if reason := _without_files(trial):
            yield "phase", reason
        case dps_faults.During("recovery") if len(entries) == 1:
            yield "phase", "no other fault of the plan takes a shard down; add one"


def late(plan: FaultPlan, updates: int, time_limit: float) -> tuple[tuple[Fault, str], ...]:
    """Return the faults that cannot happen because the training ends before, each with its end."""
    impossible: list[tuple[Fault, str]] = []
    for fault in plan:
        match fault.when:
            case dps_faults.AtUpdates(moment, optional=False) if moment > updates:
                impossible.append((fault, f"the training ends after {updates}"))
            case dps_faults.AtSeconds(moment, optional=False) if moment >= time_limit:
                impossible.append((fault, f"the time limit is {time_limit:g} s"))
    return tuple(impossible)
