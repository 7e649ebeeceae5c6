"""What the coordinator publishes: the routing table, and what is still to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dps.protocol.messages.chain import Keepers
from dps.protocol.messages.losses import Restoration
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
    keepers: Keepers
    donor: str = ""


@message
@dataclass(frozen=True, slots=True)
class Table:
    """The routing table; `version` grows with every change.

    Each of the `stores` keeps states, each of the `mailboxes` buffered gradients. `complete` says
    that every shard is served by all its replicas, `closed` that the group is being taken down and
    nobody may ask any more. Something is still to be moved away from the hosts that are `leaving`.
    `restorations` are the last ones of shards that were lost, `losses` the revision of what they
    have cost, and `failovers` how many there have been. Workers that were started before the
    training was stopped for the last of `stops` times are to end. `wanted` is what the
    coordinator's part of the durability asks of all workers.
    """

    version: int
    views: tuple[View, ...]
    stores: tuple[Endpoint, ...]
    mailboxes: tuple[Endpoint, ...]
    seeds: tuple[Seed, ...]
    complete: bool
    closed: bool
    wanted: tuple[Any, ...] = ()
    leaving: tuple[Endpoint, ...] = ()
    restorations: tuple[Restoration, ...] = ()
    losses: int = 0
    stops: int = 0
    failovers: int = 0


@message
@dataclass(frozen=True, slots=True)
class Done:
    """Reply to a request that has nothing else to tell."""
