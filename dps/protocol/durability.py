"""Where a shard's state survives: the class that a kind of durability derives from.

An object of it is what a user chose, a frozen dataclass of settings. It answers whatever the rest
of dps has to know of the kind, and makes the parts that carry it out: one beside each replica that
keeps the state (`Persistence`), and, where workers and the coordinator have something to do, one
beside each of them. A kind is one module, which nothing else imports but to name it
(`dps.protocol.durabilities`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from dps.core.blocks import ShardLayout
from dps.core.checkpoint_interval import FailureHistory
from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Sink
from dps.protocol.timings import Timings
from dps.protocol.transport import Clock, Endpoint, Transport
from dps.protocol.wire import message
from dps.shown import Shown

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


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What a `Persistence` is made of: its shard, and what the server that has it works with.

    `store` returns the node that keeps states, and raises `NotServing` if there is none; `history`
    what the group had seen of failures when this host was last told of them. `layout` says what
    lies where in the shard's buffer; it is given by every server.
    """

    shard: int
    group: str
    coordinator: Endpoint
    timings: Timings
    transport: Transport
    clock: Clock
    emit: Sink
    store: Callable[[], Endpoint]
    history: Callable[[], FailureHistory] = FailureHistory
    layout: ShardLayout | None = None


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


class Durability(Shown):
    """One choice of where shard state survives.

    A subclass is a frozen dataclass, registered with `dps.protocol.wire.message`. What it does not
    override is as if state survived nothing.

    Attributes
    ----------
    replicas
        How many replicas each shard has.
    reads
        Who serves pulls: the "tail", or "any" replica.
    aggregate, linger
        How many updates are summed into one, and for how many seconds one waits for others.
    writes_checkpoints
        Whether there are files to go on from when the whole group is gone, below `path`.
    path, keep
        Where they are, and how many of each shard are kept.
    seconds
        Within how many seconds an acked update is saved; None: that is not promised.
    restores_together
        Whether all shards go back when one is lost.
    needs_store
        Whether a node for the state store is needed.
    restores_in_parts
        Whether blocks of a restored shard may be of different versions: updates may be lost to some
        of them, and are not applied again.
    """

    __slots__ = ()

    replicas: int = 1
    reads: Literal["tail", "any"] = "tail"
    aggregate: int = 1
    linger: float = 0.0
    writes_checkpoints: ClassVar[bool] = False
    path: str | None = None
    keep: int = 1
    seconds: float | None = None
    needs_store: ClassVar[bool] = False
    restores_in_parts: ClassVar[bool] = False

    @property
    def restores_together(self) -> bool:
        """Whether all shards go back when one is lost."""
        return False

    def refusal(self, feature: Feature) -> str | None:
        """Why it does not go with something that users may ask for; None: it does."""
        return None

    def at(self, path: str) -> Durability:
        """Return the same choice with its files below another path."""
        return self

    def is_restorable(self, stored: Endpoint | None, store: Endpoint | None) -> bool:
        """Whether a shard that has been served can be restored by a `Persistence`.

        `stored` is the node of the state store when its state was last known to be kept, and
        `store` what it is now.
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
