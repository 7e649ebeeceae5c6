"""Messages between the coordinator and those who come, stay and leave: hosts and workers.

The last of them are the driver's, which scales a group and ends a training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dps.core.checkpoint_interval import FailureHistory
from dps.protocol.messages.losses import Brought, Statement
from dps.protocol.monitor import Sighting
from dps.protocol.transport import Endpoint, Watched
from dps.protocol.wire import message

message(FailureHistory)

STOPPED = "the training was stopped by ParameterServer.stop()"

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
    """A host was not reached for `seconds` by one that needs it, longer than a lease. Reply: Table.

    That is a replica's successor, a store of its states, or a mailbox where a worker deposits.
    """

    shard: int
    epoch: int
    host: Endpoint
    seconds: float


@message
@dataclass(frozen=True, slots=True)
class RenewLease:
    """A host asks for its lease; `life` is how often it has started over. Reply: Renewed."""

    host: Endpoint
    life: int
    watched: Watched | None = None


@message
@dataclass(frozen=True, slots=True)
class RenewWorker:
    """A worker asks to be waited for, and says what it was told is durable. Reply: Renewed.

    A client that is no worker, and calls functions, only says what it was told.
    """

    worker: str
    incarnation: int
    statement: Statement
    watched: Watched | None = None


@message
@dataclass(frozen=True, slots=True)
class Sighted:
    """What a monitor sees of the processes on its host. Reply: Done."""

    monitor: str
    sightings: tuple[Sighting, ...]


@message
@dataclass(frozen=True, slots=True)
class Renewed:
    """Whether the lease goes on, or whoever asked was given up; a worker may be asked to leave.

    Hosts are told what the group has seen of failures.
    """

    granted: bool
    leaving: bool = False
    history: FailureHistory = field(default_factory=FailureHistory)


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
    after the training had been stopped for `stops` times, as the Dask task `task`.
    """

    worker: str
    address: str
    node: str
    token: str
    stops: int
    task: str = ""
    watched: Watched | None = None


@message
@dataclass(frozen=True, slots=True)
class Returned:
    """The training function of a Dask task has returned; `result` is packed, None: not kept."""

    task: str
    result: np.ndarray | None


@message
@dataclass(frozen=True, slots=True)
class Entered:
    """The worker's incarnation: how often a worker of that name has entered.

    It has not, if the function of its task has `returned` before.
    """

    incarnation: int
    returned: Returned | None = None


@message
@dataclass(frozen=True, slots=True)
class ExitWorker:
    """A worker that `called` functions, or not, ended; `reason` is as in `WorkerLeft`."""

    worker: str
    incarnation: int
    reason: str
    called: bool
    statement: Statement
    returned: Returned | None = None


@message
@dataclass(frozen=True, slots=True)
class Durable:
    """How many updates of workers that are gone a shard has durably, by the names of names_of.

    There is no entry for a name under which a later incarnation has pushed: it is told itself.
    """

    applied: dict[str, int]


def donor_name(worker: str, incarnation: int) -> str:
    """What a worker is called as the holder of a copy."""
    return f"{worker}/{incarnation}"


# -- to the coordinator, from the driver ------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Scale:
    """To the coordinator: keep the shards on this many hosts from now on. Reply: Done, at once."""

    servers: int


@message
@dataclass(frozen=True, slots=True)
class Drain:
    """To the coordinator: empty a host, and make no more use of it. Reply: Done, at once."""

    host: Endpoint


@message
@dataclass(frozen=True, slots=True)
class Dismiss:
    """To the coordinator: have a worker asked to leave. Reply: Done, at once."""

    worker: str


@message
@dataclass(frozen=True, slots=True)
class StopTraining:
    """To the coordinator: all workers are to end that were started before this, the `number`-th.

    It replies when none of them takes part any more, or after `patience` seconds. Reply: Ending.
    """

    number: int
    patience: float


@message
@dataclass(frozen=True, slots=True)
class Ending:
    """The workers that still take part, though they are to end."""

    left: tuple[str, ...]
