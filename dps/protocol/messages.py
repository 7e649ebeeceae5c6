"""The messages of the protocol, by subject: frozen dataclasses that may cross the wire.

A request names its reply, if that is not None. Any request may be answered by an error instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, dataclass_transform

import numpy as np

from dps.core.checkpoint_interval import FailureHistory
from dps.core.leases import BatchRecord, Division, Lease, key_of
from dps.core.names import restored_from
from dps.core.shard import Progress, ShardState
from dps.core.updates import Batch, Encoding, Operation, UpdateId
from dps.events import Failover
from dps.protocol import wire
from dps.protocol.monitor import Sighting
from dps.protocol.transport import Endpoint, Watched

STOPPED = "the training was stopped by ParameterServer.stop()"

wire.message(FailureHistory)
wire.message(Failover)
wire.message(Division)
wire.message(Lease)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """Makes each subclass a frozen dataclass that may cross the wire."""

    def __init_subclass__(cls) -> None:
        wire.message(dataclass(frozen=True)(cls))


class OfShard(Message):
    """A message about a shard as it is configured in `epoch`; a replica refuses any other epoch."""

    shard: int
    epoch: int


# -- the routing table -----------------------------------------------------------------------------
class View(OfShard):
    """The replicas of a shard, from head to tail; they are used only while it is `serving`."""

    chain: tuple[Endpoint, ...]
    serving: bool


class Keepers(Message):
    """The nodes that keep the states and the buffered gradients of a shard in an epoch."""

    stores: tuple[Endpoint, ...] = ()
    mailboxes: tuple[Endpoint, ...] = ()
    whole: int = 0  # the number of first stores that have every update acked before


class Seed(OfShard):
    """A state that `host` must be given: the copy of worker `donor`, or ("") initial values."""

    host: Endpoint
    keepers: Keepers
    donor: str = ""


class Table(Message):
    """The routing table, which the coordinator publishes; `version` grows with every change."""

    version: int
    views: tuple[View, ...]
    stores: tuple[Endpoint, ...]
    mailboxes: tuple[Endpoint, ...]
    seeds: tuple[Seed, ...]
    complete: bool  # all replicas of every shard serve
    closed: bool  # the group is closing
    wanted: tuple[Any, ...] = ()  # what the durability asks workers for
    leaving: tuple[Endpoint, ...] = ()  # hosts from which something is to be moved
    restorations: tuple[Restoration, ...] = ()  # the last one of each lost shard
    losses: int = 0  # grows whenever a loss becomes known, or known more exactly
    stops: int = 0  # number of stops; workers that started before the last one must end
    failovers: int = 0  # number of failovers so far


class GetTable(Message):
    """Get the table when it is newer than version `after`, or after `patience` s. Reply: Table."""

    after: int
    patience: float


class ReportFailure(Message):
    """A call to `host` failed; the coordinator checks that before it acts. Reply: Table."""

    host: Endpoint


class ReportLink(OfShard):
    """`host` was out of reach for `seconds`, longer than a lease. Reply: Table."""

    host: Endpoint  # a successor in the chain, a store or a mailbox
    seconds: float


# -- hosts -----------------------------------------------------------------------------------------
class HostInfo(Message):
    """A server, replica, spare, store or mailbox; `home` is the shard it is meant for, or -1."""

    host: Endpoint
    node: str
    role: str
    home: int
    machine: str = ""


class AddHosts(Message):
    """Use these hosts. One message has all hosts with which a group starts."""

    hosts: tuple[HostInfo, ...]


class RenewLease(Message):
    """A host asks for its lease; `life` is how often it has started over. Reply: Renewed."""

    host: Endpoint
    life: int
    watched: Watched | None = None


class Renewed(Message):
    """Whether the lease was `granted`; if not, the holder was given up."""

    granted: bool
    leaving: bool = False  # whether a worker is asked to leave
    history: FailureHistory = field(default_factory=FailureHistory)  # for hosts


class Sighted(Message):
    """The view that a monitor has of the processes on its host."""

    monitor: str
    sightings: tuple[Sighting, ...]


class Release(OfShard):
    """Forget a replica that has been replaced since `epoch`."""


# -- workers ---------------------------------------------------------------------------------------
class EnterWorker(Message):
    """A worker starts, in the process at `address` and the Dask task `task`. Reply: Entered."""

    worker: str
    address: str
    node: str
    task: str
    token: str  # the same if the request is resent
    stops: int  # how often the training had been stopped when the task was submitted
    watched: Watched | None = None


class Returned(Message):
    """A Dask task's training function has returned; `result` is packed, or None if not kept."""

    task: str
    result: np.ndarray | None


class Entered(Message):
    """How often a worker of this name has entered; it does not enter if its task `returned`."""

    incarnation: int
    returned: Returned | None = None


class RenewWorker(Message):
    """A worker, or a caller of functions, renews its lease and states its acks. Reply: Renewed."""

    worker: str
    incarnation: int
    statement: Statement
    watched: Watched | None = None


class ExitWorker(Message):
    """A worker ends, for a `reason` as in `WorkerLeft`; `called` is whether it called functions."""

    worker: str
    incarnation: int
    reason: str
    called: bool
    statement: Statement
    returned: Returned | None = None


class TakeLease(Message):
    """Get batches to compute for a `run` of workers over the same data. Reply: Leased."""

    worker: str
    incarnation: int
    run: str
    division: Division
    last: int  # the highest number of a lease that has reached the worker
    held: tuple[int, ...]  # the leases of which updates have not ended
    waits: bool  # whether the reply waits for batches that others may return


class RunEnded(Message):
    """Ask whether every shard has all batches of a `run` of workers. Reply: bool."""

    run: str


class Leased(Message):
    """Batches of a pass over the data; no `lease` if there is none yet, or as the pass `ended`."""

    pass_name: str = ""
    lease: Lease | None = None
    ended: bool = False
    given_up: bool = False  # this incarnation of the worker: it must enter again

    def batches(self) -> list[Batch]:
        """The batches of the lease, in their order."""
        if self.lease is None:
            return []
        epoch = key_of(self.pass_name, self.lease.epoch)
        return [Batch(epoch, number) for number in range(self.lease.begin, self.lease.end)]


class Evict(OfShard):
    """Remove workers that are gone from a shard's clock table.

    Reply: how many updates of them the shard has durably, by the names of `names_of`. A name under
    which a later incarnation has pushed is left out: that incarnation states its own.
    """

    workers: tuple[UpdateId, ...]


def donor_name(worker: str, incarnation: int) -> str:
    """Return the name of a worker as the holder of a copy."""
    return f"{worker}/{incarnation}"


# -- from the driver to the coordinator ------------------------------------------------------------
class Scale(Message):
    """Spread the shards over this many hosts from now on; answered at once."""

    servers: int


class Drain(Message):
    """Empty a host, and use it no more; answered at once."""

    host: Endpoint


class Dismiss(Message):
    """Ask a worker to leave; answered at once."""

    worker: str


class StopTraining(Message):
    """End all workers that started before this stop, the `number`-th.

    Reply, when all have left or after `patience` seconds: the names of those that have not.
    """

    number: int
    patience: float


class CloseGroup(Message):
    """Let every client know that the group is being closed."""


class GetIncidents(Message):
    """Reply: a tuple of losses, one for each restoration that cost any, and one of failovers."""


# -- replicas --------------------------------------------------------------------------------------
class Install(OfShard):
    """Hold a state, whose version `saved` is durable, as a replica in this chain."""

    chain: tuple[Endpoint, ...]
    state: ShardState
    source: str
    saved: int = 0
    keepers: Keepers = Keepers()


class Restore(OfShard):
    """Restore the shard by its durability (in `cut`), and serve it alone. Reply: Brought."""

    host: Endpoint
    keepers: Keepers
    cut: int = 0
    since: int = 0  # no store has it: use what the host received in this epoch or later
    from_below: bool = False  # no host has it either: use the checkpoints below


class Configure(OfShard):
    """Enter the epoch; a host that is not in `chain` stops serving the shard.

    A head also applies the gradients in the mailboxes, each time it gets this request.
    """

    chain: tuple[Endpoint, ...]
    kept: bool = False  # all that may have been acked is durable already
    keepers: Keepers = Keepers()


class Extend(OfShard):
    """Copy the state to `host`, which acknowledges every operation from now on."""

    host: Endpoint
    keepers: Keepers


class Replicate(OfShard):
    """Operations from `first` on for the successor; a newcomer also gets the `committed` index."""

    first: int
    operations: tuple[Operation, ...]
    committed: int = -1


class CanReach(OfShard):
    """Call a store that could not be reached; answered if the store answers."""

    store: Endpoint


class Seeded(OfShard):
    """A `Seed` was carried out."""

    brought: Brought


# -- pushes, to a shard's head ---------------------------------------------------------------------
class CopyId(Message):
    """Unique name of a worker's copy of a shard's weights: the `number`-th that `holder` sent."""

    holder: str
    number: int


class Push(OfShard):
    """Apply an operation. Reply: Pushed, with weights to read next if `pull`; or Waiting."""

    operation: Operation
    pull: bool
    patience: float  # seconds for which the consistency model may make it wait
    has: CopyId | None = None  # as in `Pull`


class Pushed(Message):
    """The update is as durable as the strategy promises."""

    # "duplicate": the shard had it; "repeated": it had another update of the same batch.
    outcome: Literal["applied", "duplicate", "repeated", "buffered"]
    version: int
    clock: int  # the worker's on this shard
    weights: Weights | None
    result: np.ndarray | None = None  # of a call, packed
    applied: int = 0  # number of the worker's, or caller's, updates in the state


class Waiting(Message):
    """Ask again: the consistency model makes the worker wait, or the update is not durable yet."""

    reason: str = ""  # why it could not be made durable
    for_workers: bool = False  # whether only slow workers are waited for


class ReplayBuffered(OfShard):
    """Apply gradients that a worker buffered while the shard was down, oldest first."""

    operations: tuple[Operation, ...]


# -- pulls, to the replica that serves reads -------------------------------------------------------
class Pull(OfShard):
    """Read the weights, or `rows` of a table. Reply: Weights or RowsRead, or Waiting."""

    reader: UpdateId  # the consistency model never makes one without a name wait
    seen: int  # read this version or a later one, unless what was read before is lost
    patience: float
    has: CopyId | None = None  # where pulls are filtered
    rows: RowsAsked | None = None


class RowsAsked(Message):
    """Rows by their keys, int64 and sorted; `keys` None: all from key `start` to below `stop`."""

    table: str
    keys: np.ndarray | None
    start: int = 0
    stop: int = 0


class ShardMetadata(Message):
    """A shard's state without its weights, and the epoch in which it was read."""

    epoch: int
    index: int
    steps: int
    workers: dict[str, Progress]
    results: dict[str, np.ndarray]
    batches: BatchRecord


class Weights(Message):
    """A shard's values at `version`, read at `at` (seconds since the Unix epoch)."""

    version: int
    at: float
    slack: int  # how many more gradients may be computed from them; -1: any number
    values: np.ndarray
    metadata: ShardMetadata | None = None  # if workers' copies may restore the shard
    # Where pulls are filtered, the worker then has `copy`: it is `values`, or the copy `since`
    # changed by them as `codec` describes.
    copy: CopyId | None = None
    since: CopyId | None = None
    codec: tuple[Encoding, ...] = ()


class RowsRead(Message):
    """Rows of a table at a shard's `version`, read at `at` (seconds since the Unix epoch)."""

    version: int
    at: float
    keys: np.ndarray | None  # those in the range, sorted; None: those that were asked for
    values: np.ndarray


# -- checkpoints, and cuts of all shards -----------------------------------------------------------
# How far each active worker is: its incarnation, and its clock, which is the number of its last
# update, or that of the round in which it entered.
Reach = dict[str, tuple[int, int]]


class WantCut(OfShard):
    """A checkpoint is due: the coordinator takes a cut that holds `version` of this shard soon."""

    version: int


class HoldCut(OfShard):
    """Admit no gradients until a cut is taken, or for `patience` seconds at most. Reply: Reach."""

    cut: int
    patience: float


class TakeCut(OfShard):
    """Write the state in which each worker is as far as `upto`. Reply: the version in the cut."""

    cut: int
    upto: Reach


class EndCut(OfShard):
    """The cut is complete, or given up; cuts before `oldest` are no longer needed."""

    cut: int
    complete: bool
    oldest: int


class Save(OfShard):
    """To a tail: write all that is acknowledged by now to a checkpoint. Reply: its version."""


# -- to stores and mailboxes -----------------------------------------------------------------------
class PutState(OfShard):
    """Keep this state; refused if a server of a later epoch has used the store."""

    state: ShardState


class PutSince(OfShard):
    """Like `PutState`, without what the store has already, in its state of index `base`."""

    state: ShardState
    base: int
    kept: dict[str, int]  # how many of the oldest levels of each table are left out


class LookUp(OfShard):
    """Refuse servers of earlier epochs from now on. Reply: the state's index; -1: there is none."""


class GetState(OfShard):
    """Refuse servers of earlier epochs from now on. Reply: the shard's state."""


class Deposit(OfShard):
    """Keep a gradient for a shard that is down in `epoch`."""

    operation: Operation


class TakeMail(OfShard):
    """Close the shard's mailbox for `epoch`. Reply: its operations, in the order of deposit."""


class ClearMail(OfShard):
    """Delete the gradients taken from the mailbox: the shard is served with them now."""


# -- losses of acknowledged updates ----------------------------------------------------------------
class Loss(Message):
    """Updates that were acknowledged, and that a shard has lost.

    Attributes
    ----------
    shard, epoch
        The shard, and its epoch since it was restored.
    time
        When it was restored, in seconds since the Unix epoch.
    updates, workers
        The number of lost updates (in `Worker.losses`: only those of that worker), and the number
        per worker, by name.
    exact
        Whether `updates` is exact. If not, at least that many are lost: a worker that had pushed
        updates was lost too, so its last acknowledgements are unknown.
    source, version
        What the shard was restored from ("initial" values, "checkpoint", "store", "worker", or the
        name that another durability gives it), and the number of updates in that state.
    cause
        Why the shard had to be restored.

    Examples
    --------
    >>> print(Loss(0, 0.0, updates=3, exact=True, source="checkpoint", version=120, epoch=2))
    shard 0 has lost 3 acknowledged updates: it was restored from its checkpoint at version 120
    """

    shard: int
    time: float
    updates: int
    exact: bool
    source: str
    version: int
    epoch: int
    workers: dict[str, int] = field(default_factory=dict, hash=False)
    cause: str = ""

    @property
    def restored_from(self) -> str:
        """The source of the restored state, in words."""
        return restored_from(self.source, self.version)

    def __str__(self) -> str:
        if not self.updates:
            many = "may have lost acknowledged updates of a lost worker"
        else:
            some = "" if self.exact else "at least "
            plural = "update" if self.updates == 1 else "updates"
            many = f"has lost {some}{self.updates} acknowledged {plural}"
        because = f", because {self.cause}" if self.cause else ""
        return f"shard {self.shard} {many}: it was restored from {self.restored_from}{because}"


class Brought(Message):
    """The state that a shard was restored with; reply to `Restore`, and part of `Seeded`."""

    source: str
    version: int
    applied: dict[str, int] = field(hash=False)  # by worker, or caller of functions
    based_on: int | None = None  # the epoch in which it was read, if it is a worker's copy


class Restoration(OfShard):
    """The restoration of a shard that had been served, because of `cause`; `number` counts them."""

    number: int
    at: float
    source: str
    version: int
    # By worker, or caller of functions; without updates that an earlier restoration had lost and an
    # older copy has brought back.
    applied: dict[str, int] = field(hash=False)
    # False if updates may have entered in a failed attempt to restore it, without an ack.
    certain: bool
    cause: str = ""


class Account(Message):
    """The last acknowledgement in `epoch`: the shard then had `count` updates under this `name`."""

    shard: int
    name: str
    epoch: int
    count: int  # also those that were acknowledged to earlier incarnations
    incarnation: int


class Statement(Message):
    """All that was acknowledged to a client, as of version `known` of the table."""

    known: int  # 0 while an ack from before a restoration may still be entered
    # Only the client's own incarnations: another process may have the same name.
    incarnations: tuple[int, ...]
    accounts: tuple[Account, ...]


def brought(source: str, state: ShardState, based_on: int | None = None) -> Brought:
    """Return what a shard that receives this state is restored with."""
    applied = {name: p.applied for name, p in state.workers.items() if p.applied}
    return Brought(source, state.version, applied, based_on)


def loss_after(restoration: Restoration, workers: dict[str, int], certain: bool) -> Loss:
    """Return what a restoration cost: updates by worker; a lower bound if that is not `certain`."""
    r = restoration
    total = sum(workers.values())
    return Loss(r.shard, r.at, total, certain, r.source, r.version, r.epoch, workers, r.cause)


# -- status ----------------------------------------------------------------------------------------
class Describe(OfShard):
    """Get the status of a shard. Reply: Description."""


class Description(Message):
    """The progress of a shard, by the state of the replica on a node."""

    node: str
    version: int
    nbytes: int
    applied: dict[str, int]  # how many updates of each worker
    clocks: dict[str, int]  # of active workers
    duplicates: int  # refused by this replica
    updates: int  # applied by this replica
    missed: int  # the sum of their staleness, in versions
    batches: BatchRecord  # of leased data, whose updates are durable


class Flush(Message):
    """Record all events that are not recorded yet."""
