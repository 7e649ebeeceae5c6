"""Messages that bring a replica into service, configure it, and keep a chain equal."""

from __future__ import annotations

from dataclasses import dataclass

from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message


@message
@dataclass(frozen=True, slots=True)
class Keepers:
    """The nodes that keep states (`stores`) and buffered gradients (`mailboxes`) in an epoch.

    Each of them keeps all. The first stores, `whole` of them, have all that was acked before.
    """

    stores: tuple[Endpoint, ...] = ()
    mailboxes: tuple[Endpoint, ...] = ()
    whole: int = 0


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
    keepers: Keepers = Keepers()


@message
@dataclass(frozen=True, slots=True)
class Restore:
    """Bring the shard back from where its durability keeps it (in `cut`), and serve it alone.

    `since`: it is kept nowhere any more; go on from what the host has got in that epoch or later.
    `from_below`: nobody has got it either; go on from the layer of checkpoints. Reply: Brought.
    """

    shard: int
    epoch: int
    host: Endpoint
    keepers: Keepers
    cut: int = 0
    since: int = 0
    from_below: bool = False


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
    keepers: Keepers = Keepers()


@message
@dataclass(frozen=True, slots=True)
class Extend:
    """Copy the state to `host` and from now on have it acknowledge every operation."""

    shard: int
    epoch: int
    host: Endpoint
    keepers: Keepers


@message
@dataclass(frozen=True, slots=True)
class CanReach:
    """Ask a store for something, which could not be reached. Reply: Done, if it has answered."""

    shard: int
    epoch: int
    store: Endpoint


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
class Describe:
    """Ask how it stands with a shard, for whoever looks at the training. Reply: Description."""

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class Description:
    """A shard's version and bytes; of each worker its updates, and its clock if it takes part.

    `updates` are those that this replica has applied since it came to its node, and `missed` the
    versions that these had missed in all: their staleness.
    """

    version: int
    nbytes: int
    applied: dict[str, int]
    clocks: dict[str, int]
    updates: int
    missed: int


@message
@dataclass(frozen=True, slots=True)
class Flush:
    """Record everything that is not recorded yet. Reply: Done."""


@message
@dataclass(frozen=True, slots=True)
class Release:
    """To a host: forget a replica that has been replaced since `epoch`. Reply: Done."""

    shard: int
    epoch: int
