"""Where a shard's state survives: the class that a kind of durability derives from.

An object of it is what a user chose, a frozen dataclass of settings. It answers whatever the rest
of dps has to know of the kind, and makes the parts that carry it out: one beside each replica that
keeps the state (`Persistence`), and, where workers and the coordinator have something to do, one
beside each of them. A kind is one module, which nothing else imports but to name it
(`dps.recovery`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from dps.core.blocks import ShardLayout
from dps.core.checkpoint_interval import FailureHistory
from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import ConfigurationError, NotServing, StoreUnavailable
from dps.events import Sink
from dps.protocol.tasks import Tasks
from dps.protocol.timings import Timings
from dps.protocol.transport import Clock, Endpoint, Transport
from dps.protocol.wire import message

Feature = Literal["buffered gradients", "filtered pulls", "functions", "moves", "tables"]


class CutPersistence(Protocol):
    """Writes a shard's state in cuts of all shards (see `dps.protocol.coordinator.snapshots`)."""

    async def write_cut(self, epoch: int, cut: int, state: ShardState) -> None:
        """Write the shard's state in a cut."""
        ...

    async def end_cut(self, epoch: int, cut: int, oldest: int) -> None:
        """Take note that a cut is complete, and remove those that are not needed any more."""
        ...


class Persistence(Protocol):
    """Keeps a shard's state where it outlives the server. Used from one event loop.

    Attributes
    ----------
    source
        What a state from `restore` is called in events.
    immediate
        Whether `commit` never has anything to wait for.
    window
        How many operations may be applied but not yet committed.
    saved
        The version that survives the loss of the server, if it need not be the last acked one.
    """

    source: str
    immediate: bool
    window: int

    @property
    def saved(self) -> int:
        """The version that survives the loss of the server."""
        ...

    @property
    def cuts(self) -> CutPersistence | None:
        """What writes states of consistent cuts, if all shards go back together."""
        ...

    def take_over(self, saved: int, version: int) -> None:
        """Go on where that of another replica is, which has given away its state of a version."""
        ...

    def enter(self, epoch: int, state: ShardState | None) -> None:
        """Take note of an epoch in which this replica commits, after a state that is committed.

        None: another replica commits, and is the one to keep what is not kept yet.
        """
        ...

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Make the state durable with which a server starts."""
        ...

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Return when the updates in `state` may be acked."""
        ...

    async def save(self, epoch: int, state: ShardState) -> None:
        """Return when a checkpoint holds a state that was committed."""
        ...

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Return the state to go on from, and keep servers of earlier epochs from changing it.

        `cut` is the one to go back to, where all shards go back together.
        """
        ...

    async def close(self) -> None:
        """Do nothing more by itself."""
        ...


class NoPersistence:
    """State survives only in the replicas of the shard, if there are several, or in workers."""

    source = "initial"
    immediate = True
    window = 64
    saved = 0
    cuts = None

    def take_over(self, saved: int, version: int) -> None:
        """Do nothing."""

    def enter(self, epoch: int, state: ShardState | None) -> None:
        """Do nothing."""

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Do nothing."""

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Do nothing."""

    async def save(self, epoch: int, state: ShardState) -> None:
        """Refuse: there are no checkpoints."""
        raise ConfigurationError("this recovery writes no checkpoints")

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Refuse: there is nothing to restore from."""
        raise StoreUnavailable("this durability keeps no state to restore from")

    async def close(self) -> None:
        """Do nothing."""


async def _no_store(store: Endpoint, request: Any, deadline: float) -> Any:
    raise NotServing("the group has no node for the state store")


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What a `Persistence` is made of: its shard, and what the server that has it works with.

    `group` is a name that no other parameter server has or had, for what is kept outside of it;
    `name` is that by which it is known, which on virtual time is the same in every run. `tasks` are
    the server's: an exception that one of them does not handle ends the server. `stores` returns
    the nodes that keep states, and raises `NotServing` if there is none; those of `whole_stores`
    each have all that was acked before. `ask_store` has one of them carry out a request, within so
    many seconds, and the coordinator told of it if it cannot be reached. `history` is what the
    group had seen of failures when this host was last told of them. `layout` says what lies where
    in the shard's buffer; it is given by every server. `from_below` says that every copy above a
    layer is lost: a state is restored from what the layer has.
    """

    shard: int
    group: str
    coordinator: Endpoint
    timings: Timings
    transport: Transport
    clock: Clock
    emit: Sink
    tasks: Tasks
    stores: Callable[[], tuple[Endpoint, ...]]
    history: Callable[[], FailureHistory] = FailureHistory
    layout: ShardLayout | None = None
    from_below: bool = False
    name: str = ""
    whole_stores: Callable[[], tuple[Endpoint, ...]] = tuple
    ask_store: Callable[[Endpoint, Any, float], Awaitable[Any]] = _no_store


class RoutingTable(Protocol):
    """A worker's connection to the coordinator."""

    def listen(self, heard: Callable[[Any], None]) -> None:
        """Call a function with every new `Table`."""
        ...

    def unlisten(self, heard: Callable[[Any], None]) -> None:
        """Call it no more."""
        ...

    async def ask(self, request: Any) -> Any:
        """Have the coordinator answer a request, as often as that takes."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker's part works with.

    `name` is that of this incarnation of the worker; `held` returns the `Weights` of a shard that
    were read last, or None.
    """

    name: str
    rule: UpdateRule
    timings: Timings
    transport: Transport
    router: RoutingTable
    tasks: Tasks
    held: Callable[[int], Any]


class WorkerPart(Protocol):
    """What a worker does for the durability beside its training."""

    async def close(self) -> None:
        """End what is under way."""
        ...


@dataclass(frozen=True, slots=True)
class CoordinatorContext:
    """What the coordinator's part works with.

    `workers` returns the names of the incarnations that take part; `publish` lets everybody have
    a table with what is `wanted` now.
    """

    workers: Callable[[], set[str]]
    publish: Callable[[], Awaitable[None]]
    clock: Clock
    emit: Sink


class InstallState(Protocol):
    """Have a host of a lost shard given its state.

    Without a donor it gets its initial values; else the worker of that name installs it, and is
    waited for as long as the donor `stands`. Returns what the host was brought.
    """

    def __call__(self, donor: str = "", stands: Callable[[], bool] | None = None) -> Awaitable[Any]:
        """Return when the state is there; raises `DpsError` if it does not come."""
        ...


class CoordinatorPart(Protocol):
    """How the coordinator brings a lost shard back whose state no server and no store has."""

    @property
    def services(self) -> Mapping[type, Callable[[Any], Awaitable[Any]]]:
        """What is done with the requests of workers' parts, by type."""
        ...

    @property
    def wanted(self) -> tuple[Any, ...]:
        """What is asked of all workers in the table."""
        ...

    async def restore(self, shard: int, epoch: int, host: Endpoint, install: InstallState) -> Any:
        """Bring a shard that has been served back on a host; return what `install` returned."""
        ...


class Durability:
    """One choice of where shard state survives.

    A subclass is a frozen dataclass, registered with `dps.protocol.wire.message`. What it does not
    override is as if state survived nothing. What others have to know of it they ask by the
    properties below; a field with a default, or a `ClassVar`, may stand for any of them.
    """

    __slots__ = ()

    @property
    def replicas(self) -> int:
        """How many replicas each shard has."""
        return 1

    @property
    def reads(self) -> Literal["tail", "any"]:
        """Who serves pulls: the "tail", or "any" replica."""
        return "tail"

    @property
    def aggregate(self) -> int:
        """How many updates are summed into one."""
        return 1

    @property
    def linger(self) -> float:
        """For how many seconds an update waits for others to be summed with."""
        return 0.0

    @property
    def writes_checkpoints(self) -> bool:
        """Whether there are files to go on from when the whole group is gone, below `path`."""
        return False

    @property
    def path(self) -> str | None:
        """Where the checkpoints are; None: that is not chosen yet, or there are none."""
        return None

    @property
    def keep(self) -> int:
        """How many checkpoints of each shard are kept."""
        return 1

    @property
    def seconds(self) -> float | None:
        """Within how many seconds an acked update is saved; None: that is not promised."""
        return None

    @property
    def needs_store(self) -> bool:
        """Whether a node for the state store is needed."""
        return False

    @property
    def stores(self) -> int:
        """How many stores keep each state."""
        return int(self.needs_store)

    @property
    def restores_in_parts(self) -> bool:
        """Whether blocks of a restored shard may be of different versions.

        Updates may be lost to some of them then, and are not applied again.
        """
        return False

    @property
    def restores_together(self) -> bool:
        """Whether all shards go back when one is lost."""
        return False

    @property
    def has_layer_below(self) -> bool:
        """Whether checkpoints are there for when every copy that acks have waited for is lost."""
        return False

    def refusal(self, feature: Feature) -> str | None:
        """Why it does not go with something that users may ask for; None: it does."""
        return None

    def at(self, path: str) -> Durability:
        """Return the same choice with its files below another path."""
        return self

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Whether a shard that has been served can be restored by a `Persistence`.

        `stored` are the stores that are known to have its state, and `stores` those of now.
        """
        return False

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Whether a host is waited for when it is silent, since the state must outlive one host.

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
        return NoPersistence()

    def metadata(self, epoch: int, state: ShardState) -> Any:
        """Return what workers get to know of a shard's state besides its weights, or None."""
        return None

    def worker_part(self, context: WorkerContext) -> WorkerPart | None:
        """Return what a worker does for it, if anything."""
        return None

    def coordinator_part(self, context: CoordinatorContext) -> CoordinatorPart | None:
        """Return how the coordinator brings lost shards back, if it has to."""
        return None


@message
@dataclass(frozen=True, slots=True)
class NoDurability(Durability):
    """Shard state survives nothing; a lost shard restarts from its initial values."""

    kind: ClassVar[str] = "none"

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Whether a host is the only replica: a server that is only silent has the state still."""
        return alone
