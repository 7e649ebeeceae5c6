"""What a round of the soak is given, a strategy and its promises, and what it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dps.core.consistency import ASP, Consistency
from dps.core.outage import Continue
from dps.events import Applied
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.layered import Layered
from dps.protocol.durabilities.partial_checkpoint import PartialCheckpoint
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.recovery import Recovery
from flows.analysis.faults import FaultTimes
from flows.analysis.ledger import ledger
from flows.records.record import Record
from tests.soak.counting import require


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy under test.

    Attributes
    ----------
    both
        Whether all copies may be lost at once: the store with servers, or all replicas. Without a
        layer below, the strategy does not promise to survive that, only to say that a shard began
        anew.
    """

    name: str
    recovery: Recovery
    consistency: Consistency = field(default_factory=ASP)
    both: bool = False

    @property
    def replicated(self) -> bool:
        """Whether a shard lives as long as one of its replicas does."""
        return self.recovery.durability.replicas > 1

    @property
    def interval(self) -> float:
        """How many acked updates of a shard one restoration may cost."""
        match self.recovery.durability:
            case Checkpoint(at_risk=int(at_risk)) | PartialCheckpoint(at_risk=int(at_risk)):
                return at_risk
            case Chain():
                return 0
            case SharedStore() | Layered():
                return float("inf") if self.both else 0
            case _:
                return float("inf")

    @property
    def layered(self) -> bool:
        """Whether a shard goes back to checkpoints when all other copies are lost."""
        return self.recovery.durability.has_layer_below

    @property
    def kept_by_worker(self) -> int:
        """How many acked updates of a shard the loss of a worker may cost."""
        outage = self.recovery.outage
        return outage.limit if isinstance(outage, Continue) and outage.buffer == "worker" else 0


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was carried out; `part` is what the node was to the group."""

    kind: str
    part: str
    node: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a round came to; updates are counted on every shard."""

    case: str
    struck: Sequence[Struck]
    missed: int
    pushed: int
    acked: int
    lost: int
    dropped: int
    duplicates: int
    recoveries: Sequence[FaultTimes]


def check_events(record: Record) -> None:
    """What the events tell of: one head per epoch, nothing twice, no replicas that differ."""
    heads: dict[tuple[int, int], str] = {}
    for event in record.of(Applied):
        if event.head and event.times:
            first = heads.setdefault((event.shard, event.epoch), event.node)
            require(
                first == event.node,
                f"shard {event.shard}: {first} and {event.node} are head in {event.epoch}",
            )
    found = ledger(record)
    require(not found.applied_twice, f"{found.applied_twice} updates were applied twice")
    require(not found.replica_conflicts, f"{found.replica_conflicts} replica conflicts")


def parts(results: Sequence[Struck]) -> Counter[str]:
    """How often each kind of fault hit each part of the group."""
    return Counter(f"{struck.kind} {struck.part}" for struck in results)
