"""The checks before an experiment starts: a problem found here would fail every trial later.

They check that the user's models fit the data, that the cluster is reachable and jobs can be
submitted, how many trials it can run at once, and that it supports every fault.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from dps.core.rules.rule import by_rows
from dps.errors import ConfigurationError
from dps.events import Event
from dps.faults.targets import obstacles
from dps.protocol.executor import available_cores
from flows.config.cluster import QueueSection
from flows.config.experiment import TrialConfig
from flows.config.own_data import OwnDataSection, PythonDataSection
from flows.config.trials import Trial
from flows.config.workload import OwnModelSection, batch_objection, workload_of
from flows.execution.attempt import nodes
from flows.monitor.estimate import Durations, seconds_of
from flows.records.record import Record
from flows.statistics.finished import whole_record
from flows.workloads.model_checks import check_model, example_batch
from flows.workloads.own_code import refusing


def at_once_by_default(trials: Sequence[Trial]) -> int:
    """Return the default number of concurrent trials: one per core, or 1 if trials share cores."""
    if any(trial.config.cluster.shares_cores for trial in trials):
        return 1
    return available_cores()


def recorded_in(
    folder: Path,
    trials: Sequence[Trial],
    durations: Durations,
    without: Collection[type[Event]] = (),
) -> Iterator[tuple[str, Record]]:
    """Yield what is recorded in a folder, by trial; `durations` learn how long such trials take.

    Records are read `without` events of some kinds.
    """
    for trial in trials:
        record = whole_record(trial, folder, without)
        if record is not None:
            if trial.config.cluster.kind != "virtual":  # whose records contain no real time
                durations.note(trial, seconds_of(record))
            yield trial.name, record


def check_deployments(
    trials: Sequence[Trial], parallel: int | None, warn: Callable[[str], None]
) -> int:
    """Refuse trials that cannot run on the deployment that they name, if they name any.

    Return how many of them may run at once: `parallel`, or the capacity of the deployment if that
    is lower, which is reported to `warn`. If `parallel` is None, it is `at_once_by_default`.

    Raises `ConfigurationError` if a fault cannot be done there, or no job can be submitted, and
    `CapacityError` if there is no such deployment, or it has too few Dask workers.
    """
    parallel = at_once_by_default(trials) if parallel is None else parallel
    alike: defaultdict[object, list[Trial]] = defaultdict(list)
    for trial in trials:
        config = trial.config
        if config.cluster.kind != "local":
            wanted = config.node_names, config.training.workers_per_node
            alike[config.cluster.model_dump_json(), wanted].append(trial)
    at_once = min([parallel, *(_check(group, warn) for group in alike.values())])
    if at_once < parallel:
        warn(f"--parallel {parallel}: the deployment has room for {at_once} at once")
    return at_once


def check_models(trials: Sequence[Trial]) -> list[str]:
    """Check the user's own models on a batch of their data, and all models for their shards.

    Return a line for each of the user's models, which describes the check.

    Raises `ConfigurationError` if a model fails, does not fit its data, has a wrong gradient, or is
    too small for its shards; or a data function returns different data when it is called again.
    """
    checked: dict[object, str] = {}
    functions: dict[PythonDataSection, None] = {}
    for trial in trials:
        config = trial.config
        if isinstance(config.dataset, PythonDataSection):
            functions[config.dataset] = None
        if config.workload.kind in ("python", "torch"):
            key = config.workload.model_dump_json(), config.dataset, config.training.batch_size
            if key not in checked:
                checked[key] = f"Model: {_check_model(config)}."
    for section in functions:
        section.check_again()
    _check_shards(trials)
    return [*dict.fromkeys(checked.values())]


def check_datasets(trials: Sequence[Trial]) -> None:
    """Load each data set once, so that missing or too few data are found before anything runs.

    Raises `ConfigurationError` if data are missing, or a trial's batches are larger.
    """
    trials_of: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        trials_of[trial.config.dataset.model_dump_json()].append(trial)
    for those in trials_of.values():
        data = those[0].config.dataset.load()
        for trial in those:
            if unfit := batch_objection(trial.config.training, data.name, len(data.y_train)):
                raise ConfigurationError(f"{trial.name}: training.batch_size: {unfit}")


def _check_shards(trials: Sequence[Trial]) -> None:
    """Refuse more shards than a model has elements, or rows where its optimizer needs whole ones.

    Initial parameters are drawn for that only where they may be too few, of a small model.
    """
    checked = set[object]()
    for trial in trials:
        config, shards = trial.config, trial.config.server.shards
        rows = by_rows(config.optimizer.build())
        key = config.workload.model_dump_json(), config.dataset.shape, shards, rows
        if key in checked or shards <= _fewest_rows(config):
            continue
        checked.add(key)
        with refusing(config.workload.kind, "cannot draw its initial parameters"):
            arrays = workload_of(config).initial(np.random.default_rng(0)).values()
        units = sum(len(each) if rows and each.ndim else each.size for each in arrays)
        if shards > units:
            unit = "rows, which the optimizer must not split" if rows else "elements"
            raise ConfigurationError(
                f"{trial.name}: server.shards: {shards} shards, but the parameters have only "
                f"{units} {unit}"
            )


def _fewest_rows(config: TrialConfig) -> int:
    """Return a lower bound on the rows of a workload's arrays; 1 for a user's workload."""
    section, features = config.workload, config.dataset.shape.features
    if not isinstance(section, OwnModelSection):
        return 1
    return features + sum(getattr(section, "hidden", ()))


def _check_model(config: TrialConfig) -> str:
    dataset, size = config.dataset, config.training.batch_size
    if isinstance(dataset, OwnDataSection):
        data = dataset.load("train")
        # From all over the file, which may be in the order of the classes.
        rows = np.linspace(0, len(data.y_train) - 1, size).astype(int)
        batch = data.x_train[rows], data.y_train[rows]
    else:
        batch = example_batch(dataset.shape, size)
    name = getattr(config.workload, "module", config.workload.kind)
    return check_model(workload_of(config), name, *batch)


def _check(trials: Sequence[Trial], warn: Callable[[str], None]) -> int:
    """Check trials that need the same nodes of the same cluster; return how many fit on it."""
    from dps.cluster.backends.existing import ExistingCluster

    config = trials[0].config
    if isinstance(config.cluster, QueueSection):
        config.cluster.check(nodes(config))
        return sys.maxsize  # the queue sets the limit
    with config.cluster.open(nodes(config), (), warn) as cluster:
        for trial in trials:
            plan = trial.config.fault_plan
            for number, reason in obstacles(plan, cluster, config.node_names):
                fault = str(plan[number])
                raise ConfigurationError(f"{trial.name}: cannot {fault}: {reason}")
        return cluster.room if isinstance(cluster, ExistingCluster) else sys.maxsize
