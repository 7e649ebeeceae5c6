"""The look at models and at a cluster before an experiment begins.

Do models of the user's own fit the data? Is the cluster there, can jobs be submitted, for how many
trials at once is it large enough, and can every fault be done on it? What is refused here would
else fail one trial after the other.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from dps.core.rules.rule import by_rows
from dps.errors import ConfigurationError
from flows.config.cluster import QueueSection
from flows.config.experiment import TrialConfig
from flows.config.faults.text import line
from flows.config.own_data import OwnDataSection, PythonDataSection
from flows.config.trials import Trial
from flows.config.workload import MlpSection, RicaSection, workload_of
from flows.execution.plan import at_once_by_default
from flows.workloads.model_checks import check_model, example_batch
from flows.workloads.own_code import refusing
from flows.workloads.own_data import FunctionDataset, call, called


def check_deployments(
    trials: Sequence[Trial], parallel: int | None, warn: Callable[[str], None]
) -> int:
    """Refuse trials that cannot run on the deployment that they name, if they name any.

    Returns how many of them may run at once: `parallel`, or as many as there is room for, of
    which `warn` is told. None: one after the other, but as many as there are cores where trials do
    not disturb each other.

    Raises
    ------
    ConfigurationError
        A fault cannot be done there, or no job can be submitted.
    CapacityError
        There is no such deployment, or it has too few Dask workers.
    """
    parallel = at_once_by_default(trials) if parallel is None else parallel
    alike: defaultdict[object, list[Trial]] = defaultdict(list)
    for trial in trials:
        config = trial.config
        if config.cluster.kind != "local":
            nodes = config.node_names, config.training.workers_per_node
            alike[config.cluster.model_dump_json(), nodes].append(trial)
    at_once = min([parallel, *(_check(group, warn) for group in alike.values())])
    if at_once < parallel:
        warn(f"--parallel {parallel}: the deployment has room for {at_once} at once")
    return at_once


def check_models(trials: Sequence[Trial]) -> list[str]:
    """Check the models that are the user's own on a batch of their data, and all for their shards.

    Returns a line for each of the user's own, which says what was checked.

    Raises
    ------
    ConfigurationError
        One fails, does not fit its data, or its gradient is none; or it is too small for its
        shards; or a function that makes data makes others when it is called again.
    """
    checked: dict[object, str] = {}
    sources: dict[FunctionDataset, None] = {}
    for trial in trials:
        config = trial.config
        if isinstance(config.dataset, PythonDataSection):
            sources[config.dataset.source] = None
        if config.workload.kind in ("python", "torch"):
            key = config.workload.model_dump_json(), config.dataset, config.training.batch_size
            if key not in checked:
                checked[key] = f"Model: {_check_model(config)}."
    for source in sources:
        if call(source).data.digest != called(source).data.digest:
            raise ConfigurationError(
                f"{source.code.reference} returned other data when it was called again; draw from "
                "a generator with a seed"
            )
    _check_shards(trials)
    return [*dict.fromkeys(checked.values())]


def _check_shards(trials: Sequence[Trial]) -> None:
    """Refuse more shards than a model has elements, or rows where its optimizer needs whole ones.

    Initial parameters are drawn for that only where they may be too few, of a small model.
    """
    checked = set[object]()
    for trial in trials:
        config, shards = trial.config, trial.config.server.shards
        rows = by_rows(config.build_optimizer())
        key = config.workload.model_dump_json(), config.dataset.shape, shards, rows
        if key in checked or shards <= _fewest_rows(config):
            continue
        checked.add(key)
        with refusing(config.workload.kind, "cannot draw its initial parameters"):
            arrays = workload_of(config).initial(np.random.default_rng(0)).values()
        units = sum(len(each) if rows and each.ndim else each.size for each in arrays)
        if shards > units:
            unit = "rows, which the optimizer needs whole" if rows else "elements"
            raise ConfigurationError(
                f"{trial.name}: server.shards: {shards} shards, but the parameters have only "
                f"{units} {unit}"
            )


def _fewest_rows(config: TrialConfig) -> int:
    """Rows that the arrays of a workload have at least; of the user's own, 0."""
    section, features = config.workload, config.dataset.shape.features
    if isinstance(section, MlpSection):
        return features + sum(section.hidden)
    if isinstance(section, RicaSection):
        return section.filters
    return 0 if section.kind in ("python", "torch") else features


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
    from dps.chaos.feasible import obstacles
    from dps.cluster.backends.existing import ExistingCluster
    from flows.execution.trial import nodes

    config = trials[0].config
    if isinstance(config.cluster, QueueSection):
        config.cluster.check(nodes(config))
        return sys.maxsize  # as many as the queue lets in
    with config.cluster.open(nodes(config), (), warn) as cluster:
        for trial in trials:
            plan = trial.config.build_faults()
            for number, reason in obstacles(plan, cluster, config.node_names):
                told = line(plan[number])
                raise ConfigurationError(f"{trial.name}: {told!r} is not possible there: {reason}")
        return cluster.room if isinstance(cluster, ExistingCluster) else sys.maxsize
