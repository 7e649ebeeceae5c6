"""Owns the look at a deployment before an experiment begins: is it there, large enough, and can
every fault be done on it? What is refused here would else fail one trial after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dps.errors import ConfigurationError
from flows.config import ExperimentConfig
from flows.fault_words import line
from flows.grid import Trial, expand
from flows.terminal import warn


def check_deployments(experiment: ExperimentConfig, parallel: int = 1) -> None:
    """Refuse an experiment that cannot run on the deployment that it names, if it names any.

    Raises
    ------
    ConfigurationError
        A fault cannot be done there; or several trials at once would use the same nodes.
    CapacityError
        There is no such deployment, or it has too few Dask workers.
    """
    if experiment.cluster.kind == "local" and not any(
        axis.partition(".")[0] == "cluster" for axis in experiment.axes
    ):
        return
    alike: defaultdict[object, list[Trial]] = defaultdict(list)
    for trial in expand(experiment):
        config = trial.config
        if config.cluster.kind == "existing":
            nodes = config.node_names, config.training.workers_per_node
            alike[config.cluster, nodes].append(trial)
    if alike and parallel > 1:
        raise ConfigurationError(
            f"--parallel {parallel}: trials on an existing deployment run one after the other, for "
            "they use the same nodes; leave it out"
        )
    for trials in alike.values():
        _check(trials)


def _check(trials: Sequence[Trial]) -> None:
    """Check trials that need the same nodes of the same deployment."""
    from dps.chaos.feasible import obstacles
    from flows.trial import nodes

    config = trials[0].config
    with config.cluster.open(nodes(config), (), warn) as cluster:
        for trial in trials:
            plan = trial.config.build_faults()
            for number, reason in obstacles(plan, cluster, config.node_names):
                told = line(plan[number])
                raise ConfigurationError(f"{trial.name}: {told!r} is not possible there: {reason}")
