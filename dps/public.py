"""The public names that need no Dask; `dps` imports this module when one of them is first used.

Dataclasses among them may cross the wire and be stored beside checkpoints, and their errors name
the valid arguments. Names with an underscore are not public.
"""

from dataclasses import is_dataclass as _is_dataclass

from dps.core.arguments import explained as _explained
from dps.core.consistency import ASP as ASP
from dps.core.consistency import BSP as BSP
from dps.core.consistency import SSP as SSP
from dps.core.consistency import Consistency as Consistency
from dps.core.filters.filter import KKT as KKT
from dps.core.filters.filter import Filter as Filter
from dps.core.filters.filter import Lossless as Lossless
from dps.core.filters.filter import Quantise as Quantise
from dps.core.filters.filter import RandomSkip as RandomSkip
from dps.core.filters.filter import Selection as Selection
from dps.core.filters.filter import Sending as Sending
from dps.core.filters.filter import SignificantlyModified as SignificantlyModified
from dps.core.filters.filter import TopK as TopK
from dps.core.functions import Changed as Changed
from dps.core.functions import Part as Part
from dps.core.placement import ConsistentHash as ConsistentHash
from dps.core.replay import Continue as Continue
from dps.core.replay import Replay as Replay
from dps.core.replay import Wait as Wait
from dps.core.rules.proximal import FTRL as FTRL
from dps.core.rules.proximal import L1 as L1
from dps.core.rules.proximal import L2 as L2
from dps.core.rules.proximal import DelayedProximal as DelayedProximal
from dps.core.rules.proximal import ElasticNet as ElasticNet
from dps.core.rules.proximal import GroupL1 as GroupL1
from dps.core.rules.proximal import Penalty as Penalty
from dps.core.rules.proximal import Proximal as Proximal
from dps.core.rules.rule import SGD as SGD
from dps.core.rules.rule import AdaGrad as AdaGrad
from dps.core.rules.rule import Adam as Adam
from dps.core.rules.rule import AdamW as AdamW
from dps.core.rules.rule import Momentum as Momentum
from dps.core.rules.rule import UpdateRule as UpdateRule
from dps.core.rules.wrappers import Accumulated as Accumulated
from dps.core.rules.wrappers import Clipped as Clipped
from dps.core.rules.wrappers import Cosine as Cosine
from dps.core.rules.wrappers import DelayCompensated as DelayCompensated
from dps.core.rules.wrappers import Frozen as Frozen
from dps.core.rules.wrappers import PerArray as PerArray
from dps.core.rules.wrappers import Schedule as Schedule
from dps.core.rules.wrappers import Scheduled as Scheduled
from dps.core.rules.wrappers import StalenessAware as StalenessAware
from dps.core.rules.wrappers import StepDecay as StepDecay
from dps.core.rules.wrappers import WarmUp as WarmUp
from dps.core.rules.wrappers import WeightDecay as WeightDecay
from dps.core.tables.table import Given as Given
from dps.core.tables.table import Normal as Normal
from dps.core.tables.table import SparseSpec as SparseSpec
from dps.core.tables.table import Uniform as Uniform
from dps.core.tables.table import Zeros as Zeros
from dps.errors import ConfigurationError as ConfigurationError
from dps.errors import CopiesMissingWarning as CopiesMissingWarning
from dps.errors import DpsError as DpsError
from dps.errors import LastStateNotSavedWarning as LastStateNotSavedWarning
from dps.errors import ResultLost as ResultLost
from dps.errors import TrainingStopped as TrainingStopped
from dps.errors import UpdatesDropped as UpdatesDropped
from dps.errors import UpdatesDroppedWarning as UpdatesDroppedWarning
from dps.errors import UpdatesLost as UpdatesLost
from dps.errors import UpdatesLostWarning as UpdatesLostWarning
from dps.events import Failover as Failover
from dps.protocol.messages import Loss as Loss
from dps.protocol.timings import Timings as Timings
from dps.protocol.wire import message as message
from dps.recovery.chain import Chain as Chain
from dps.recovery.checkpoint import Checkpoint as Checkpoint
from dps.recovery.durability import Durability as Durability
from dps.recovery.durability import NoDurability as NoDurability
from dps.recovery.layered import Layered as Layered
from dps.recovery.model_files import Model as Model
from dps.recovery.model_files import load as load
from dps.recovery.partial import PartialCheckpoint as PartialCheckpoint
from dps.recovery.shared_store import SharedStore as SharedStore
from dps.recovery.strategy import Recovery as Recovery
from dps.recovery.worker_cache import WorkerCache as WorkerCache

# Never sent and never stored with checkpoints, so a user's class may have one of these names.
_LOCAL = (Changed, Given, Part, Sending, Timings)

for _class in list(vars().values()):
    if isinstance(_class, type) and _is_dataclass(_class):
        _explained(_class)
        if _class not in _LOCAL:
            message(_class)
