"""dps: a parameter server on Dask, for dense arrays and sparse tables.

The names imported here, `dps.events`, `dps.faults`, `dps.testing`, `dps.torch` and `dps.tree` are
the public interface. Update rules, filters and strategies among them can be chosen in experiments
and stored beside checkpoints. Names are imported on first use: numpy and Dask take most of a
second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dps.cluster.backends.local import LocalCluster as LocalCluster
    from dps.cluster.driver.parameter_server import ParameterServer as ParameterServer
    from dps.cluster.names import NodeSpec as NodeSpec
    from dps.cluster.node.batches import Batches as Batches
    from dps.cluster.node.pipeline import Pipeline as Pipeline
    from dps.cluster.node.worker import Worker as Worker
    from dps.cluster.supervision.session import Session as Session
    from dps.cluster.supervision.supervisor import supervise as supervise
    from dps.public import *  # noqa: F403

__version__ = "0.2.0"

_LAZY = {  # all others are in dps.public
    "Batches": "dps.cluster.node.batches",
    "LocalCluster": "dps.cluster.backends.local",
    "NodeSpec": "dps.cluster.names",
    "ParameterServer": "dps.cluster.driver.parameter_server",
    "Pipeline": "dps.cluster.node.pipeline",
    "Session": "dps.cluster.supervision.session",
    "Worker": "dps.cluster.node.worker",
    "supervise": "dps.cluster.supervision.supervisor",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        public = [name for name in vars(import_module("dps.public")) if not name.startswith("_")]
        return sorted([*public, *_LAZY], key=lambda name: (not name.isupper(), name))
    if name in ("errors", "events", "faults", "testing", "torch", "tree"):
        return import_module(f"dps.{name}")
    if not name.startswith("_"):
        module = import_module(_LAZY.get(name, "dps.public"))
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'dps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
