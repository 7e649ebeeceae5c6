"""dps: a parameter server on Dask, for dense arrays and sparse tables.

The names below are the public interface. `ParameterServer` is imported on first use, because it
brings in Dask, which takes a second to import. So are the modules `dps.torch`, which needs torch,
and `dps.tree`.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dps.core.arguments import explained
from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.filters.filter import (
    KKT,
    Filter,
    Lossless,
    Quantise,
    RandomSkip,
    Selection,
    Sending,
    SignificantlyModified,
    TopK,
)
from dps.core.functions import Changed, Part
from dps.core.outage import Continue, Replay, Wait
from dps.core.placement.hash_ring import ConsistentHash
from dps.core.rules.clipping import Clipped
from dps.core.rules.compensation import DelayCompensated
from dps.core.rules.decay import WeightDecay
from dps.core.rules.ftrl import FTRL
from dps.core.rules.penalties import L1, L2, ElasticNet, GroupL1, Penalty
from dps.core.rules.per_array import Frozen, PerArray
from dps.core.rules.proximal import DelayedProximal, Proximal
from dps.core.rules.rule import SGD, AdaGrad, Adam, AdamW, Momentum, UpdateRule
from dps.core.rules.schedules import Constant, Cosine, Schedule, Scheduled, StepDecay, WarmUp
from dps.core.rules.staleness import StalenessAware
from dps.core.tables.spec import Given, Normal, SparseSpec, Uniform, Zeros
from dps.errors import (
    CopiesMissingWarning,
    DpsError,
    LastStateNotSavedWarning,
    ResultLost,
    TrainingStopped,
    UpdatesDropped,
    UpdatesDroppedWarning,
    UpdatesLost,
    UpdatesLostWarning,
)
from dps.events import Failover
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.layered import Layered
from dps.protocol.durabilities.partial_checkpoint import PartialCheckpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.durabilities.worker_cache import WorkerCache
from dps.protocol.durability import Durability, NoDurability
from dps.protocol.messages import Loss
from dps.protocol.recovery import Recovery
from dps.protocol.storage.model_files import Model, load
from dps.protocol.timings import Timings

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer
    from dps.cluster.node.pipeline import Pipeline
    from dps.cluster.node.worker import Worker
    from dps.cluster.supervision.session import Session
    from dps.cluster.supervision.supervisor import supervise

__version__ = "0.1.0"

__all__ = [
    "ASP",
    "BSP",
    "FTRL",
    "KKT",
    "L1",
    "L2",
    "SGD",
    "SSP",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Chain",
    "Changed",
    "Checkpoint",
    "Clipped",
    "Consistency",
    "ConsistentHash",
    "Constant",
    "Continue",
    "CopiesMissingWarning",
    "Cosine",
    "DelayCompensated",
    "DelayedProximal",
    "DpsError",
    "Durability",
    "ElasticNet",
    "Failover",
    "Filter",
    "Frozen",
    "Given",
    "GroupL1",
    "LastStateNotSavedWarning",
    "Layered",
    "Loss",
    "Lossless",
    "Model",
    "Momentum",
    "NoDurability",
    "Normal",
    "ParameterServer",
    "Part",
    "PartialCheckpoint",
    "Penalty",
    "PerArray",
    "Pipeline",
    "Proximal",
    "Quantise",
    "RandomSkip",
    "Recovery",
    "Replay",
    "ResultLost",
    "Schedule",
    "Scheduled",
    "Selection",
    "Sending",
    "Session",
    "SharedStore",
    "SignificantlyModified",
    "SparseSpec",
    "StalenessAware",
    "StepDecay",
    "Timings",
    "TopK",
    "TrainingStopped",
    "Uniform",
    "UpdateRule",
    "UpdatesDropped",
    "UpdatesDroppedWarning",
    "UpdatesLost",
    "UpdatesLostWarning",
    "Wait",
    "WarmUp",
    "WeightDecay",
    "Worker",
    "WorkerCache",
    "Zeros",
    "__version__",
    "load",
    "supervise",
]


for _name in __all__:
    if isinstance(_found := globals().get(_name), type) and is_dataclass(_found):
        explained(_found)


def __getattr__(name: str) -> Any:
    if name == "ParameterServer":
        from dps.cluster.driver.parameter_server import ParameterServer

        return ParameterServer
    if name == "Pipeline":
        from dps.cluster.node.pipeline import Pipeline

        return Pipeline
    if name == "Worker":
        from dps.cluster.node.worker import Worker

        return Worker
    if name == "Session":
        from dps.cluster.supervision.session import Session

        return Session
    if name == "supervise":
        from dps.cluster.supervision.supervisor import supervise

        return supervise
    if name in ("torch", "tree"):
        return import_module(f"dps.{name}")
    raise AttributeError(f"module 'dps' has no attribute {name!r}")
