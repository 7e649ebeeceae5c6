"""The typed configuration of an experiment, read from YAML and validated as a whole.

`TrialConfig` is one trial; `ExperimentConfig` is a base, axes of variation over any dotted key, and
seeds. Both are pydantic models; their `build_…` methods return objects of `dps`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from dps.core.consistency import ASP, check_ahead
from dps.core.filters import chain
from dps.core.filters.filter import Filter
from dps.core.placement import checked_placement
from dps.core.rules.rule import is_per_array
from dps.core.rules.wrappers import Frozen, check_names, frozen
from dps.errors import ConfigurationError
from dps.faults import FaultPlan
from dps.faults.expansion import Entry, expand
from dps.recovery.strategy import as_servers
from flows.config.axes import MAX_TRIALS, check_labels, label_of, labelled, seeds_of
from flows.config.claims import ClaimSection, checked
from flows.config.cluster import ClusterSection, LocalSection
from flows.config.document import Document, Override, parse_override, read_document, set_key
from flows.config.errors import (
    Complaint,
    check_known,
    complaints,
    placed,
    refuse,
    refusing,
    suggest,
)
from flows.config.faults import FaultSection, objections
from flows.config.kinds import CONSISTENCIES, ConsistencySection, FilterSection, OptimizerSection
from flows.config.own_data import PythonDataSection
from flows.config.sections import Derived, SafeName, Section, folder_of, is_of_record
from flows.config.settings import (
    BudgetSection,
    ChangeSection,
    ComparisonSection,
    EvaluationSection,
    RecoverySection,
    ServerSection,
    TrainingSection,
)
from flows.config.workload import (
    DatasetSection,
    PythonSection,
    WorkloadSection,
    misfit,
    score_objection,
    workload_of,
)
from flows.configs import packaged_names
from flows.quoting import quoted
from flows.workloads import Objective

# The keys that define the grid; setting one leaves out claims about missing parts of the grid.
SHAPE = ("axes", "exclude", "experiment")

Written = tuple[Document, Sequence[Override]]  # a file, and the settings of the command line
Label = Annotated[str, BeforeValidator(label_of, json_schema_input_type=Any)]
Chain = Annotated[tuple[FilterSection, ...], Field(strict=False)]


class _Settings(Section):
    """Common part of a trial and an experiment."""

    experiment: SafeName
    """Name; records are in `results/<experiment>/`."""
    workload: WorkloadSection
    """Model to train."""
    dataset: DatasetSection
    """Training and test examples."""
    training: TrainingSection
    """Workers, gradients and batches."""
    optimizer: OptimizerSection
    """Update rule."""
    filters: dict[str, Chain] = Field(default_factory=dict)
    """Filters of gradients, by array name; `"*"` stands for all other arrays."""
    pull_filters: dict[str, Chain] = Field(default_factory=dict)
    """Filters of pulled weights, by array name."""
    consistency: ConsistencySection = CONSISTENCIES.default(ASP)
    """Bound of the distance between workers."""
    server: ServerSection = Field(default_factory=ServerSection)
    """Shards, their nodes and timings."""
    budget: BudgetSection | None = None
    """Equal number of nodes for every strategy."""
    recovery: RecoverySection = Field(default_factory=RecoverySection)
    """Recovery strategy: the name of a preset, or three choices."""
    faults: Annotated[tuple[FaultSection, ...], Field(strict=False)] = ()
    """Fault plan."""
    elastic: Annotated[tuple[ChangeSection, ...], Field(strict=False)] = ()
    """Changes of the number of servers and workers. The training then has a common end."""
    evaluation: EvaluationSection = EvaluationSection()
    """Score, its interval and its target."""
    cluster: ClusterSection = LocalSection()
    """Where trials run."""
    time_limit: PositiveFloat = 60.0
    """Seconds until a training fails."""


class TrialConfig(_Settings):
    """Everything that one trial depends on."""

    seed: NonNegativeInt

    @model_validator(mode="after")
    def _can_run(self, info: ValidationInfo) -> TrialConfig:
        self._check_budget()
        for key, reason in objections(self._fault_entries(), self):
            refuse(reason, key=key)
        with refusing("faults"):
            self.fault_plan  # noqa: B018 - builds and checks the plan
        trial = self
        if not is_of_record(info):
            # Own code runs here, and not where the sections are read: none for a refused file.
            trial = self._with_own_code(folder_of(info))
            trial._check_workload()
        trial._check_optimizer()
        trial._check_filters()
        trial._check_changes()
        with refusing("training.ahead"):
            check_ahead(trial.consistency.build(), trial.training.ahead)
        return trial

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        if self.server.spares or self.recovery.spares is not None:
            key = "server.spares" if self.server.spares else "recovery.spares"
            refuse("a budget determines the number of spares; leave spares out", key)
        servers, stores = self._number_of_servers, self.recovery.build().stores
        if servers + stores > self.budget.nodes:
            refuse(
                f"this strategy needs {servers + stores} nodes: {servers} for servers and replicas"
                f", {stores} for stores; increase the budget, or use fewer shards or replicas",
                key="budget.nodes",
            )

    def _with_own_code(self, folder: Path) -> TrialConfig:
        if isinstance(self.dataset, PythonDataSection):
            self.dataset.run_code(folder)
        if not isinstance(self.workload, PythonSection):
            return self
        return self.model_copy(update={"workload": self.workload.with_code(folder)})

    def _check_workload(self) -> None:
        with refusing("workload"):
            if isinstance(self.workload, Derived):  # others are checked by their sections
                workload_of(self)
            elif isinstance(self.workload, PythonSection):
                _ = self.workload.build(self.dataset.shape).model
            wrong = misfit(self)
        if wrong is not None:
            refuse(wrong[1], key=wrong[0])
        with refusing("evaluation.metric"):
            unfit = score_objection(self, self.evaluation.metric)
        if unfit is not None:
            refuse(unfit, key="evaluation.metric")

    def _check_optimizer(self) -> None:
        rule = self.optimizer.build()
        if not is_per_array(rule) and not isinstance(rule, Frozen):
            return
        with refusing("optimizer.rules"):
            names = workload_of(self).parameters
            check_names(rule, names)
        if frozen(rule, names) == frozenset(names):
            refuse("all arrays are frozen: nothing would be trained", key="optimizer.rules")
        if self.evaluation.objective is not None:
            refuse(
                "an objective needs one rule for all arrays, but this optimizer has rules by "
                "names; leave one of the two out",
                key="evaluation.objective",
            )

    def _check_filters(self) -> None:
        if self.filters:
            with refusing("filters"):
                names = workload_of(self).parameters
                chain.checked(built(self.filters), names, self.optimizer.build())
        if self.pull_filters:
            with refusing("pull_filters"):
                chain.checked_of_pulls(built(self.pull_filters), workload_of(self).parameters)
                self.recovery.build().must_allow("filtered pulls")

    def _check_changes(self) -> None:
        wanted = [("server.servers", self.server.servers)]
        for number, change in enumerate(self.elastic):
            wanted.append((f"elastic.{number}.servers", change.servers))
            if change.at_updates is not None and change.at_updates >= self.training.updates:
                refuse(
                    f"the training ends earlier, after {self.training.updates} updates",
                    key=f"elastic.{number}.at_updates",
                )
        for key, servers in wanted:
            with refusing(key):
                if servers is not None:
                    as_servers(servers, self.server.shards, self.recovery.build())
        with refusing("server.placement"):
            checked_placement(self.server.placement.build(), self.servers)

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        """The nodes of the trial at its start."""
        shards, replicas = range(self.server.shards), range(1, self.replicas)
        holders = range(self.server.shards if self.servers is None else self._number_of_servers)
        return (
            *(f"server-{i}" for i in holders),
            *(f"replica-{s}-{i}" for s in shards for i in replicas if self.servers is None),
            *(f"spare-{i}" for i in range(self.spares)),
            *(f"store-{i}" for i in range(self.recovery.build().stores)),
            *self.worker_nodes,
            "evaluator-0",
        )

    @property
    def _number_of_servers(self) -> int:
        """Maximum number of nodes that hold replicas of shards."""
        if self.servers is None:
            return self.server.shards * self.replicas
        return max(self.servers, *(change.servers or 0 for change in self.elastic), 0)

    @property
    def spares(self) -> int:
        """Number of nodes kept idle and warm: as configured, or the rest of the budget."""
        if self.budget is None:
            own = self.recovery.spares
            return self.server.spares if own is None else own
        return max(0, self.budget.nodes - self._number_of_servers - self.recovery.build().stores)

    @property
    def servers(self) -> int | None:
        """Number of nodes that hold the shards at first; None if it never matters."""
        if self.server.servers is None and any(change.servers for change in self.elastic):
            return self.server.shards * self.replicas
        return self.server.servers

    @property
    def stops_together(self) -> bool:
        """Whether each worker ends when it sees that the shards have all updates of the training.

        Elastic workers are asked to leave instead.
        """
        return self.training.stop == "together" and not self.elastic

    @property
    def replicas(self) -> int:
        """Number of nodes that hold a replica of each shard."""
        return self.recovery.build().durability.above.replicas

    @property
    def worker_nodes(self) -> tuple[str, ...]:
        """The nodes that workers run on, `training.workers_per_node` on each."""
        most = max(self.training.workers, *(change.workers or 0 for change in self.elastic), 0)
        return tuple(f"worker-{i}" for i in range(math.ceil(most / self.training.workers_per_node)))

    def build_objective(self) -> Objective | None:
        """Return the objective to evaluate; None if the configuration asks for none."""
        wanted = self.evaluation.objective
        if wanted is None:
            return None
        return Objective(workload_of(self), self.optimizer.build_penalty(), wanted.step)

    @cached_property
    def fault_plan(self) -> FaultPlan:
        """The fault plan, which lists every fault of the trial."""
        return expand(self._fault_entries(), self.seed, self.node_names)

    def _fault_entries(self) -> list[Entry]:
        return [section.build(self.node_names) for section in self.faults]


def built(chains: Mapping[str, Sequence[Derived]]) -> dict[str, list[Filter]]:
    """Return the filters by array name; "*" stands for all arrays that are not named."""
    return {name: [each.build() for each in chain] for name, chain in chains.items()}


class ExperimentConfig(_Settings):
    """A base, axes of variation, and seeds; every combination runs with every seed."""

    axes: Annotated[
        dict[str, dict[str, Any]],
        BeforeValidator(labelled, json_schema_input_type=dict[str, list[Any] | dict[str, Any]]),
    ] = Field(default_factory=dict)
    """Dotted key to a list of values, or to labels with values."""
    exclude: Annotated[tuple[dict[str, Label], ...], Field(strict=False)] = ()
    """Combinations to omit, each as axis to label."""
    seeds: Annotated[
        tuple[NonNegativeInt, ...],
        Field(strict=False, min_length=1),
        BeforeValidator(seeds_of, json_schema_input_type=int | str | list[int]),
    ] = (0,)
    """List, count (`40`: 0 to 39) or range (`"100-139"`). Every combination runs with each seed."""
    comparison: ComparisonSection = ComparisonSection()
    """Exploratory comparison of the strategies."""
    claims: Annotated[tuple[ClaimSection, ...], Field(strict=False)] = ()
    """Comparisons with verdicts."""
    order_seed: NonNegativeInt = 0
    """Seed of the order of trials; the trials of a seed are adjacent."""
    _written: Written = PrivateAttr(default=(Document("experiment", {}, {}), ()))

    @model_validator(mode="after")
    def _goes_together(self, info: ValidationInfo) -> ExperimentConfig:
        self._written = (info.context or {}).get("written", self._written)
        if self.comparison.baseline is not None:
            key = "comparison.baseline"
            check_known(self.comparison.baseline, self.strategies, "strategy", key)
        if len(set(self.seeds)) < len(self.seeds):
            refuse(f"a seed is given twice in {quoted(self.seeds)}; keep one of them", key="seeds")
        for number, entry in enumerate(self.exclude):
            check_labels(entry, self.axes, f"exclude.{number}")
        trials = math.prod(map(len, self.axes.values())) * len(self.seeds)
        if trials > MAX_TRIALS:
            refuse(
                f"the grid has {trials:,} trials before exclusions; expected {MAX_TRIALS:,} "
                "at most",
                key="axes" if self.axes else "seeds",
            )
        if not self.combinations:
            refuse("every combination is excluded; expected at least one trial", key="exclude")
        if not self.claims:
            return self
        set_keys = {override.key.split(".")[0] for override in self._written[1]}
        narrowed = not set_keys.isdisjoint(SHAPE) and "claims" not in set_keys
        claims = checked(self, narrowed)  # each claim with the axes of its condition
        return self.model_copy(update={"claims": claims})

    @property
    def strategy_axis(self) -> str | None:
        """The axis of strategies; None without axes, where the experiment has one strategy."""
        return "recovery" if "recovery" in self.axes else next(iter(self.axes), None)

    @property
    def strategies(self) -> list[str]:
        """The labels of the compared strategies."""
        axis = self.strategy_axis
        return [self.experiment] if axis is None else list(self.axes[axis])

    @cached_property
    def combinations(self) -> list[dict[str, str]]:
        """The combinations of labels that run with every seed; the last axis varies fastest."""
        every = (dict(zip(self.axes, row, strict=True)) for row in product(*self.axes.values()))
        return [
            labels
            for labels in every
            if not any(entry.items() <= labels.items() for entry in self.exclude)
        ]

    def trial_configs(self) -> Iterator[tuple[dict[str, str], TrialConfig]]:
        """Yield the labels on the axes and the configuration of every trial.

        Raises `ConfigurationError` if the name of an axis is not a valid key, or a value is
        invalid.
        """
        base = self.model_dump(exclude_unset=True, include=set(_Settings.model_fields))
        scores = set()
        for labels in self.combinations:
            data = base
            for axis in sorted(labels, key=lambda axis: axis.count(".")):  # whole sections first
                try:
                    data = set_key(data, axis, self.axes[axis][labels[axis]])
                except ConfigurationError as error:
                    raise placed([(f"axes.{axis}", str(error))], *self._written) from error
            for seed in self.seeds:
                config = self._trial({**data, "seed": seed}, labels)
                scores.add((config.evaluation.metric, config.dataset.shape.regression))
                if len(scores) > 1:
                    problem = "trials with different scores cannot be compared; separate them"
                    raise placed([("axes", problem)], *self._written)
                yield labels, config

    def _trial(self, data: dict[str, Any], labels: dict[str, str]) -> TrialConfig:
        try:
            return TrialConfig.model_validate(data, context={"folder": self._written[0].folder})
        except ValidationError as error:
            problems = [_on_axis(*complaint, labels) for complaint in complaints(error)]
            raise placed(problems, *self._written) from error


def load_experiment(source: str | Document, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read, override and check the configuration of an experiment and of each of its trials."""
    experiment = read_experiment(source, overrides)
    list(experiment.trial_configs())
    return experiment


def read_experiment(source: str | Document, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read and override the configuration of an experiment without checking its trials.

    `source` is a YAML file, the name of a packaged configuration such as "demo", or its document.
    The values of `overrides`, such as "training.updates=400", are read as YAML. Raises
    `ConfigurationError` for anything that cannot work, with the place and what was expected.
    """
    document = source if isinstance(source, Document) else find_document(source)
    assignments = [parse_override(text) for text in overrides]
    data = document.data
    for assignment in assignments:
        data = _override(data, assignment)
    context = {"folder": document.folder, "written": (document, assignments)}
    try:
        return ExperimentConfig.model_validate(data, context=context)
    except ValidationError as error:
        raise placed(complaints(error), document, assignments) from error


def find_document(path_or_name: str) -> Document:
    """Read a YAML file, or a packaged configuration by its name.

    Raises `ConfigurationError` if neither exists, or the file is not YAML.
    """
    path = Path(path_or_name)
    if path.is_file():
        return read_document(path)
    known = packaged_names()
    if path_or_name in known:
        packaged = Path(str(files("flows.configs") / f"{path_or_name}.yaml"))
        return read_document(packaged, f"packaged configuration {path_or_name!r}")
    there = "a folder, not a file" if path.is_dir() else "no such file"
    raise ConfigurationError(
        f"{path_or_name}: {there}, and no packaged experiment of this name (see `dps list`); "
        f"{suggest(path_or_name, known)}"
    )


def schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration, by which editors complete and check YAML."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **ExperimentConfig.model_json_schema()}


def _on_axis(key: str, reason: str, labels: Mapping[str, str]) -> Complaint:
    """Point a complaint about a trial at the axis that the value is from, if it is from one."""
    axis = max((each for each in labels if f"{key}.".startswith(f"{each}.")), key=len, default="")
    others = [f"{each} {quoted(label)}" for each, label in labels.items() if each != axis]
    if others:
        reason += f" (with {', '.join(others)})"
    return (f"axes.{axis}.{labels[axis]}{key.removeprefix(axis)}" if axis else key), reason


def _override(data: dict[str, Any], override: Override) -> dict[str, Any]:
    axes = data.get("axes")
    for axis in axes if isinstance(axes, dict) else ():
        if f"{override.key}.".startswith(f"{axis}."):
            raise ConfigurationError(
                f"{override}: the axis {quoted(axis)} overrides this key. Set the axis instead "
                f"(--set 'axes.{axis}=[...]'), or remove all axes first (--set 'axes={{}}')."
            )
    try:
        return set_key(data, override.key, override.value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{override}: {error}") from error
