"""Owns what an experiment may be told: the typed configuration, read from YAML and checked whole.

`TrialConfig` is one trial; `ExperimentConfig` is a base, axes of variation over any dotted key, and
seeds. Both are pydantic models at the edge; the `build_…` methods hand on the objects of `dps`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    field_validator,
    model_validator,
)

from dps.core.consistency import Consistency
from dps.core.faults import FaultPlan
from dps.core.recovery import Recovery
from dps.core.rules import UpdateRule
from dps.errors import ConfigurationError
from flows.axes import labelled
from flows.complaints import key_of, sentence, suggest
from flows.sections import (
    AspSection,
    ComparisonSection,
    ConsistencySection,
    DatasetSection,
    EvaluationSection,
    FaultSection,
    OptimizerSection,
    RecoverySection,
    Section,
    ServerSection,
    TrainingSection,
    WorkloadSection,
    refuse,
)
from flows.source import Document, Override, parse_override, read_document, set_key

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class _Settings(Section):
    """What a trial and an experiment have in common."""

    experiment: str
    workload: WorkloadSection
    dataset: DatasetSection
    training: TrainingSection
    optimizer: OptimizerSection
    consistency: ConsistencySection = AspSection()
    server: ServerSection = ServerSection()
    recovery: RecoverySection = RecoverySection()
    faults: Annotated[tuple[FaultSection, ...], Field(strict=False)] = ()
    evaluation: EvaluationSection = EvaluationSection()
    time_limit: PositiveFloat = 60.0

    @field_validator("experiment")
    @classmethod
    def _is_safe(cls, name: str) -> str:
        if not SAFE_NAME.fullmatch(name):
            refuse(f"{name!r} names a folder: use letters, digits and . _ - only")
        return name


class TrialConfig(_Settings):
    """Everything that one trial depends on."""

    seed: NonNegativeInt

    @model_validator(mode="after")
    def _targets_exist(self) -> TrialConfig:
        present = list(self.node_names)
        in_order = sorted(enumerate(self.faults), key=lambda entry: entry[1].at_updates)
        for index, fault in in_order:
            if fault.target not in present:
                reason = (
                    f"there is no node {fault.target!r} to {fault.kind}; "
                    f"{suggest(fault.target, present)}"
                )
                refuse(reason, key=f"faults.{index}.target")
            if fault.kind == "pause":
                continue  # it goes on under its name
            present.remove(fault.target)
            if fault.back_after is not None:
                present.append(f"{fault.target}-b")
        return self

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes of the trial at its start."""
        recovery, shards = self.build_recovery(), range(self.server.shards)
        replicas = range(1, recovery.durability.replicas)
        return (
            *(f"server-{shard}" for shard in shards),
            *(f"replica-{shard}-{i}" for shard in shards for i in replicas),
            *(f"spare-{i}" for i in range(self.server.spares)),
            *(["store-0"] if recovery.needs_store else []),
            *(f"worker-{i}" for i in range(self.training.workers)),
            "evaluator-0",
        )

    @property
    def late_faults(self) -> tuple[FaultSection, ...]:
        """Faults that cannot happen, because the training ends before."""
        return tuple(f for f in self.faults if f.at_updates > self.training.updates)

    def build_optimizer(self) -> UpdateRule:
        """Return the update rule of the shards."""
        return self.optimizer.build()

    def build_consistency(self) -> Consistency:
        """Return the consistency model."""
        return self.consistency.build()

    def build_recovery(self) -> Recovery:
        """Return the recovery strategy."""
        return self.recovery.build()

    def build_faults(self) -> FaultPlan:
        """Return the fault plan."""
        return tuple(fault.build() for fault in self.faults)


class ExperimentConfig(_Settings):
    """A base, axes of variation, and seeds; every combination runs with every seed.

    `axes` maps a dotted key of the configuration to its values by label. In YAML, a list of values
    does too; each is then labelled by what it says.
    """

    axes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = (0,)
    comparison: ComparisonSection = ComparisonSection()

    @field_validator("axes", mode="before")
    @classmethod
    def _label_values(cls, axes: Any) -> Any:
        if not isinstance(axes, dict):
            return axes
        return {key: labelled(str(key), values) for key, values in axes.items()}

    @field_validator("seeds")
    @classmethod
    def _some_seeds_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if not seeds:
            refuse("expected at least one seed, such as [0]")
        if len(set(seeds)) < len(seeds):
            refuse(f"a seed is given twice in {list(seeds)}; keep one of them")
        return seeds

    @model_validator(mode="after")
    def _baseline_is_a_strategy(self) -> ExperimentConfig:
        axis = "recovery" if "recovery" in self.axes else next(iter(self.axes), None)
        strategies = [self.experiment] if axis is None else list(self.axes[axis])
        baseline = self.comparison.baseline
        if baseline is not None and baseline not in strategies:
            reason = f"there is no strategy {baseline!r}; {suggest(baseline, strategies)}"
            refuse(reason, key="comparison.baseline")
        return self

    def trial_configs(self) -> Iterator[tuple[dict[str, str], TrialConfig]]:
        """Yield the labels on the axes and the configuration of every trial.

        Raises
        ------
        InvalidCombination
            An axis over something that is no key, or values that cannot work.
        """
        base = self.model_dump(exclude_unset=True, exclude={"axes", "seeds", "comparison"})
        for chosen in product(*(values.items() for values in self.axes.values())):
            labels = dict(zip(self.axes, (label for label, _ in chosen), strict=True))
            values = dict(zip(self.axes, (value for _, value in chosen), strict=True))
            data = _with_values(base, values)
            for seed in self.seeds:
                yield labels, self._trial({**data, "seed": seed}, labels)

    def _trial(self, data: dict[str, Any], labels: dict[str, str]) -> TrialConfig:
        try:
            return TrialConfig.model_validate(data)
        except ValidationError as error:
            raise InvalidCombination(
                [_on_axis(key, reason, labels) for key, reason in _complaints(error, data)]
            ) from error


class InvalidCombination(ConfigurationError):
    """Values on the axes that cannot work; `complaints` are pairs of a dotted key and a reason."""

    def __init__(self, complaints: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {reason}" for key, reason in complaints))
        self.complaints = complaints


def load_experiment(path_or_name: str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read, override and check the configuration of an experiment and of each of its trials.

    Parameters
    ----------
    path_or_name
        A YAML file, or the name of a packaged configuration, such as "demo".
    overrides
        Assignments such as "training.updates=400"; the value is read as YAML.

    Raises
    ------
    ConfigurationError
        Anything in it that cannot work, with the place and what was expected.
    """
    document = _find(path_or_name)
    assignments = [parse_override(text) for text in overrides]
    data = document.data
    for assignment in assignments:
        data = _override(data, assignment)
    try:
        experiment = ExperimentConfig.model_validate(data)
        for _ in experiment.trial_configs():
            pass
    except ValidationError as error:
        complaints: Sequence[tuple[str, str]] = _complaints(error, data)
    except InvalidCombination as error:
        complaints = error.complaints
    else:
        return experiment
    lines = [f"{_place(key, document, assignments)}: {reason}" for key, reason in complaints]
    raise ConfigurationError("\n".join(lines))


def packaged_names() -> list[str]:
    """Return the names of the configurations that come with the package."""
    entries = files("flows.configs").iterdir()
    return sorted(e.name.removesuffix(".yaml") for e in entries if e.name.endswith(".yaml"))


# -- parts -------------------------------------------------------------------------------------


def _find(path_or_name: str) -> Document:
    path = Path(path_or_name)
    if path.is_file():
        return read_document(path)
    known = packaged_names()
    if path_or_name in known:
        packaged = Path(str(files("flows.configs") / f"{path_or_name}.yaml"))
        return read_document(packaged, f"packaged configuration {path_or_name!r}")
    raise ConfigurationError(
        f"{path_or_name}: no such file, and no packaged configuration of this name; "
        f"{suggest(path_or_name, known)}"
    )


def _with_values(base: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    data = base
    for key in sorted(values, key=lambda key: key.count(".")):  # whole sections first
        try:
            data = set_key(data, key, values[key])
        except ConfigurationError as error:
            raise InvalidCombination([(f"axes.{key}", str(error))]) from error
    return data


def _complaints(error: ValidationError, data: Any) -> list[tuple[str, str]]:
    found = error.errors(include_url=False)
    return [(key_of(entry, data), sentence(entry)) for entry in found]


def _on_axis(key: str, reason: str, labels: Mapping[str, str]) -> tuple[str, str]:
    """Point a complaint about a trial at the axis that the value is from, if it is from one."""
    involved = [axis for axis in labels if f"{key}.".startswith(f"{axis}.")]
    if not involved:
        combination = ", ".join(f"{axis} {label!r}" for axis, label in labels.items())
        return key, f"{reason} (with {combination})" if combination else reason
    axis = max(involved, key=len)
    inner = f" {key.removeprefix(axis).lstrip('.')}:" if key != axis else ""
    others = "".join(f" (with {other} {labels[other]!r})" for other in involved if other != axis)
    return f"axes.{axis}", f"{labels[axis]!r}:{inner} {reason}{others}"


def _override(data: dict[str, Any], override: Override) -> dict[str, Any]:
    axes = data.get("axes")
    for axis in axes if isinstance(axes, dict) else ():
        if f"{override.key}.".startswith(f"{axis}."):
            raise ConfigurationError(
                f"--set {override.text}: the axis {axis!r} varies this key, so that it would have "
                f"no effect. Set the axis instead (--set 'axes.{axis}=[...]'), or leave out all "
                "axes first (--set 'axes={}')."
            )
    try:
        return set_key(data, override.key, override.value)
    except ConfigurationError as error:
        raise ConfigurationError(f"--set {override.text}: {error}") from error


def _place(key: str, document: Document, overrides: Sequence[Override]) -> str:
    """Say where the value of a key is from: the command line, or a line of the file."""
    for override in overrides:
        made_by_it = key not in document.lines and override.key.startswith(f"{key}.")
        if made_by_it or f"{key}.".startswith(f"{override.key}."):
            return f"--set {override.text}: {key}"
    return f"{document.place(key)}: {key}" if key else document.name
