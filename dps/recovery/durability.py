"""Where a shard's state survives: the base classes of every kind of durability.

A `Durability` is what a user chose: a frozen dataclass of settings. It answers what the rest of dps
has to know of its kind, and makes the objects that carry it out: a `Persistence` beside each
replica that keeps the state and, where workers and the coordinator take part in a recovery, one
object beside each of them. A kind is one module of this package.

An update is *applied* in a server's memory, *committed* when it is as durable as the kind promises,
and *acked* when its worker is told. A store *keeps* a state; a checkpoint is *saved*.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from dps.core.blocks import ShardLayout
from dps.core.checkpoint_interval import FailureHistory
from dps.core.ranges import Checked
from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Sink
from dps.protocol.tasks import Tasks
from dps.protocol.timings import Timings
from dps.protocol.transport import Clock, Endpoint, Transport
from dps.protocol.wire import message

Feature = Literal["buffered gradients", "filtered pulls", "functions", "moves", "tables"]


class Persistence:
    """Keeps a shard's state where it outlives the server. Used from one event loop.

    This base class keeps nothing: a subclass overrides what its kind does.

    Attributes
    ----------
    source
        The name of what `restore` reads, for events.
    immediate
        Whether `commit` never has to wait.
    window
        How many operations may be applied but not yet committed.
    """

    source = "initial"
    immediate = True
    window = 64

    @property
    def saved(self) -> int:
        """The version that is saved, if acked updates may be newer than that; else 0."""
        return 0

    def take_over(self, saved: int, version: int) -> None:
        """Continue for another replica, which had `saved` and sent its state of `version`."""

    def enter(self, epoch: int, state: ShardState | None) -> None:
        """Enter an epoch, as the tail of the chain if there is a `state`, which is committed.

        None: another replica is the tail, and keeps what this one has not kept.
        """

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Make the state durable with which a server starts."""

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the updates in `state` may be acked."""

    async def save(self, epoch: int, state: ShardState) -> None:
        """Return when a checkpoint holds a committed state."""
        raise ConfigurationError("this recovery writes no checkpoints")

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the state to continue from, and fence servers of earlier epochs.

        `cut` is the one to go back to, where all shards are restored together.
        """
        raise StoreUnavailable("this durability keeps no state to restore from")

    async def write_cut(self, epoch: int, cut: int, state: ShardState) -> None:
        """Write the state in a cut of all shards (see `dps.protocol.coordinator.snapshots`)."""
        raise ConfigurationError("this recovery takes no cuts")

    async def end_cut(self, epoch: int, cut: int, oldest: int) -> None:
        """Take note that a cut is complete on all shards, and remove those before `oldest`."""
        raise ConfigurationError("this recovery takes no cuts")

    async def close(self) -> None:
        """Stop background work."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """A shard, and the services of its server.

    Attributes
    ----------
    group
        A name that no other parameter server has or had, for state outside of the group.
    name
        The group's name for users, which on virtual time is the same in every run.
    tasks
        Those of the server: an exception that one of them does not handle ends the server.
    stores
        Returns the nodes that keep states; raises `NotServing` if there is none.
    whole_stores
        Returns the stores that have all that was acked before.
    ask_store
        Sends a request to a store, with a deadline in seconds, and reports to the coordinator if
        the store is unreachable.
    history
        Returns the group's failures, as far as this host was told.
    layout
        The places of blocks in the shard's buffer.
    from_below
        Every copy above a layer is lost: restore what the layer has.
    """

    shard: int
    group: str
    name: str
    coordinator: Endpoint
    timings: Timings
    transport: Transport
    clock: Clock
    emit: Sink
    tasks: Tasks
    layout: ShardLayout
    history: Callable[[], FailureHistory]
    stores: Callable[[], tuple[Endpoint, ...]]
    whole_stores: Callable[[], tuple[Endpoint, ...]]
    ask_store: Callable[[Endpoint, Any, float], Awaitable[Any]]
    from_below: bool = False


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker's part works with.

    `name` is that of this incarnation of the worker; `ask` sends a request to the coordinator until
    it is answered; `tasks` are closed when the worker leaves; `held` returns the `Weights` of a
    shard that were read last, or None.
    """

    name: str
    rule: UpdateRule
    timings: Timings
    transport: Transport
    ask: Callable[[Any], Awaitable[Any]]
    tasks: Tasks
    held: Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class CoordinatorContext:
    """What the coordinator's part works with.

    `workers` returns the names of the active incarnations; `publish` sends a table with what is
    `wanted` now.
    """

    workers: Callable[[], set[str]]
    publish: Callable[[], Awaitable[None]]
    clock: Clock
    emit: Sink


class CoordinatorPart(Protocol):
    """How the coordinator restores a lost shard whose state no server and no store has.

    `services` has the handlers of requests from workers' parts, by type.
    """

    services: Mapping[type, Callable[[Any], Awaitable[Any]]]

    @property
    def wanted(self) -> tuple[Any, ...]:
        """What the table asks of all workers."""
        ...

    async def restore(
        self, shard: int, epoch: int, host: Endpoint, install: Callable[..., Awaitable[Any]]
    ) -> Any:
        """Restore a shard that was served before on a host; return what `install` returned.

        Called without arguments, `install` gives the host the initial values. Called with a
        worker's name and a function, it makes that worker install its copy, and waits while the
        function returns True. It returns what the host received, and raises `DpsError` if nothing
        arrives.
        """
        ...


class Durability(Checked):
    """One choice of where shard state survives.

    A subclass is a frozen dataclass, registered with `dps.protocol.wire.message`. What it does not
    override is as if state survived nothing. The attributes may be its fields.

    Attributes
    ----------
    replicas
        The number of replicas of each shard.
    reads
        The replica that serves pulls: the "tail", or "any".
    aggregate, linger
        How many updates are summed into one, and for how many seconds one waits for others.
    stores
        The number of state stores that keep each state.
    writes_checkpoints
        Whether there are files to resume from when the whole group is gone, below `path`.
    path
        The folder of the checkpoints; None: not chosen yet, or there are none.
    keep
        The number of checkpoints of each shard that are kept.
    seconds
        Within how many seconds an acked update is saved; None: that is not promised.
    scope
        What is restored when a shard is lost: that "shard", or "all".
    restores_in_parts
        Whether blocks of a restored shard may be of different versions. Some of them may lack
        updates then, which are not applied again.
    has_layer_below
        Whether there are checkpoints for when every copy that acks have waited for is lost.
    refusals
        The features that it does not support, each with the reason.
    """

    __slots__ = ()

    replicas: int = 1
    reads: Literal["tail", "any"] = "tail"
    aggregate: int = 1
    linger: float = 0.0
    stores: int = 0
    writes_checkpoints = False
    path: str | None = None
    keep: int = 1
    seconds: float | None = None
    scope: Literal["shard", "all"] = "shard"
    restores_in_parts = False
    has_layer_below = False
    refusals: Mapping[Feature, str] = MappingProxyType({})

    @property
    def above(self) -> Durability:
        """The durability that acks wait for: this one, unless it has layers."""
        return self

    @property
    def below(self) -> Durability:
        """The durability that writes checkpoints, if any: this one, unless it has layers."""
        return self

    def refusal(self, feature: Feature) -> str | None:
        """Return why a feature is not supported; None: it is."""
        return self.refusals.get(feature)

    def at(self, path: str) -> Durability:
        """Return the same choice with its files below another path."""
        return self

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Return whether a `Persistence` can restore a shard that was served before.

        By default it can if it writes checkpoints: there is one before a shard is served. `stored`
        are the stores that are known to have its state, and `stores` the present ones.
        """
        return self.writes_checkpoints

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Return whether a silent host is waited for, as no other one may have the state.

        Parameters
        ----------
        alone
            It is the only replica.
        tried
            It was to get the state since the shard was lost, and may have it.
        restorable
            The shard has not been served yet, or can be restored without the host.
        """
        return False

    def persistence(self, context: ServerContext) -> Persistence:
        """Return what keeps one shard's state."""
        return Persistence()

    def metadata(self, epoch: int, state: ShardState) -> Any:
        """Return what workers get to know of a shard's state besides its weights, or None."""
        return None

    def worker_part(self, context: WorkerContext) -> Callable[[Any], None] | None:
        """Return what a worker does with each new `Table` of the coordinator's, if anything."""
        return None

    def coordinator_part(self, context: CoordinatorContext) -> CoordinatorPart | None:
        """Return how the coordinator restores lost shards, if it has to."""
        return None


@message
@dataclass(frozen=True, slots=True)
class NoDurability(Durability):
    """Shard state survives nothing; a lost shard restarts from its initial values.

    dps waits for a silent server, which may have the only copy.

    >>> Recovery().durability
    NoDurability()
    """

    kind: ClassVar[str] = "none"

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Return True for the only replica: a server that is merely silent still has the state."""
        return alone
