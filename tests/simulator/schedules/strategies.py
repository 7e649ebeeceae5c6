"""The recovery strategies that random schedules are run with: presets, and hybrids of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from dps.core.consistency import ASP, BSP, SSP, Consistency
from dps.core.filters.filter import Filter, Quantise, SignificantlyModified
from dps.core.leases import Division
from dps.core.placement import ConsistentHash
from dps.core.replay import Continue, Replay, Wait
from dps.protocol.timings import Timings
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import NoDurability
from dps.recovery.layered import Layered
from dps.recovery.partial import PartialCheckpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from dps.recovery.worker_cache import WorkerCache
from tests.simulator.workload import CELLS, WITHHELD, Bins

TIMINGS = Timings(
    call=1.0,
    copy=3.0,
    hold=0.3,
    retry=0.02,
    unavailable=30.0,
    lease=0.5,
    patience=3.0,
    stopped=0.3,
    last_copy=30.0,
)

EPOCHS = 2
JOINING = 3  # workers that may join later, and one for the end


@dataclass(frozen=True)
class Case:
    """A recovery strategy, and the group and workers that it is tried with.

    `servers` is how many nodes hold the shards at first; None: one for each replica. `busy` workers
    hardly pause between updates, or for up to `think` seconds; with `calls`, functions make some of
    the updates; with `leases`, workers lease the cells that they push, sometimes `ahead`. What
    workers pull goes through `pull_filters`, which leave it exact. `placement` is as in `Group`.
    """

    name: str
    recovery: Recovery
    consistency: Consistency = field(default_factory=ASP)
    shards: int = 2
    workers: int = 3
    busy: bool = False
    think: float | None = None
    filters: tuple[Filter, ...] = ()
    servers: int | None = None
    calls: bool = False
    pull_filters: tuple[Filter, ...] = ()
    placement: ConsistentHash | None = None
    leases: bool = False
    ahead: bool = True

    @property
    def leased(self) -> set[int]:
        """The cells of leased data; empty: each worker has its own cells."""
        return set(range(CELLS * self.workers)) if self.leases else set()

    @property
    def division(self) -> Division:
        """How they are divided: an example in each epoch has a cell."""
        return Division(len(self.leased) // EPOCHS, 1, lease=3, epochs=EPOCHS, shuffle=1)

    @property
    def interval(self) -> float:
        """How many acked updates one restoration may cost."""
        match self.recovery.durability:
            case Checkpoint(at_risk=int(at_risk)) | PartialCheckpoint(at_risk=int(at_risk)):
                return at_risk * (WITHHELD if self.filters else 1)
            case SharedStore() | Layered():  # a layer below has a check of its own
                return 0
        return float("inf")

    @property
    def linear(self) -> bool:
        """Whether a read shows all that anybody knew before.

        It does not if a worker goes on with its own last weights, or reads from any replica.
        """
        durability = self.recovery.durability
        any_replica = durability.above.reads == "any"
        return isinstance(self.recovery.outage, Wait) and not any_replica

    @property
    def lead(self) -> int | None:
        """How many updates a worker may be ahead of the weights that it computes from.

        None: any number, or with filters or leases, that weights do not tell how far somebody is.
        """
        if self.filters or self.leases:
            return None
        match self.consistency:
            case BSP():
                return 0
            case SSP(tau):
                return tau
        return None


_FILTERS: tuple[Filter, ...] = (Bins(CELLS, WITHHELD), Quantise("bf16"))

# Counts are whole numbers below 256, so what changes is above the threshold, and exact in bf16.
_SPARSE: tuple[Filter, ...] = (SignificantlyModified(0.5),)
_SHORT: tuple[Filter, ...] = (SignificantlyModified(0.5), Quantise("bf16"))

_RING = ConsistentHash(8)

_LAYER = Checkpoint(every=4)

_HELD = Continue(limit=3, buffer="worker")
_NONE = Recovery(NoDurability())
_ALL_SHARDS = Recovery(Checkpoint(every=4, scope="all"))
_CHECKPOINT = Recovery(Checkpoint(every=4))
_CHAIN = Recovery(Chain(2))
_STATELESS = Recovery(SharedStore(every=4), Continue())

_ALL = (
    Case("none", _NONE),
    Case("checkpoint", _CHECKPOINT),
    Case("checkpoint, sync", Recovery(Checkpoint(every=4, mode="sync"))),
    Case("chain(2)", _CHAIN),
    Case("chain(2), busy", _CHAIN, workers=5, busy=True),
    Case("chain(3)", Recovery(Chain(3))),
    Case("chain(3), reads any", Recovery(Chain(3, reads="any"))),
    Case("chain(2), aggregated", Recovery(Chain(2, aggregate=3))),
    Case("stateless", _STATELESS),
    Case("chain(2) + continue", Recovery(Chain(2), _HELD)),
    Case("chain(3) + mailbox", Recovery(Chain(3), Continue(limit=3), Replay("each"))),
    Case("checkpoint + continue", Recovery(Checkpoint(every=4), _HELD)),
    Case("checkpoint + mailbox", Recovery(Checkpoint(every=4), Continue(limit=3), Replay("each"))),
    Case("checkpoint, auto", Recovery(Checkpoint(every="auto", least=2, most=6)), busy=True),
    Case(
        "checkpoint, auto, sync",
        Recovery(Checkpoint(every="auto", mode="sync", least=1, most=5, mtbf=2.0)),
        workers=5,
    ),
    Case("checkpoint, auto, all", Recovery(Checkpoint(every="auto", least=2, most=6, scope="all"))),
    Case("partial checkpoint", Recovery(PartialCheckpoint(every=8, share=0.5))),
    Case(
        "partial checkpoint, sync",
        Recovery(PartialCheckpoint(every=8, share=0.25, mode="sync")),
        workers=5,
        busy=True,
    ),
    Case("checkpoint, seconds", Recovery(Checkpoint(seconds=0.2))),
    Case("checkpoint, all", _ALL_SHARDS),
    Case("checkpoint, all, BSP", _ALL_SHARDS, BSP()),
    Case("worker cache", Recovery(WorkerCache())),
    Case("worker cache + continue", Recovery(WorkerCache(), _HELD)),
    Case("shared store + wait", Recovery(SharedStore(every=4))),
    Case("none, BSP", _NONE, BSP()),
    Case("checkpoint, BSP", _CHECKPOINT, BSP()),
    Case("stateless, BSP", _STATELESS, BSP()),
    Case("checkpoint + mailbox, BSP", Recovery(Checkpoint(every=4), Continue(limit=3)), BSP()),
    Case("chain(2), SSP(1)", _CHAIN, SSP(1)),
    Case("chain(2) + continue, SSP(1)", Recovery(Chain(2), _HELD), SSP(1)),
    Case("none, filters", _NONE, filters=_FILTERS),
    Case("checkpoint, filters", _CHECKPOINT, filters=_FILTERS),
    Case("checkpoint, all, filters", _ALL_SHARDS, filters=_FILTERS),
    Case("chain(2), filters", _CHAIN, filters=_FILTERS),
    Case("stateless, filters", _STATELESS, filters=_FILTERS),
    Case("worker cache + continue, filters", Recovery(WorkerCache(), _HELD), filters=_FILTERS),
    Case("chain(2), BSP, filters", _CHAIN, BSP(), filters=_FILTERS),
    Case(
        "chain(2) + continue, SSP(1), filters", Recovery(Chain(2), _HELD), SSP(1), filters=_FILTERS
    ),
    Case("none, pull filters", _NONE, pull_filters=_SPARSE),
    Case("checkpoint, pull filters", _CHECKPOINT, pull_filters=_SHORT),
    Case("checkpoint, all, pull filters", _ALL_SHARDS, pull_filters=_SPARSE),
    Case("chain(2), pull filters", _CHAIN, pull_filters=_SPARSE),
    Case("chain(3), reads any, pull filters", Recovery(Chain(3, reads="any")), pull_filters=_SHORT),
    Case("stateless, pull filters", _STATELESS, pull_filters=_SPARSE),
    Case("chain(2), BSP, pull filters", _CHAIN, BSP(), pull_filters=_SHORT),
    Case("chain(2), filters both ways", _CHAIN, filters=_FILTERS, pull_filters=_SHORT),
    Case("chain(2), elastic, pull filters", _CHAIN, shards=4, servers=3, pull_filters=_SPARSE),
    Case("none, elastic", _NONE, shards=5, servers=2),
    Case("chain(2), elastic", _CHAIN, shards=4, servers=3),
    Case("chain(2) + functions", _CHAIN, calls=True),
    Case("chain(2) + functions, BSP", _CHAIN, BSP(), calls=True),
    Case("checkpoint + functions", _CHECKPOINT, calls=True),
    Case("stateless + functions", _STATELESS, calls=True),
    Case("worker cache + functions", Recovery(WorkerCache()), calls=True),
    Case(
        "checkpoint, seconds, elastic",
        Recovery(Checkpoint(seconds=0.3)),
        shards=3,
        workers=2,
        think=1.2,
        servers=2,
    ),
    Case("none, ring", _NONE, shards=6, servers=3, placement=_RING),
    Case("checkpoint, ring", _CHECKPOINT, shards=5, servers=3, placement=_RING),
    Case("chain(2), ring", _CHAIN, shards=5, servers=4, placement=_RING),
    Case("stateless, ring", _STATELESS, shards=4, servers=2, placement=_RING),
    Case("chain(2) over checkpoint", Recovery(Layered(Chain(2), _LAYER))),
    Case("chain(2) over checkpoint, busy", Recovery(Layered(Chain(2), _LAYER)), busy=True),
    Case(
        "chain(2) over checkpoint + continue, SSP(1)",
        Recovery(Layered(Chain(2), _LAYER), _HELD),
        SSP(1),
    ),
    Case("store over checkpoint", Recovery(Layered(SharedStore(every=4), _LAYER))),
    Case("stateless over checkpoint", Recovery(Layered(SharedStore(every=4), _LAYER), Continue())),
    Case(
        "chain(2) over checkpoint, seconds, elastic",
        Recovery(Layered(Chain(2), Checkpoint(seconds=0.3))),
        shards=3,
        servers=3,
    ),
    Case("chain(2) over checkpoint, seconds", Recovery(Layered(Chain(2), Checkpoint(seconds=5.0)))),
    Case("two stores + wait", Recovery(SharedStore(every=4, stores=2))),
    Case("stateless, two stores", Recovery(SharedStore(every=4, stores=2), Continue())),
    Case(
        "stateless, two stores, SSP(1)",
        Recovery(SharedStore(every=4, stores=2), Continue(limit=3)),
        SSP(1),
    ),
    Case(
        "two stores over checkpoint",
        Recovery(Layered(SharedStore(every=4, stores=2), _LAYER), Continue()),
    ),
    Case("leased, none", _NONE, leases=True),
    Case("leased, checkpoint", _CHECKPOINT, leases=True),
    Case("leased, checkpoint, all", _ALL_SHARDS, leases=True),
    Case("leased, chain(2)", _CHAIN, leases=True),
    Case("leased, chain(2), busy", _CHAIN, workers=5, busy=True, leases=True),
    Case("leased, chain(2), aggregated", Recovery(Chain(2, aggregate=3)), leases=True, ahead=False),
    Case("leased, chain(2), BSP", _CHAIN, BSP(), leases=True),
    Case("leased, chain(2), SSP(1)", _CHAIN, SSP(1), leases=True),
    Case("leased, chain(2) + continue", Recovery(Chain(2), _HELD), leases=True),
    Case("leased, stateless", _STATELESS, leases=True),
    Case(
        "leased, checkpoint + mailbox, BSP",
        Recovery(Checkpoint(every=4), Continue(limit=3)),
        BSP(),
        leases=True,
    ),
    Case("leased, chain(2) over checkpoint", Recovery(Layered(Chain(2), _LAYER)), leases=True),
    Case("leased, chain(2), elastic", _CHAIN, shards=4, servers=3, leases=True),
)
CASES = {case.name: case for case in _ALL}
