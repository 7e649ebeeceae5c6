"""Messages that tell which acknowledged updates a restored shard lacks."""

from __future__ import annotations

from dataclasses import dataclass, field

from dps.core.names import restored_from
from dps.core.shard import ShardState
from dps.events import Failover
from dps.protocol.wire import message

message(Failover)


@message
@dataclass(frozen=True, slots=True)
class Loss:
    """Updates that were acknowledged, and that a shard has lost.

    Attributes
    ----------
    shard
        Which shard it was.
    time
        When the shard was restored, in seconds since the Unix epoch.
    updates
        How many are lost; of a worker's own losses, of that worker's updates.
    exact
        Whether that is their number. If not, there are at least so many: a worker that had pushed
        them was lost too, and nobody knows what it had been told last.
    source
        What the shard was restored from: "initial" values, "checkpoint", "store" or "worker"; or
        what a durability of one's own calls it.
    version
        How many updates the restored state has.
    epoch
        The shard's epoch since then.
    workers
        The name of each worker that lost updates, and how many.
    cause
        Why the shard had to be restored.
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
        """What the shard was restored from, in words."""
        return restored_from(self.source, self.version)

    def __str__(self) -> str:
        if not self.updates:
            many = "may have lost acknowledged updates of a worker that was lost too"
        else:
            some = "" if self.exact else "at least "
            plural = "update" if self.updates == 1 else "updates"
            many = f"has lost {some}{self.updates} acknowledged {plural}"
        because = f", because {self.cause}" if self.cause else ""
        return f"shard {self.shard} {many}: it was restored from {self.restored_from}{because}"


@message
@dataclass(frozen=True, slots=True)
class Restoration:
    """What a shard that had been served was brought back with, in `epoch`.

    `number` counts the shard's restorations, `applied` the updates of each worker, or caller of
    functions, in the state, but for those that an earlier restoration had lost and that are back
    with an older copy. It is not `certain` if some of these may have entered in an earlier
    attempt to bring the shard back, and so are none of those that the worker was told of. `cause`
    says why the shard had to be restored.
    """

    shard: int
    epoch: int
    number: int
    at: float
    source: str
    version: int
    applied: dict[str, int] = field(hash=False)
    certain: bool
    cause: str = ""


@message
@dataclass(frozen=True, slots=True)
class Brought:
    """What a shard is brought back with; reply to `Restore`, and part of `Seeded`.

    `based_on` is the epoch in which it was read, if it is a worker's copy.
    """

    source: str
    version: int
    applied: dict[str, int] = field(hash=False)
    based_on: int | None = None


@message
@dataclass(frozen=True, slots=True)
class Account:
    """The last acknowledgement in `epoch`: the shard then had `count` updates under this `name`.

    It was given to an `incarnation`, and the count has all that earlier ones were told of.
    """

    shard: int
    name: str
    epoch: int
    count: int
    incarnation: int


@message
@dataclass(frozen=True, slots=True)
class Statement:
    """All that a client was told is durable, as of version `known` of the table.

    It covers the `incarnations` of the worker that this client has been, and no others: another
    process may have the same name. `known` is 0 while an ack from before a restoration may yet
    count.
    """

    known: int
    incarnations: tuple[int, ...]
    accounts: tuple[Account, ...]


@message
@dataclass(frozen=True, slots=True)
class GetIncidents:
    """To the coordinator: ask for what has happened to shards so far. Reply: Incidents."""


@message
@dataclass(frozen=True, slots=True)
class Incidents:
    """The losses of a group, one for each restoration that cost any, and its last failovers."""

    losses: tuple[Loss, ...]
    failovers: tuple[Failover, ...]


def brought(source: str, state: ShardState, based_on: int | None = None) -> Brought:
    """What a shard is brought back with that is given this state."""
    applied = {name: p.applied for name, p in state.workers.items() if p.applied}
    return Brought(source, state.version, applied, based_on)


def loss_after(restoration: Restoration, workers: dict[str, int], certain: bool) -> Loss:
    """Return what a restoration cost: updates by worker; a lower bound if that is not `certain`."""
    r = restoration
    total = sum(workers.values())
    return Loss(r.shard, r.at, total, certain, r.source, r.version, r.epoch, workers, r.cause)
