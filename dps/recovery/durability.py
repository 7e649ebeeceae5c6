"""Where a shard's state survives: the base classes of every kind of durability.

A `Durability` is a frozen dataclass with the user's settings. It states what its kind supports, and
makes the objects that implement it: a `Persistence` beside each replica, which keeps the state, and
a part in each worker and in the coordinator if they contribute to recoveries. Each kind is a module
of this package.

An update is *applied* in a server's memory, *committed* when it is as durable as the kind promises,
and *acked* when its worker gets the reply. A store *keeps* a state; a checkpoint is *saved*.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, Self

from dps.core.blocks import ShardLayout
from dps.core.checkpoint_interval import FailureHistory
from dps.core.ranges import Checked
from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Sink
from dps.protocol.messages import Keepers
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
        The name of the source that `restore` reads, for events.
    immediate
        Whether `commit` never waits.
    window
        How many operations may be applied but not yet committed.
    """

    source = "initial"
    immediate = True
    window = 64

    @property
    def saved(self) -> int:
        """The saved version, if acked updates may be newer; otherwise 0."""
        return 0

    def take_over(self, saved: int, version: int) -> None:
        """Continue for a replica that had saved version `saved` and sent its state of `version`."""

    def enter(self, epoch: int, state: ShardState | None) -> None:
        """Enter an epoch; if this replica is the tail of the chain, `state` is committed.

        If it is None, another replica is the tail, and keeps what this one has not kept.
        """

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Make durable the state with which a server starts."""

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the updates in `state` may be acked."""

    async def save(self, epoch: int, state: ShardState) -> None:
        """Return when a checkpoint holds `state`, which is committed."""
        raise ConfigurationError("this recovery writes no checkpoints")

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the state to continue from, and fence servers of earlier epochs.

        If all shards are restored together, `cut` is the number of the cut to restore.
        """
        raise StoreUnavailable("this durability keeps no state to restore from")

    async def write_cut(self, epoch: int, cut: int, state: ShardState) -> None:
        """Write the state in a cut of all shards (see `dps.protocol.coordinator.snapshots`)."""
        raise ConfigurationError("this recovery takes no cuts")

    async def end_cut(self, epoch: int, cut: int, oldest: int) -> None:
        """Note that a cut is complete on all shards, and remove cuts before `oldest`."""
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
        The server's background tasks; after an unhandled exception it starts over, empty.
    keepers
        Returns the nodes that keep states in an epoch; raises `StaleEpoch` in another one.
    ask_store
        Sends a request to a store, with a deadline in seconds, and reports to the coordinator if
        the store has been unreachable for longer than a lease.
    history
        Returns the history of the group's failures, as of this host's last lease renewal.
    layout
        The places of blocks in the shard's buffer.
    from_below
        Whether every copy above the layer is lost, so that `restore` reads the layer.
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
    keepers: Callable[[int], Keepers]
    ask_store: Callable[[Endpoint, Any, float], Awaitable[Any]]
    from_below: bool = False


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The services for a worker's part.

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
    """The services for the coordinator's part.

    `workers` returns the names of the active incarnations; `publish` publishes a table
    with what the part has as `wanted` now.
    """

    workers: Callable[[], set[str]]
    publish: Callable[[], Awaitable[None]]
    clock: Clock
    emit: Sink


class CoordinatorPart(Protocol):
    """How the coordinator restores a lost shard whose state no server and no store has.

    `services` has the handlers of requests from workers' parts, by request type.
    """

    services: Mapping[type, Callable[[Any], Awaitable[Any]]]

    @property
    def wanted(self) -> tuple[Any, ...]:
        """Requests of the table to all workers."""
        ...

    async def restore(
        self, shard: int, epoch: int, host: Endpoint, install: Callable[..., Awaitable[Any]]
    ) -> Any:
        """Restore on `host` a shard that was served before; return what `install` returned.

        Called without arguments, `install` gives the host the initial values. Called with a
        worker's name and a function, it makes that worker install its copy, and waits while the
        function returns True. `install` returns what the host received, and raises `DpsError` if
        nothing arrives.
        """
        ...


class Durability(Checked):
    """One choice of where shard state survives.

    A subclass is a frozen dataclass, registered with `dps.protocol.wire.message`. By default, state
    survives nothing. A subclass may have some of the attributes as fields.

    Attributes
    ----------
    replicas
        The number of replicas of each shard.
    reads
        The replica that serves pulls: the "tail", or "any".
    aggregate, linger
        How many updates are summed into one, and how many seconds an update waits for others.
    stores
        The number of state stores that keep each state.
    writes_checkpoints
        Whether files below `path` let a group resume after all its processes have ended.
    path
        The folder of the checkpoints; None if it is not chosen yet, or none are written.
    keep
        The number of checkpoints of each shard that are kept.
    seconds
        The promised time in which an acked update is saved; None: no such promise.
    scope
        What is restored when a shard is lost: that "shard", or "all".
    restores_in_parts
        Whether blocks of a restored shard may have different versions. Some blocks may then lack
        acked updates, which are not applied again.
    has_layer_below
        Whether checkpoints are restored if every copy that acks have waited for is lost.
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
        """Return why a feature is not supported; None if it is supported."""
        return self.refusals.get(feature)

    def at(self, path: str) -> Self:
        """Return the same choice with its files, if there are any, below another path."""
        own: Any = self
        return replace(own, path=path) if self.writes_checkpoints else self

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Return whether a `Persistence` can restore a shard that was served before.

        By default it can if it writes checkpoints, as it writes one before a shard is served.
        `stored` are the stores that are known to have the state, and `stores` the present ones.
        """
        return self.writes_checkpoints

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Return whether to wait for a silent host, as it may have the only copy of the state.

        Parameters
        ----------
        alone
            The host is the only replica.
        tried
            The host was asked to restore the state since the shard was lost, and may have it.
        restorable
            The shard has not been served yet, or can be restored without the host.
        """
        return False

    def persistence(self, context: ServerContext) -> Persistence:
        """Return the object that keeps one shard's state."""
        return Persistence()

    def metadata(self, epoch: int, state: ShardState) -> Any:
        """Return the part of a shard's state that workers receive with its weights, or None."""
        return None

    def worker_part(self, context: WorkerContext) -> Callable[[Any], None] | None:
        """Return the function that a worker calls with each new `Table`, or None."""
        return None

    def coordinator_part(self, context: CoordinatorContext) -> CoordinatorPart | None:
        """Return the coordinator's part, which restores lost shards, or None."""
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
