"""The look at what trials need before an experiment begins: does a torch module fit its data, is
the cluster there, can jobs be submitted, for how many trials at once is it large enough, and can
every fault be done on it? What is refused here would else fail one trial after the other.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from dps.errors import ConfigurationError
from flows.config.cluster import QueueSection
from flows.config.faults.text import line
from flows.config.trials import Trial
from flows.execution.plan import at_once_by_default
from flows.quoting import shown
from flows.workloads import DatasetShape, Workload
from flows.workloads.with_torch import KINDS

LONGEST_REASON = 300


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


def check_modules(trials: Sequence[Trial]) -> None:
    """Compute a gradient of two rows of zeros with each torch module: does it fit its data?

    Raises
    ------
    ConfigurationError
        It does not, or it is none; the message has what torch says.
    """
    seen = set[str]()
    for trial in trials:
        workload, dataset = trial.config.workload, trial.config.dataset
        key = f"{workload.model_dump_json()} {dataset.model_dump_json()}"
        if workload.kind in KINDS and key not in seen:
            seen.add(key)
            _check_module(workload.kind, workload.build(dataset.shape), dataset.shape)


def _check_module(kind: str, workload: Workload, shape: DatasetShape) -> None:
    x = np.zeros((2, shape.features), np.float32)
    y = np.array([0, shape.classes - 1])
    try:
        params = workload.initial(np.random.default_rng(0))
        workload.gradient(params, x, y)
        workload.evaluate(params, x, y)
    except ConfigurationError:
        raise
    except Exception as error:  # whatever a module of the user's raises
        reason = shown(f"{type(error).__name__}: {error}", LONGEST_REASON)
        raise ConfigurationError(
            f"workload: the {kind} module does not fit the data, rows of {shape.features} values "
            f"in {shape.classes} classes: {reason}. It gets a tensor of (rows, {shape.features}), "
            f"and returns scores of (rows, {shape.classes})"
        ) from error


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
