"""Owns the messages of the protocol, grouped by who receives them, each with its reply."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dps.core.shard import Progress, ShardState
from dps.core.updates import Operation, UpdateId
from dps.protocol.losses import Brought, Restoration, Statement
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message

# -- what the coordinator publishes ------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class View:
    """Who serves a shard in an epoch, from head to tail; nobody does if it is not `serving`."""

    shard: int
    epoch: int
    chain: tuple[Endpoint, ...]
    serving: bool


@message
@dataclass(frozen=True, slots=True)
class Seed:
    """A shard that `host` must be given: as worker `donor` has it, or ("") its initial values."""

    shard: int
    epoch: int
    host: Endpoint
    donor: str = ""


@message
@dataclass(frozen=True, slots=True)
class Wanted:
    """A lost shard of which copies are wanted at `host`: every worker answers with an `Offer`."""

    shard: int
    epoch: int
    host: Endpoint


@message
@dataclass(frozen=True, slots=True)
class Table:
    """The routing table; `version` grows with every change.

    `store` keeps states, `mailbox` buffered gradients. `complete` says that every shard is served
    by all its replicas, `closed` that the group is being taken down and nobody may ask any more.
    Something is still to be moved away from the hosts that are `leaving`. `restorations` are the
    last ones of shards that were lost, `losses` the revision of what they have cost. Workers that
    were started before the training was stopped for the last of `stops` times are to end.
    """

    version: int
    views: tuple[View, ...]
    store: Endpoint | None
    mailbox: Endpoint | None
    seeds: tuple[Seed, ...]
    complete: bool
    closed: bool
    wanted: tuple[Wanted, ...] = ()
    leaving: tuple[Endpoint, ...] = ()
    restorations: tuple[Restoration, ...] = ()
    losses: int = 0
    stops: int = 0


@message
@dataclass(frozen=True, slots=True)
class Done:
    """Reply to a request that has nothing else to tell."""


# -- to the coordinator ------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class GetTable:
    """Ask for the table as soon as it is newer than version `after`, or after `patience` s."""

    after: int
    patience: float


@message
@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell that a call to `host` failed; it is checked before anything follows. Reply: Table."""

    host: Endpoint


@message
@dataclass(frozen=True, slots=True)
class ReportLink:
    """A replica cannot reach its successor, and has not for longer than a lease. Reply: Done."""

    shard: int
    epoch: int
    successor: Endpoint


@message
@dataclass(frozen=True, slots=True)
class RenewLease:
    """A host asks to be counted on for another while; `life` is how often it has started over."""

    host: Endpoint
    life: int


@message
@dataclass(frozen=True, slots=True)
class RenewWorker:
    """A worker asks to be waited for, and says what it was told is durable. Reply: Renewed.

    A client that is no worker, and calls functions, only says what it was told.
    """

    worker: str
    incarnation: int
    statement: Statement


@message
@dataclass(frozen=True, slots=True)
class Renewed:
    """Whether the lease goes on, or whoever asked was given up; a worker may be asked to leave."""

    granted: bool
    leaving: bool = False


@message
@dataclass(frozen=True, slots=True)
class HostInfo:
    """A server, replica, spare, store or mailbox; `home` is the shard it is meant for, or -1."""

    host: Endpoint
    node: str
    role: str
    home: int
    machine: str = ""


@message
@dataclass(frozen=True, slots=True)
class AddHosts:
    """Make use of these hosts. Those that are up at the start come together. Reply: Done."""

    hosts: tuple[HostInfo, ...]


@message
@dataclass(frozen=True, slots=True)
class Seeded:
    """A seed was carried out."""

    shard: int
    epoch: int
    brought: Brought


@message
@dataclass(frozen=True, slots=True)
class CloseGroup:
    """Let every client know that the group is being taken down. Reply: Done."""


@message
@dataclass(frozen=True, slots=True)
class EnterWorker:
    """A worker loop starts, in the process at `address`. Reply: Entered.

    `token` is the same when the request is sent again, which is no second start. It was started
    after the training had been stopped for `stops` times.
    """

    worker: str
    address: str
    node: str
    token: str
    stops: int


@message
@dataclass(frozen=True, slots=True)
class Entered:
    """The worker's incarnation: how often a worker of that name has entered."""

    incarnation: int


@message
@dataclass(frozen=True, slots=True)
class ExitWorker:
    """A worker that `called` functions, or not, ended; `reason` is as in `WorkerLeft`."""

    worker: str
    incarnation: int
    reason: str
    called: bool
    statement: Statement


# -- to a shard's head; a pull to the replica that serves reads ----------------------------------


@message
@dataclass(frozen=True, slots=True)
class Push:
    """Apply an operation; if `pull`, return the weights that the worker may read next.

    If the consistency model makes it wait for more than `patience` seconds, the reply is `Waiting`.
    """

    shard: int
    epoch: int
    operation: Operation
    pull: bool
    patience: float


@message
@dataclass(frozen=True, slots=True)
class Beside:
    """What a shard's state is besides its weights, and the epoch in which they were read."""

    epoch: int
    index: int
    steps: int
    workers: dict[str, Progress]
    results: dict[str, np.ndarray]


@message
@dataclass(frozen=True, slots=True)
class Weights:
    """A shard's values at `version`, read at `at` (seconds since the Unix epoch).

    `slack` is how many further gradients the consistency model lets the worker compute from them
    without reading again; -1: any number. `beside` is there if workers' copies are of use.
    """

    version: int
    at: float
    slack: int
    values: np.ndarray
    beside: Beside | None = None


@message
@dataclass(frozen=True, slots=True)
class Pushed:
    """The update is durable to the strategy's promise; `outcome` is "applied" or "duplicate".

    `clock` is the worker's clock on this shard, `result` the packed result of a call, `applied` how
    many updates of the worker, or caller, are in the state.
    """

    outcome: str
    version: int
    clock: int
    weights: Weights | None
    result: np.ndarray | None = None
    applied: int = 0


@message
@dataclass(frozen=True, slots=True)
class Waiting:
    """The consistency model still makes the worker wait, or what it sent is not durable; ask again.

    `reason` is why it could not be made durable, if that has failed.
    """

    reason: str = ""


@message
@dataclass(frozen=True, slots=True)
class Pull:
    """Read the weights; `worker` waits as the consistency model says, "" never waits.

    `seen` is the version that the client has read before: it is not shown an older one, unless
    that one is lost.
    """

    shard: int
    epoch: int
    worker: str
    incarnation: int
    seen: int
    patience: float


@message
@dataclass(frozen=True, slots=True)
class ReplayBuffered:
    """Apply gradients that a worker buffered while the shard was down, oldest first."""

    shard: int
    epoch: int
    operations: tuple[Operation, ...]


@message
@dataclass(frozen=True, slots=True)
class Evict:
    """Workers are gone: take those out of the clock table that are in it. Reply: Durable."""

    shard: int
    epoch: int
    workers: tuple[UpdateId, ...]


@message
@dataclass(frozen=True, slots=True)
class Durable:
    """How many updates of workers that are gone a shard has durably, by the names of names_of.

    There is no entry for a name under which a later incarnation has pushed: it is told itself.
    """

    applied: dict[str, int]


# -- to any replica ----------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Replicate:
    """Operations from `first` on for the successor; a newcomer is told what is `committed`."""

    shard: int
    epoch: int
    first: int
    operations: tuple[Operation, ...]
    committed: int = -1


@message
@dataclass(frozen=True, slots=True)
class Install:
    """Hold this state, with version `saved` durable, as a replica in a chain with these members."""

    shard: int
    epoch: int
    chain: tuple[Endpoint, ...]
    state: ShardState
    source: str
    saved: int = 0


@message
@dataclass(frozen=True, slots=True)
class Restore:
    """Bring the shard back from where its durability keeps it (in `cut`), and serve it alone.

    `since`: it is kept nowhere any more; go on from what the host has got in that epoch or later.
    Reply: Brought.
    """

    shard: int
    epoch: int
    host: Endpoint
    cut: int = 0
    since: int = 0


@message
@dataclass(frozen=True, slots=True)
class Configure:
    """Enter `epoch` as the member `me` of `chain`; who is not in it serves no more.

    `kept`: whatever may have been acked is durable, as it was before.
    """

    shard: int
    epoch: int
    chain: tuple[Endpoint, ...]
    me: Endpoint
    kept: bool = False


@message
@dataclass(frozen=True, slots=True)
class Extend:
    """Copy the state to `host` and from now on have it acknowledge every operation."""

    shard: int
    epoch: int
    host: Endpoint


@message
@dataclass(frozen=True, slots=True)
class Audit:
    """Ask for the numbers of a shard's state. Reply: AuditReply."""

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class AuditReply:
    """The numbers of a shard's state (see `dps.events.Audited`)."""

    node: str
    version: int
    applied: dict[str, int]
    duplicates: int


@message
@dataclass(frozen=True, slots=True)
class Flush:
    """Record everything that is not recorded yet. Reply: Done."""


# -- to the store's node -----------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class PutState:
    """Keep this state of a shard; refused if a server of a later epoch has used the store."""

    shard: int
    epoch: int
    state: ShardState


@message
@dataclass(frozen=True, slots=True)
class GetState:
    """Return the shard's state and refuse servers of earlier epochs from now on."""

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class Deposit:
    """Keep a gradient for a shard that is down in `epoch`."""

    shard: int
    epoch: int
    operation: Operation


@message
@dataclass(frozen=True, slots=True)
class TakeMail:
    """Close the shard's mailbox for `epoch` and return what is in it. Reply: Mail."""

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class Mail:
    """Buffered gradients, in the order in which they were deposited."""

    operations: tuple[Operation, ...]


@message
@dataclass(frozen=True, slots=True)
class ClearMail:
    """The shard is served in this epoch, with what was taken from its mailbox; forget that."""

    shard: int
    epoch: int
