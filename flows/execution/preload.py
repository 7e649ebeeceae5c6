"""What the nodes of a trial need imported before they are forked, so that each is up at once."""

from __future__ import annotations

from flows.config import plugins
from flows.config.experiment import TrialConfig
from flows.workloads import with_torch

# Each process imports the command again by which all was started, and typer with that.
PRELOAD = ("dps.cluster.driver.parameter_server", "flows.execution.trial", "typer")


def preload_of(config: TrialConfig) -> tuple[str, ...]:
    """Return the modules that the nodes of a trial need."""
    torch = with_torch.PRELOAD if needs_torch(config) else ()
    return (*PRELOAD, *torch, *plugins.modules(config))


def needs_torch(config: TrialConfig) -> bool:
    """Whether the workload of a trial is computed by torch."""
    return config.workload.kind in with_torch.KINDS
