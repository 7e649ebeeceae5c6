"""dps: a parameter server on Dask, for dense arrays and sparse tables.

These names, `dps.events`, `dps.faults`, `dps.testing`, `dps.torch` and `dps.tree` are the public
interface. Update rules, filters and strategies among them can be chosen in experiments and stored
beside checkpoints. Names that need Dask or torch are imported on first use.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dps.cluster.names import NodeSpec
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
from dps.core.placement import ConsistentHash
from dps.core.replay import Continue, Replay, Wait
from dps.core.rules.proximal import (
    FTRL,
    L1,
    L2,
    DelayedProximal,
    ElasticNet,
    GroupL1,
    Penalty,
    Proximal,
)
from dps.core.rules.rule import SGD, AdaGrad, Adam, AdamW, Momentum, UpdateRule
from dps.core.rules.wrappers import (
    Clipped,
    Constant,
    Cosine,
    DelayCompensated,
    Frozen,
    PerArray,
    Schedule,
    Scheduled,
    StalenessAware,
    StepDecay,
    WarmUp,
    WeightDecay,
)
from dps.core.tables.table import Given, Normal, SparseSpec, Uniform, Zeros
from dps.errors import (
    ConfigurationError,
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
from dps.protocol.messages import Loss
from dps.protocol.timings import Timings
from dps.protocol.wire import message
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import Durability
from dps.recovery.layered import Layered
from dps.recovery.model_files import Model, load
from dps.recovery.none import NoDurability
from dps.recovery.partial import PartialCheckpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from dps.recovery.worker_cache import WorkerCache

if TYPE_CHECKING:
    from dps.cluster.backends.local import LocalCluster
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
    "ConfigurationError",
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
    "LocalCluster",
    "Loss",
    "Lossless",
    "Model",
    "Momentum",
    "NoDurability",
    "NodeSpec",
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
    "message",
    "supervise",
]


# Never sent and never stored with checkpoints, so a user's class may have one of these names.
_LOCAL = (Changed, Given, NodeSpec, Part, Sending, Timings)

for _name in __all__:
    if isinstance(_class := globals().get(_name), type) and is_dataclass(_class):
        explained(_class)
        if _class not in _LOCAL:
            message(_class)


_LAZY = {  # their modules import Dask
    "LocalCluster": "dps.cluster.backends.local",
    "ParameterServer": "dps.cluster.driver.parameter_server",
    "Pipeline": "dps.cluster.node.pipeline",
    "Session": "dps.cluster.supervision.session",
    "Worker": "dps.cluster.node.worker",
    "supervise": "dps.cluster.supervision.supervisor",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in ("torch", "tree"):
        return import_module(f"dps.{name}")
    raise AttributeError(f"module 'dps' has no attribute {name!r}")
