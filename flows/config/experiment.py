"""What an experiment may be told: the typed configuration, read from YAML and checked whole.

`TrialConfig` is one trial; `ExperimentConfig` is a base, axes of variation over any dotted key, and
seeds. Both are pydantic models at the edge; the `build_…` methods hand on the objects of `dps`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dps.core.consistency import Consistency, check_ahead
from dps.core.faults.expansion import (
    MOST_FAULTS,
    Drawn,
    Each,
    Entry,
    Expanded,
    Recurring,
    expand,
)
from dps.core.faults.plan import Fault, FaultPlan
from dps.core.filters.filter import Filter
from dps.core.names import role_of
from dps.core.placement.hash_ring import checked_placement
from dps.core.rules.per_array import check_names, frozen
from dps.core.rules.rule import UpdateRule
from dps.errors import ConfigurationError
from dps.protocol.compression import checked_filters, checked_pull_filters
from dps.protocol.recovery import Recovery, as_servers
from flows.config.axes import (
    OF_THE_GRID,
    Combinations,
    check_excluded,
    check_extent,
    check_together,
    excluded_labels,
    labelled,
)
from flows.config.base import (
    AspSection,
    BudgetSection,
    ChangeSection,
    ComparisonSection,
    ConsistencySection,
    EvaluationSection,
    RecoverySection,
    SafeName,
    Section,
    ServerSection,
    TrainingSection,
    folder_of,
    in_folder,
    is_key,
    is_of_record,
)
from flows.config.claims import NARROWED, ClaimSection, checked
from flows.config.cluster import ClusterSection, LocalSection
from flows.config.errors import Complaint, complaints, placed, refuse, refusing, suggest
from flows.config.faults import FaultSection, TraceSection
from flows.config.faults.checks import (
    NO_CHECKPOINTS,
    FaultContext,
    entry_objections,
    is_local,
    late,
    plan_objections,
)
from flows.config.filters import FilterSection
from flows.config.limits import MOST_ENTRIES, MOST_IN_ALL, MOST_LISTED, MOST_NODES, MOST_TRIALS
from flows.config.optimizer import ByNameSection, OptimizerSection
from flows.config.own_data import PythonDataSection
from flows.config.plugins import Registered
from flows.config.workload import (
    DatasetSection,
    PythonSection,
    WorkloadSection,
    misfit,
    score_objection,
    workload_of,
)
from flows.config.yaml_document import (
    Document,
    Override,
    overridden,
    parse_overrides,
    read_document,
    set_key,
)
from flows.configs import packaged_names as packaged_names
from flows.quoting import listed, quoted, shown
from flows.workloads import Objective

# The keys that make the grid what it is; who sets one of them leaves out claims of what is gone.
SHAPE = ("axes", "exclude", "experiment", "zip")
# The keys that name labels on the axes.
NAMES_LABELS = ("claims", "comparison", "exclude")


class _Settings(Section):
    """What a trial and an experiment have in common."""

    experiment: SafeName
    workload: WorkloadSection
    dataset: DatasetSection
    training: TrainingSection
    optimizer: OptimizerSection
    filters: dict[str, Annotated[tuple[FilterSection, ...], Field(strict=False)]] = Field(
        default_factory=dict
    )
    pull_filters: dict[str, Annotated[tuple[FilterSection, ...], Field(strict=False)]] = Field(
        default_factory=dict
    )
    consistency: ConsistencySection = AspSection()
    server: ServerSection = ServerSection()
    budget: BudgetSection | None = None
    recovery: RecoverySection = RecoverySection()
    faults: Annotated[tuple[FaultSection, ...], Field(strict=False, max_length=MOST_ENTRIES)] = ()
    elastic: Annotated[tuple[ChangeSection, ...], Field(strict=False, max_length=MOST_ENTRIES)] = ()
    evaluation: EvaluationSection = EvaluationSection()
    cluster: ClusterSection = LocalSection()
    time_limit: PositiveFloat = 60.0

    @field_validator("faults")
    @classmethod
    def _traces_are_short_together(
        cls, faults: tuple[FaultSection, ...]
    ) -> tuple[FaultSection, ...]:
        # Before a fault is made of each row.
        rows = sum(len(each.rows or ()) for each in faults if isinstance(each, TraceSection))
        if rows > MOST_FAULTS:
            refuse(f"the traces have {rows:,} rows in all; expected {MOST_FAULTS:,} at most")
        return faults


class TrialConfig(_Settings):
    """Everything that one trial depends on."""

    seed: NonNegativeInt

    @model_validator(mode="after")
    def _nodes_can_be_started(self) -> TrialConfig:
        # First of all: what follows goes through their names.
        replicas = self.server.shards * self._replicas
        if replicas > MOST_NODES:
            reason = (
                f"the shards have {replicas:,} replicas in all; expected {MOST_NODES:,} at most"
            )
            refuse(reason, key="server.shards")
        nodes = self._number_of_nodes
        if nodes > MOST_NODES:
            refuse(
                f"the trial has {nodes:,} nodes: {self.most_workers:,} workers, "
                f"{self._number_of_servers:,} servers and replicas, {self.spares:,} spares "
                f"and others; expected {MOST_NODES:,} at most",
                key="server" if replicas >= self.most_workers else "training.workers",
            )
        return self

    @model_validator(mode="after")
    def _budget_is_enough(self) -> TrialConfig:
        if self.budget is None:
            return self
        if self.server.spares:
            reason = "with a budget, spares are what a strategy leaves of it; leave them out"
            refuse(reason, key="server.spares")
        if self.recovery.spares is not None:
            reason = "with a budget, spares are what a strategy leaves of it; leave them out"
            refuse(reason, key="recovery.spares")
        servers, stores = self._number_of_servers, self._number_of_stores
        if servers + stores > self.budget.nodes:
            store = f" and {stores} store{'s' if stores > 1 else ''}" if stores else ""
            refuse(
                f"this strategy needs {servers + stores} nodes: {servers} for servers and replicas"
                f"{store}; expected at least as many, or fewer shards or replicas",
                key="budget.nodes",
            )
        return self

    @model_validator(mode="after")
    def _faults_can_happen(self) -> TrialConfig:
        wrong = next(self._fault_objections(), None)
        if wrong is not None:
            refuse(wrong[1], key=wrong[0])
        return self

    @model_validator(mode="after")
    def _code_of_ones_own_runs(self, info: ValidationInfo) -> TrialConfig:
        # Here and not where the sections are read: nobody's code runs for a file that is refused.
        if not is_of_record(info):
            for section in (self.workload, self.dataset):
                if isinstance(section, PythonSection | PythonDataSection):
                    section.run_code(folder_of(info))
        return self

    @model_validator(mode="after")
    def _workload_can_be_made(self, info: ValidationInfo) -> TrialConfig:
        if isinstance(self.workload, Registered):  # what others are told is checked by itself
            with refusing("workload"):
                workload_of(self)
        if isinstance(self.workload, PythonSection) and not is_of_record(info):
            with refusing("workload"):
                self.workload.model(self.dataset.shape)
        return self

    @model_validator(mode="after")
    def _workload_fits_the_data(self, info: ValidationInfo) -> TrialConfig:
        if not is_of_record(info):
            with refusing("workload"):
                wrong = misfit(self, self.training)
            if wrong is not None:
                refuse(wrong[1], key=wrong[0])
            with refusing("evaluation.metric"):
                unfit = score_objection(self, self.evaluation.metric)
            if unfit is not None:
                refuse(unfit, key="evaluation.metric")
        return self

    @model_validator(mode="after")
    def _workers_may_be_ahead(self) -> TrialConfig:
        with refusing("training.ahead"):
            check_ahead(self.build_consistency(), self.training.ahead)
        return self

    @model_validator(mode="after")
    def _each_array_has_a_rule(self) -> TrialConfig:
        if isinstance(self.optimizer, ByNameSection):
            with refusing("optimizer.rules"):
                names = workload_of(self).parameters
                check_names(self.build_optimizer(), names)
            if frozen(self.build_optimizer(), names) == frozenset(names):
                refuse("all arrays are frozen: nothing would be trained", key="optimizer.rules")
            if self.evaluation.objective is not None:
                refuse(
                    "an objective has the penalty of one rule for all arrays, and this optimizer "
                    "has rules by names; leave one of the two out",
                    key="evaluation.objective",
                )
        return self

    @model_validator(mode="after")
    def _filters_can_work(self) -> TrialConfig:
        if self.filters:
            with refusing("filters"):
                names = workload_of(self).parameters
                checked_filters(self.build_filters(), names, self.build_optimizer())
        if self.pull_filters:
            with refusing("pull_filters"):
                names, durability = workload_of(self).parameters, self.build_recovery().durability
                checked_pull_filters(self.build_pull_filters(), names, durability)
        return self

    @model_validator(mode="after")
    def _changes_can_happen(self) -> TrialConfig:
        wanted = [("server.servers", self.server.servers)]
        for number, change in enumerate(self.elastic):
            wanted.append((f"elastic.{number}.servers", change.servers))
            if change.at_updates is not None and change.at_updates >= self.training.updates:
                refuse(
                    f"the training ends after {self.training.updates} updates, before this",
                    key=f"elastic.{number}.at_updates",
                )
        for key, servers in wanted:
            with refusing(key):
                if servers is not None:
                    as_servers(servers, self.server.shards, self.build_recovery())
        with refusing("server.placement"):
            checked_placement(self.server.placement.build(), self.servers)
        return self

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        """The nodes of the trial at its start."""
        return (
            *self._server_names(),
            *(f"spare-{i}" for i in range(self.spares)),
            *(f"store-{i}" for i in range(self._number_of_stores)),
            *self.worker_nodes,
            "evaluator-0",
        )

    def _server_names(self) -> Iterator[str]:
        if self.servers is not None:
            yield from (f"server-{number}" for number in range(self._number_of_servers))
            return
        shards, replicas = range(self.server.shards), range(1, self._replicas)
        yield from (f"server-{shard}" for shard in shards)
        yield from (f"replica-{shard}-{i}" for shard in shards for i in replicas)

    @property
    def _number_of_servers(self) -> int:
        """How many nodes hold replicas of shards, at most."""
        if self.servers is None:
            return self.server.shards * self._replicas
        return max(self.servers, *(change.servers or 0 for change in self.elastic), 0)

    @property
    def _number_of_nodes(self) -> int:
        """How many `node_names` there are."""
        servers = self._number_of_servers + self.spares + self._number_of_stores
        return servers + self._number_of_worker_nodes + 1  # the evaluator's

    @property
    def _number_of_stores(self) -> int:
        return self.build_recovery().stores

    @property
    def spares(self) -> int:
        """How many nodes are kept idle and warm: as many as are asked for, or the budget leaves."""
        if self.budget is None:
            own = self.recovery.spares
            return self.server.spares if own is None else own
        return max(0, self.budget.nodes - self._number_of_servers - self._number_of_stores)

    @property
    def _number_of_worker_nodes(self) -> int:
        return math.ceil(self.most_workers / self.training.workers_per_node)

    @property
    def servers(self) -> int | None:
        """How many nodes hold the shards at first; None: it never matters."""
        if self.server.servers is None and any(change.servers for change in self.elastic):
            return self.server.shards * self._replicas
        return self.server.servers

    @property
    def most_workers(self) -> int:
        """How many workers there are at most."""
        return max(self.training.workers, *(change.workers or 0 for change in self.elastic), 0)

    @property
    def stops_together(self) -> bool:
        """Whether each worker ends when it sees that the shards have all updates of the training.

        Those that come and go are asked to leave then.
        """
        return self.training.stop == "together" and not self.elastic

    @property
    def _replicas(self) -> int:
        return self.build_recovery().durability.replicas

    @property
    def worker_nodes(self) -> tuple[str, ...]:
        """The nodes that workers run on, `training.workers_per_node` on each."""
        return tuple(f"worker-{i}" for i in range(self._number_of_worker_nodes))

    @property
    def late_faults(self) -> tuple[tuple[Fault, str], ...]:
        """Faults that cannot happen, each with what ends the training before."""
        return late(self.build_faults(), self.training.updates, self.time_limit)

    def build_optimizer(self) -> UpdateRule:
        """Return the update rule of the shards."""
        return self.optimizer.build()

    def build_objective(self) -> Objective | None:
        """Return what is told of the training problem; None: nothing is."""
        wanted = self.evaluation.objective
        if wanted is None:
            return None
        return Objective(workload_of(self), self.optimizer.build_penalty(), wanted.step)

    def build_filters(self) -> dict[str, list[Filter]]:
        """Return the filters of each array that has any, "*" for those that are not named."""
        return {name: [f.build() for f in chain] for name, chain in self.filters.items()}

    def build_pull_filters(self) -> dict[str, list[Filter]]:
        """Return the filters of what workers pull of each array that has any."""
        return {name: [f.build() for f in chain] for name, chain in self.pull_filters.items()}

    def build_consistency(self) -> Consistency:
        """Return the consistency model."""
        return self.consistency.build()

    def build_recovery(self) -> Recovery:
        """Return the recovery strategy."""
        return self.recovery.build()

    def build_faults(self) -> FaultPlan:
        """Return the fault plan: every single fault that is to come."""
        return self._expanded.plan

    @property
    def drawn_faults(self) -> FaultPlan:
        """Those of the plan whose moments are drawn from the seed."""
        drawn = {
            n
            for n, e in enumerate(self._fault_entries())
            if isinstance(e, Drawn | Recurring | Each)
        }
        pairs = zip(self._expanded.plan, self._expanded.origins, strict=True)
        return tuple(fault for fault, origin in pairs if origin in drawn)

    @cached_property
    def _expanded(self) -> Expanded:
        return _expansion(tuple(self._fault_entries()), self.seed)

    def _fault_entries(self) -> list[Entry]:
        nodes: defaultdict[str, list[str]] = defaultdict(list)
        for name in self.node_names:
            nodes[role_of(name)].append(name)
        return [section.build(nodes) for section in self.faults]

    def _fault_objections(self) -> Iterator[tuple[str, str]]:
        entries, stage = self._fault_entries(), self._stage()
        yield from entry_objections(entries, stage)
        try:
            expanded = self._expanded
        except ConfigurationError as error:
            yield "faults", str(error)
        else:
            yield from plan_objections(expanded, stage)

    def _stage(self) -> FaultContext:
        durability = self.build_recovery().durability
        writes = durability.writes_checkpoints
        local = writes and is_local(durability.path)
        return FaultContext(
            self.node_names,
            self.server.shards,
            self._replicas,
            writes,
            local,
            self.cluster.ways,
            self.cluster.kind == "virtual",
            self.training.updates,
            self.time_limit,
        )


@lru_cache(maxsize=4096)  # strategies with the same nodes have the same faults
def _expansion(entries: tuple[Entry, ...], seed: int) -> Expanded:
    return expand(entries, seed)


class ExperimentConfig(_Settings):
    """A base, axes of variation, and seeds; every combination runs with every seed.

    `axes` maps a dotted key of the configuration to its values by label. In YAML, a list of values
    does too; each is then labelled by what it says. `zip` names groups of axes that vary together,
    `exclude` labels on some axes whose combinations are left out. Each seed is a block of trials,
    whose order is drawn from `order_seed`.
    """

    axes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    zip: Annotated[
        tuple[Annotated[tuple[str, ...], Field(strict=False)], ...], Field(strict=False)
    ] = ()
    exclude: tuple[dict[str, str], ...] = ()
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = (0,)
    comparison: ComparisonSection = ComparisonSection()
    claims: Annotated[tuple[ClaimSection, ...], Field(strict=False)] = ()
    order_seed: NonNegativeInt = 0
    _folder: Path = PrivateAttr(default=Path())  # that the paths on its axes are relative to

    @model_validator(mode="after")
    def _paths_are_relative_to_its_folder(self, info: ValidationInfo) -> ExperimentConfig:
        self._folder = (info.context or {}).get("folder", Path())
        return self

    @field_validator("axes", mode="before")
    @classmethod
    def _label_values(cls, axes: Any) -> Any:
        if not isinstance(axes, dict):
            return axes
        return {key: labelled(str(key), values) for key, values in axes.items()}

    @field_validator("exclude", mode="before")
    @classmethod
    def _texts(cls, entries: Any) -> Any:
        return excluded_labels(entries)

    @field_validator("seeds")
    @classmethod
    def _some_seeds_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if not seeds:
            refuse("expected at least one seed, such as [0]")
        if len(set(seeds)) < len(seeds):
            refuse(f"a seed is given twice in {quoted(list(seeds))}; keep one of them")
        return seeds

    @model_validator(mode="after")
    def _baseline_is_a_strategy(self) -> ExperimentConfig:
        strategies, baseline = self._strategies, self.comparison.baseline
        if baseline is not None and baseline not in strategies:
            reason = f"there is no strategy {quoted(baseline)}; {suggest(baseline, strategies)}"
            refuse(reason, key="comparison.baseline")
        return self

    @model_validator(mode="after")
    def _grid_has_trials(self) -> ExperimentConfig:
        combinations = self.combinations
        check_together(combinations.axes, self.zip)
        check_extent(combinations)
        check_excluded(combinations)
        if (trials := self.trials) > MOST_TRIALS:
            refuse(
                f"the grid has {trials:,} trials; expected {MOST_TRIALS:,} at most",
                key="axes" if self.axes else "seeds",
            )
        return self

    @model_validator(mode="after")
    def _trials_have_one_score(self) -> ExperimentConfig:
        varied = [self.axes.get("evaluation.metric", {}), self.axes.get("dataset.task", {})]
        sections = self.axes.get("evaluation", {}).values()
        named = {section.get("metric") for section in sections if isinstance(section, dict)}
        if any(varied) or len(named) > 1:
            key = next(axis for axis in self.axes if axis.startswith(("evaluation", "dataset")))
            refuse(
                "trials with different scores cannot be compared; make an experiment of each",
                key=f"axes.{key}",
            )
        return self

    @model_validator(mode="after")
    def _claims_are_of_trials(self, info: ValidationInfo) -> ExperimentConfig:
        narrowed = info.context is not None and NARROWED.items() <= info.context.items()
        found = checked(
            self.claims, self.combinations, self._strategy_axis, self.experiment, narrowed
        )
        self.__dict__["claims"] = found  # each with the axes of its condition
        return self

    @property
    def _strategy_axis(self) -> str | None:
        return "recovery" if "recovery" in self.axes else next(iter(self.axes), None)

    @property
    def _strategies(self) -> Sequence[str]:
        axis = self._strategy_axis
        return [self.experiment] if axis is None else list(self.axes[axis])

    @property
    def combinations(self) -> Combinations:
        """The combinations of labels on the axes, each of which runs with every seed."""
        return Combinations({k: tuple(v) for k, v in self.axes.items()}, self.zip, self.exclude)

    @property
    def trials(self) -> int:
        """How many trials it has, counted without making them."""
        return self.combinations.count * len(self.seeds)

    def trial_configs(self) -> Iterator[tuple[dict[str, str], TrialConfig]]:
        """Yield the labels on the axes and the configuration of every trial.

        Raises
        ------
        InvalidCombination
            An axis over something that is no key, or values that cannot work.
        """
        base = self.model_dump(exclude_unset=True, exclude=set(OF_THE_GRID))
        in_all = 0
        for labels in self.combinations:
            values = {axis: self.axes[axis][label] for axis, label in labels.items()}
            data = _with_values(base, values)
            for seed in self.seeds:
                trial = self._trial({**data, "seed": seed}, labels)
                in_all += len(trial.node_names) + len(trial.build_faults())
                if in_all > MOST_IN_ALL:
                    raise ConfigurationError(
                        f"the trials of the grid have more than {MOST_IN_ALL:,} nodes and faults "
                        "in all; vary less"
                    )
                yield labels, trial

    def _trial(self, data: dict[str, Any], labels: dict[str, str]) -> TrialConfig:
        try:
            return TrialConfig.model_validate(data, context=in_folder(self._folder))
        except ValidationError as error:
            raise InvalidCombination(
                [
                    _on_axis(each.key, self._with_strategies(each.reason), labels)
                    for each in complaints(error, data)
                ]
            ) from error

    def _with_strategies(self, reason: str) -> str:
        """Name those that write no checkpoints, where a fault needs some."""
        strategies = self.axes.get("recovery", {})
        more = any(axis.startswith("recovery.") for axis in self.axes)
        if reason != NO_CHECKPOINTS or not strategies or more:
            return reason
        sections = {
            label: RecoverySection.model_validate(value) for label, value in strategies.items()
        }
        without = [
            label
            for label, section in sections.items()
            if not section.build().durability.writes_checkpoints
        ]
        return (
            f"{reason}. None are by {listed(without, MOST_LISTED)}: `exclude` leaves combinations "
            "with a strategy out"
        )


class InvalidCombination(ConfigurationError):
    """Values on the axes that cannot work: `complaints` are what is wrong with them."""

    def __init__(self, complaints: Sequence[Complaint]) -> None:
        super().__init__("; ".join(f"{key}: {reason}" for key, reason, _ in complaints))
        self.complaints = complaints


def load_experiment(source: str | Document, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read, override and check the configuration of an experiment and of each of its trials.

    As `load_grid`, of which it leaves the trials out.
    """
    return load_grid(source, overrides)[0]


def load_grid(
    source: str | Document,
    overrides: Sequence[str] = (),
    confirm: Callable[[int], None] | None = None,
) -> tuple[ExperimentConfig, list[tuple[dict[str, str], TrialConfig]]]:
    """Read an experiment, and return it with the labels and the configuration of each trial.

    Parameters
    ----------
    source
        A YAML file, the name of a packaged configuration, such as "demo", or what was read of one.
    overrides
        Assignments such as "training.updates=400"; the value is read as YAML.
    confirm
        Is called with the number of trials before any of them is made; may raise.

    Raises
    ------
    ConfigurationError
        Anything in it that cannot work, with the place and what was expected.
    """
    document = source if isinstance(source, Document) else find_document(source)
    _refuse_other_kinds(document)
    assignments = parse_overrides(overrides)
    data = document.data
    for assignment in assignments:
        data = _override(data, assignment)
    try:
        set_keys = {each.key.split(".")[0] for each in assignments}
        narrowed = not set_keys.isdisjoint(SHAPE) and "claims" not in set_keys
        context = {**in_folder(document.folder), **(NARROWED if narrowed else {})}
        experiment = ExperimentConfig.model_validate(data, context=context)
        if confirm is not None:
            confirm(experiment.trials)
        configs = list(experiment.trial_configs())
    except ValidationError as error:
        found = complaints(error, data)
        blamed = _mistyped_values(data, document.folder) if all(map(_is_of_labels, found)) else []
        raise placed(blamed or found, document, assignments) from error
    except InvalidCombination as error:
        raise placed(error.complaints, document, assignments) from error
    return experiment, configs


def find_document(path_or_name: str) -> Document:
    """Read a YAML file, or a packaged configuration by its name.

    Raises
    ------
    ConfigurationError
        There is neither, or it is no YAML.
    """
    path = Path(path_or_name)
    try:
        is_there = path.exists()
        is_folder = path.is_dir()
    except OSError as error:  # such as a name that is too long
        reason = error.strerror or error
        raise ConfigurationError(f"{shown(path_or_name)}: cannot be read: {reason}") from error
    if is_there and not is_folder:
        return read_document(path)
    known = packaged_names()
    if path_or_name in known:
        packaged = Path(str(files("flows.configs") / f"{path_or_name}.yaml"))
        return read_document(packaged, f"packaged configuration {path_or_name!r}")
    there = "a folder, not a file" if is_folder else "no such file"
    raise ConfigurationError(
        f"{shown(path_or_name, 200)}: {there}, and no packaged configuration of this name; "
        f"{suggest(path_or_name, known)}"
    )


# -- parts -------------------------------------------------------------------------------------


def _refuse_other_kinds(document: Document) -> None:
    if "replication" in document.data:
        parts = ", ".join(_parts_of(document.data["replication"]))
        raise ConfigurationError(
            f"{document.name}: a replication, which is several experiments; `dps run` runs it, and "
            f"everything else takes its parts one by one: {parts or 'those its comment names'}"
        )
    if "emulation" in document.data:
        raise ConfigurationError(
            f"{document.name}: settings of an emulation, which only `dps replicate ttf` runs"
        )


def _parts_of(replication: object) -> list[str]:
    """The packaged experiments of a replication."""
    names = [name for name in packaged_names() if name.startswith(f"replicate/{replication}-")]
    return [name for name in names if "emulation" not in find_document(name).data]


def _is_of_labels(found: Complaint) -> bool:
    """Whether a complaint is of what names labels on the axes, and has none of its own."""
    return found.key.split(".")[0] in NAMES_LABELS


def _mistyped_values(data: dict[str, Any], folder: Path) -> Sequence[Complaint]:
    """What is wrong with the values on the axes, where something names a label that is not there.

    A value that is mistyped takes its label along: then the value is to blame, not who names it.
    """
    rest = {key: value for key, value in data.items() if key not in NAMES_LABELS}
    try:
        # One seed is enough: values are as wrong with each.
        one = ExperimentConfig.model_validate({**rest, "seeds": [0]}, context=in_folder(folder))
        for _ in one.trial_configs():
            pass
    except InvalidCombination as error:
        return error.complaints
    except (ValidationError, ConfigurationError):
        return []  # the grid is too large without what was left out of it
    return []


def _with_values(base: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    data = base
    for key in sorted(values, key=lambda key: key.count(".")):  # whole sections first
        try:
            data = set_key(data, key, values[key])
        except ConfigurationError as error:
            raise InvalidCombination([Complaint(f"axes.{key}", str(error))]) from error
    return data


def _on_axis(key: str, reason: str, labels: Mapping[str, str]) -> Complaint:
    """Point a complaint about a trial at the axis that the value is from, if it is from one."""
    involved = [axis for axis in labels if f"{key}.".startswith(f"{axis}.")]
    if not involved:
        combination = ", ".join(f"{shown(axis)} {quoted(label)}" for axis, label in labels.items())
        return Complaint(key, f"{reason} (with {combination})" if combination else reason)
    axis = max(involved, key=len)
    inner = f" {shown(key.removeprefix(axis).lstrip('.'))}:" if key != axis else ""
    others = "".join(
        f" (with {shown(other)} {quoted(labels[other])})" for other in involved if other != axis
    )
    told = f"{quoted(labels[axis])}:{inner} {reason}{others}"
    return Complaint(f"axes.{axis}", told, at=f"axes.{axis}.{labels[axis]}")


def _override(data: dict[str, Any], override: Override) -> dict[str, Any]:
    axes = data.get("axes")
    if isinstance(axes, dict) and (changed := _labelled_value(axes, override)) is not None:
        return {**data, "axes": changed}
    for axis in axes if isinstance(axes, dict) else ():
        if f"{override.key}.".startswith(f"{axis}."):
            raise ConfigurationError(
                f"{override}: the axis {quoted(axis)} varies this key, so that it would have no "
                f"effect. Set the axis instead (--set 'axes.{shown(axis)}=[...]'), or leave out "
                "all axes first (--set 'axes={}')."
            )
    return overridden(data, override)


def _labelled_value(axes: dict[str, Any], override: Override) -> dict[str, Any] | None:
    """Set the value of one label on an axis, or a key of it: `axes.AXIS.LABEL[.KEY]=…`.

    None: the key names a whole axis. It does where what follows an axis is a key of the
    configuration itself (`axes.recovery.outage` beside `axes.recovery`) and no label of the axis.
    """
    section, _, rest = override.key.partition(".")
    if section != "axes" or rest in axes:
        return None
    axis = max((each for each in axes if rest.startswith(f"{each}.")), key=len, default=None)
    if axis is None:
        return None
    try:
        values = labelled(axis, axes[axis])
    except PydanticCustomError:
        return None  # it is told of with the whole configuration
    name = rest.removeprefix(f"{axis}.")
    known = [label for label in values if f"{name}.".startswith(f"{label}.")]
    if not known and is_key(TrialConfig, rest):
        return None
    label = max(known, key=len, default=name)
    if known and not isinstance(axes[axis], dict):
        raise ConfigurationError(
            f"{override}: the values of the axis {quoted(axis)} are their own labels, so that "
            f"{quoted(label)} would name another value. Set the whole axis: "
            f"--set 'axes.{shown(axis)}=[...]'."
        )
    inner = name.removeprefix(label).lstrip(".")
    last = axis.rpartition(".")[2]  # so that one word may stand for a section, as anywhere else
    whole = replace(override, key=".".join(filter(None, [last, inner])))
    changed = overridden({last: values.get(label)}, whole)
    return {**axes, axis: {**values, label: changed[last]}}
