"""The facade: `ParameterServer`, which brings a group up on a Dask cluster and takes it down.

The driver keeps two things that nobody else can: it makes the host actor on every node that joins,
and it holds the initial values, which it installs wherever the coordinator asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dps.cluster.driver.connection import SchedulerConnection
from dps.cluster.driver.data_shares import refuse_futures, shares_of
from dps.cluster.driver.draining import Drainer
from dps.cluster.driver.inbox import Inbox
from dps.cluster.driver.incidents import IncidentWatch
from dps.cluster.driver.news import DropWatch, News
from dps.cluster.driver.observable import Observable
from dps.cluster.driver.setup import (
    Start,
    afresh,
    check_client,
    check_functions,
    check_options,
    checked_labels,
    from_path,
)
from dps.cluster.driver.shard_hosts import ShardHosts
from dps.cluster.driver.training_function import check_threads, must_be_sent
from dps.cluster.driver.training_watch import TrainingWatch
from dps.cluster.names import Node
from dps.cluster.node.audit import audit_all
from dps.cluster.node.evaluator import Score
from dps.cluster.node.logs import keep_quiet
from dps.cluster.node.weak import weakly
from dps.cluster.node.worker import Worker
from dps.cluster.node.worker_task import run_worker
from dps.cluster.platform import platform_of
from dps.cluster.scheduler.plugin import CoordinatorPlugin, forget, node_topic, take_out, widen
from dps.cluster.transport.calls import COORDINATOR_PREFIX, ClusterTransport, Meter
from dps.cluster.transport.port import port_of_driver
from dps.core.arguments import check_function, explained
from dps.core.consistency import ASP, Consistency
from dps.core.filters.filter import Filter
from dps.core.functions import Function
from dps.core.placement import BALANCED, ConsistentHash
from dps.core.ranges import argument_above_zero, brief, shown, whole_argument
from dps.core.rules.rule import SGD, UpdateRule
from dps.core.tables.row_gradients import KEYS
from dps.core.tables.spec import SparseSpec
from dps.errors import (
    CapacityError,
    ConfigurationError,
    DeadlineExceeded,
    DpsError,
    GroupClosed,
    InternalError,
    LastStateNotSavedWarning,
    RemoteError,
    ShardUnavailable,
    StoreUnavailable,
)
from dps.events import Failover, Sink
from dps.observe.history import History
from dps.observe.tracking import MlflowRun
from dps.protocol.client.client import Client
from dps.protocol.client.driver import Bootstrap, save_all
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import (
    AuditReply,
    CloseGroup,
    Dismiss,
    Drain,
    Loss,
    Scale,
    StopTraining,
    Table,
)
from dps.protocol.timings import Timings
from dps.protocol.transport import TransportChoice
from dps.recovery.strategy import Recovery, as_servers

if TYPE_CHECKING:
    import distributed

    from dps.cluster.backends.assignment import NodeAssignment

T = TypeVar("T")

START_SECONDS = 60.0


@explained
class ParameterServer(Observable):
    """Named arrays and sparse tables, sharded over Dask nodes and updated by asynchronous workers.

    Parameters
    ----------
    client
        A Dask client. Nodes with the Dask resource "server" hold shards, those with "worker" run
        training functions; if no node carries such a resource, dps shares the nodes out.
    params
        Name → array (float32 or float64): the initial values. May be empty if there are tables.
    tables
        Sparse tables, whose rows are made when they are first pushed to (see `SparseSpec`).
    shards
        How many parts the parameters are divided into; a part is never divided again.
    servers
        How many nodes hold shards at first (see `scale`); None: one for each replica of a shard,
        as far as there are nodes.
    optimizer
        The server-side update rule: `SGD`, `Momentum`, `AdaGrad`, `Adam`, `AdamW`, `FTRL`,
        `Proximal` or `DelayedProximal` with a penalty, any of them within `Scheduled`,
        `WeightDecay`, `Clipped`, `StalenessAware` or `DelayCompensated`, or one of your own (for
        checkpoints it must be registered with `dps.protocol.wire.message`). Or a rule for each
        array and table, by names (see `PerArray`), such as ``{"*.bias": SGD(0.1), "*": AdamW()}``.
    consistency
        `BSP()`, `SSP(tau)` or `ASP()`.
    recovery
        "none", "checkpoint", "chain", "stateless", or a `Recovery`. A `Checkpoint` needs a path
        that all nodes can reach.
    on_event
        Called with every event of the group, from the client's event loop: it must not block.
        None: nothing is recorded.
    timings
        Deadlines of the protocol.
    about
        Kept beside checkpoints, for whoever goes on from them (see `resume`); JSON.
    filters
        The name of an array, or "*" for all others → what its gradients go through before they are
        sent, such as ``[TopK(0.05), Quantise("bf16"), Lossless()]``. None: nothing.
    pull_filters
        The same for the weights that workers pull: what has changed since their last pull goes
        through it, such as ``[SignificantlyModified(1e-4)]``. `pull` here and evaluators get
        weights as they are. None: so does everybody.
    functions
        Name → function that may be run on the shards, by `apply` here and in workers.
    seats
        Which Dask worker is which node, on a cluster of `dps.cluster.backends.existing`; None: as
        Dask's resources say, or as dps shares the nodes out.
    labels
        Name → text that goes with every metric of the group, and with every line that it logs,
        such as ``{"model": "ranking"}``.
    on_loss
        What follows when a shard has lost updates that were acknowledged: "warn" (a Python warning
        here, and a line in the logs of Dask's scheduler and of the workers' nodes), "raise" (the
        same, and every worker gets `UpdatesLost` from its next request), or "ignore". They are
        listed in `losses` in any case. With "ignore", nor is there an `UpdatesDroppedWarning`.
    transport
        By what processes of the group send each other arrays: "auto" (shared memory between
        processes of one user on one host, a stream between others), "shared_memory" or "stream"
        (that alone), or "dask". Dask's own connections are used wherever the one chosen does not
        work, and for what goes to the coordinator.
    placement
        Which of the `servers` holds which shard: "balanced" (whichever has the fewest),
        "consistent_hash", or ``ConsistentHash(virtual_nodes=...)``.

    Attributes
    ----------
    saved
        What it goes on from, if it was brought up by `resume`.

    Raises
    ------
    CapacityError
        The cluster has too few nodes.
    ConfigurationError
        The parameters or choices cannot work.

    Notes
    -----
    With a synchronous client, the group is up when the constructor returns; with an asynchronous
    one, use ``async with``, and await what methods return (but for `run`, as for `Client.submit`).
    `close` (or leaving ``with``) takes the group down and leaves the cluster as it was; with
    checkpoints, the last state is in them then. Methods may be called from any thread.
    """

    def __init__(
        self,
        client: distributed.Client,
        params: Mapping[str, np.ndarray],
        *,
        tables: Sequence[SparseSpec] = (),
        shards: int = 1,
        servers: int | None = None,
        optimizer: UpdateRule | Mapping[str, UpdateRule] = SGD(0.01),  # noqa: B008 - a frozen value
        consistency: Consistency = ASP(),  # noqa: B008 - a frozen value
        recovery: str | Recovery = "none",
        on_event: Sink | None = None,
        timings: Timings = Timings(),
        about: Mapping[str, Any] | None = None,
        filters: Mapping[str, Sequence[Filter]] | None = None,
        pull_filters: Mapping[str, Sequence[Filter]] | None = None,
        functions: Mapping[str, Function] | None = None,
        seats: NodeAssignment | None = None,
        labels: Mapping[str, str] | None = None,
        on_loss: str = "warn",
        transport: TransportChoice = "auto",
        placement: str | ConsistentHash = BALANCED,
    ) -> None:
        check_client(client)
        choices = optimizer, consistency, recovery, timings
        kept = {} if about is None else about
        more = tables, filters, servers, pull_filters
        start = afresh(client, params, shards, *choices, kept, *more, placement=placement)
        talk = on_loss, transport
        self._set_up(client, start, on_event, functions, seats, labels, *talk)

    @classmethod
    def resume(
        cls,
        client: distributed.Client,
        path: str | PathLike[str],
        *,
        shards: int | None = None,
        servers: int | None = None,
        on_event: Sink | None = None,
        timings: Timings = Timings(),
        functions: Mapping[str, Function] | None = None,
        seats: NodeAssignment | None = None,
        labels: Mapping[str, str] | None = None,
        on_loss: str = "warn",
        transport: TransportChoice = "auto",
    ) -> ParameterServer:
        """Bring a parameter server up again from its checkpoints alone.

        Parameters
        ----------
        path
            What `Checkpoint` was given, or the folder of one parameter server in it.
        shards, servers
            On how many parts, and nodes, it is to be from now on; None: as before. With another
            number of shards each of them has the version of the one that had fewest updates.
        on_event, timings, functions, seats, labels, on_loss, transport
            As for a new one: they are not in the checkpoints.

        Raises
        ------
        StoreUnavailable
            There is no whole checkpoint of every shard.
        ConfigurationError
            The parameters cannot be divided into so many shards, or these not over so many servers.
        """
        check_client(client)
        server = cls.__new__(cls)
        start = from_path(client, path, timings, shards, servers)
        talk = on_loss, transport
        server._set_up(client, start, on_event, functions, seats, labels, *talk)
        return server

    def _set_up(
        self,
        client: distributed.Client,
        start: Start,
        on_event: Sink | None,
        functions: Mapping[str, Function] | None,
        seats: NodeAssignment | None,
        labels: Mapping[str, str] | None,
        on_loss: str,
        transport: TransportChoice,
    ) -> None:
        functions = {} if functions is None else functions
        check_functions(functions, start.group.recovery)
        check_options(on_event, seats, on_loss, transport)
        group = replace(
            start.group,
            recorded=on_event is not None,
            functions=dict(functions),
            labels=checked_labels({} if labels is None else labels),
            on_loss=on_loss,
            transport=platform_of(client).way(transport),
        )
        start = replace(start, group=group)
        self.group = group
        self.saved = start.saved
        self._client = client
        self._start_with = start
        self._history = History(start.group.rule)
        self._news = News(client)
        self._inbox = Inbox(client, start.group.name, on_event, self._history, self._news)
        before = start.saved.applied if start.saved is not None else {}
        clock = platform_of(client).clock
        self._training = TrainingWatch(group, self._history, clock, before)
        self._runs: list[MlflowRun] = []
        self._shard_hosts = ShardHosts(client, group, seats, self._let_in, self._news)
        self._drainer = Drainer(client, self._shard_hosts, self._drain, on_event, self._news)
        self._watch = IncidentWatch(group, self._news)
        self._drops = DropWatch(client, group, self._news)
        self._shares: dict[str, list[Any] | None] = {}  # futures of the partitions of each worker
        weakref.finalize(self, self._news.close)  # also when the program ends
        self._caller: Client | None = None
        self._started_workers = 0
        self._last_run: Sequence[str] = ()
        self._seeding: list[asyncio.Task[None]] = []  # the initial values; none before the start
        self._open = False
        self._lost = False
        self._connection = SchedulerConnection(client)
        self._is_asynchronous = client.asynchronous  # in the event loop, that is always true
        keep_quiet()
        if not client.asynchronous:
            client.sync(self._start)

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the cluster, each with its role."""
        return self._shard_hosts.nodes

    @property
    def leaving(self) -> frozenset[str]:
        """The names of the nodes that were told to leave, or have left after that."""
        return frozenset(self._drainer.names)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is not up yet."""
        return not self._open

    @property
    def scheduler_lost(self) -> bool:
        """Whether the connection to Dask's scheduler broke while this was open.

        The coordinator is lost with it, also if Dask connects again. Nothing more can be done here,
        and `close` only lets go of what is in this process; `resume` goes on from checkpoints.
        """
        return self._lost or (self._open and self._connection.lost)

    def __enter__(self) -> ParameterServer:
        if self._client.asynchronous:
            raise ConfigurationError(
                "the Dask client is asynchronous, so this parameter server is not up yet; "
                "use `async with ParameterServer(...)`, not `with`"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close(checkpoint=kind is None)

    async def __aenter__(self) -> ParameterServer:
        if not self._client.asynchronous:
            raise ConfigurationError(
                "the Dask client is not asynchronous, so this parameter server is up already; "
                "use `with ParameterServer(...)`, not `async with`"
            )
        await self._start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        await self._close(checkpoint=kind is None)

    # -- what a user does ------------------------------------------------------------------------

    def run(self, train: Callable[..., T], workers: int = 1, data: Any = None) -> list[Any]:
        """Run a training function on `workers` nodes.

        Parameters
        ----------
        train
            Called with a `Worker` in a Dask task on each node; a plain function or a
            `functools.partial`, as for `Client.submit`. With `data` it is called with the worker
            and the list of the partitions that are its share.
        workers
            How many to start. Each occupies a thread of a node until its function returns.
        data
            A Dask array (in chunks of whole rows), DataFrame or bag, or a list of futures such as
            `Client.scatter` returns, which workers share: each is given as many whole partitions
            as the others (or one more), computed on its node, in order, as numpy arrays, pandas
            DataFrames, lists or whatever the futures hold. With a tuple of such collections each
            partition is the tuple of those of the same number. Shares stay in memory until the
            group is closed, for workers that are started again.

        Returns
        -------
        futures
            One Dask future for each worker, with what its function returned.

        Raises
        ------
        CapacityError
            Too few threads of the nodes for workers are free; the message says what holds them.
        ConfigurationError
            `train` is no such function, or cannot be sent to a node, as it uses this parameter
            server or the client; or `data` cannot be shared out.
        """
        self._require_open()
        workers = whole_argument("workers", workers, 1, "workers")
        refuse_futures(train)
        check_function("train", train, ["worker"] if data is None else ["worker", "data"])
        nodes = self._worker_nodes
        own = self._training.holding()
        check_threads(self._client, nodes, workers, self.name, own)
        shares: Sequence[Any] = [None] * workers
        if data is not None:
            shares = shares_of(self._client, data, workers, [node.address for node in nodes])
        first = self._started_workers
        peers = [f"worker-{number}" for number in range(first, first + workers)]
        futures = [
            self._submit(train, peers, index, nodes, share) for index, share in enumerate(shares)
        ]
        self._started_workers += workers
        self._last_run = peers
        self._note_updates()
        self._shares.update(zip(peers, shares, strict=True))
        return futures

    def run_again(self, train: Callable[..., T], worker: str, node: str) -> Any:
        """Start a worker again that was lost with its node; return its Dask future.

        It enters as another incarnation: nothing of the one before is taken for its own. Its share
        of `data` is the same.

        Parameters
        ----------
        worker
            Its name, such as "worker-0".
        node
            The name of the node to start it on, which must be free. Dask alone might have it wait
            for a node that is busy.

        Raises
        ------
        ConfigurationError
            There is no such node.
        """
        self._require_open()
        nodes = [known for known in self._worker_nodes if known.name == node]
        if not nodes:
            raise ConfigurationError(f"there is no node {node!r} for workers")
        return self._submit(train, [worker], 0, nodes, self._shares.get(worker), only_on=node)

    def evaluate(self, score: Score, every: float = 1.0) -> Any:
        """Score snapshots of the weights on a node of their own, until the group is closed.

        Nothing that is pushed after this has returned is in the first one, unless a shard is down.

        Parameters
        ----------
        score
            Called with the weights. Returns the loss, or loss and accuracy (and the objective and
            the stationarity of the training problem, which are recorded as `Evaluated`), or a
            mapping of names to numbers. Where it raises, or returns anything else, there is no
            score and one warning.
        every
            Seconds from one evaluation to the next.

        Raises
        ------
        ConfigurationError
            `score` is no function of the weights, or `every` no number above 0.
        CapacityError
            No node has the Dask resource "evaluator", nor is one left for workers.
        """
        self._require_open()
        check_function("score", score, ["weights"])
        every = argument_above_zero("every", every)
        return self._client.sync(self._shard_hosts.evaluate, score, every)

    def apply(self, function: str, *args: Any) -> list[Any]:
        """Run a registered function on every shard, once on each, whatever is lost meanwhile.

        Parameters
        ----------
        function
            The name that it was registered by. It is called with the shard's part of each array
            (name → `Part`) and `args`, and returns a result, or `Changed` values and a result.
        args
            None, numbers, texts, arrays of numbers, and lists, tuples or dicts by text of such.

        Returns
        -------
        results
            What it returned on each shard: of the same kinds as `args`, 1 MiB at most.

        Raises
        ------
        ConfigurationError
            There is no such function, or an argument is none of these. No shard was asked.
        FunctionFailed
            It failed on some shards, where nothing changed; the message says which, and why.
        ShardUnavailable
            A shard stayed down for too long.
        """
        self._require_open()
        results: list[Any] = self._client.sync(self._apply, function, args)
        return results

    def pull(self) -> dict[str, np.ndarray]:
        """Return the current weights as fresh arrays, without waiting for any worker.

        Raises
        ------
        ShardUnavailable
            A shard stayed down for too long.
        """

        async def read(reader: Client) -> dict[str, np.ndarray]:
            await reader.pull()
            return {name: array.copy() for name, array in reader.weights().items()}

        return self._read(read)

    def pull_rows(self, table: str, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return rows of a sparse table by their keys, without waiting for any worker.

        Parameters
        ----------
        table
            Its name.
        keys
            Whole numbers from 0 to 2⁶³ - 1, in any order; some may be repeated.

        Returns
        -------
        rows
            (keys, width), in the order asked for. A row that nobody has pushed to is as it begins.

        Raises
        ------
        ShapeMismatch
            An unknown table, or keys that are none.
        ShardUnavailable
            A shard stayed down for too long.
        """
        return self._read(lambda reader: reader.pull_rows(table, keys))

    def pull_range(
        self, table: str, start: int = 0, stop: int = KEYS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that exist with keys from `start` to below `stop`; errors as `pull_rows`.

        Returns
        -------
        keys
            int64, sorted: those that were pushed to.
        rows
            (keys, width).
        """
        return self._read(lambda reader: reader.pull_range(table, start, stop))

    def audit(self) -> list[AuditReply | None]:
        """Return the numbers of each shard's state, None for one that does not answer."""
        self._require_open()
        asked = self._client.sync(audit_all, self.group, self._router, self._transport)
        replies: list[AuditReply | None] = asked
        return replies

    def table(self) -> Table:
        """Return who serves what at this moment."""
        self._require_open()
        table: Table = self._client.sync(self._router.fetch)
        return table

    @property
    def losses(self) -> list[Loss]:
        """The updates that were acknowledged, and that a shard has lost since.

        One entry for each time that a shard had to go back: how many updates it has lost, whether
        that is their number or a lower bound, whose they were, and what it was restored from.
        Workers are asked what they had been told, which takes a moment. With an asynchronous
        client, these are the losses that have been heard of so far.
        """
        self._look_for_incidents()
        return list(self._watch.losses)

    @property
    def failovers(self) -> list[Failover]:
        """What has followed when shards lost their servers or replicas: the last 100 times.

        Each says which nodes were lost, which one serves the shard now, after how many seconds, and
        which updates were lost, and why; `str` makes a line of it. With an asynchronous client,
        these are those that have been heard of so far.
        """
        self._look_for_incidents()
        return list(self._watch.failovers)

    @property
    def updates_lost(self) -> int:
        """How many acknowledged updates were lost, on all shards together; see `losses`.

        An update of arrays on two shards that both have lost it counts twice.
        """
        return sum(loss.updates for loss in self.losses)

    def scale(self, servers: int) -> Any:
        """Hold the shards on this many nodes from now on; return when they are there.

        Shards are moved one by one, and as few as can be. Training goes on: a shard is held up only
        for the moment in which its next server takes over, and no update is lost or applied twice.

        Parameters
        ----------
        servers
            How many of the nodes for servers that have joined are to hold shards: at least the
            number of replicas of a shard, at most one for each replica of every shard.

        Raises
        ------
        ConfigurationError
            There can never be so many.
        CapacityError
            Fewer nodes for servers have joined. Start more Dask workers, then ask again.
        ShardUnavailable
            Shards could not be moved for so long as a shard may be unavailable. They are moved
            still as soon as what keeps them is over.
        """
        self._require_open()
        return self._client.sync(self._scale, servers)

    def drain(self, node: str) -> Any:
        """Move everything away from a node, and make no more use of it.

        When it returns, the node can be shut down, and nothing is lost by that. If another node for
        servers is idle it takes the place, otherwise there is one server less.

        Parameters
        ----------
        node
            The name of a node that holds shards, or keeps their states or mail.

        Raises
        ------
        ConfigurationError
            There is no such node.
        CapacityError
            The others cannot do without it.
        NotServing
            It keeps what a shard needs that is down at this moment.
        ShardUnavailable
            See `scale`.
        """
        self._require_open()
        return self._client.sync(self._drain, node)

    def add_worker(self, train: Callable[[Worker], T]) -> Any:
        """Have one more worker take part; return its Dask future.

        It begins at the clock of the slowest, with a number of its own, and as the only one that
        was started together: `worker.index` is 0 of 1.

        Raises
        ------
        CapacityError
            Every thread of the nodes for workers is busy with a worker.
        """
        return self.run(train, workers=1)[0]

    def remove_worker(self, name: str) -> Any:
        """Ask a worker to leave: its `worker.leaving` becomes true soon, and its function decides.

        Nothing that it has pushed is lost. Its future tells when it has left.

        Parameters
        ----------
        name
            Such as "worker-0".

        Raises
        ------
        ConfigurationError
            No worker of this name was started.
        """
        self._require_open()
        known = [f"worker-{number}" for number in range(self._started_workers)]
        if not isinstance(name, str) or name not in known:
            there = f"{known[0]} to {known[-1]}" if known else "none"
            raise ConfigurationError(f"there is no worker {shown(name)}; started were: {there}")
        return self._client.sync(self._dismiss, name)

    def checkpoint(self) -> Any:
        """Write a checkpoint now; return when all that was acknowledged before is in it.

        With `Checkpoint(scope="all")` that is one cut of all shards.

        Raises
        ------
        ConfigurationError
            The recovery writes no checkpoints.
        StoreUnavailable
            It cannot be written. The one before is whole.
        ShardUnavailable
            A shard stayed down for too long.
        """
        self._require_open()
        self._require_checkpoints()
        return self._client.sync(self._checkpoint, self.group.timings.unavailable)

    def stop(self) -> Any:
        """End the training: return when no worker pushes any more.

        Every worker's next request raises `TrainingStopped`, also one that it waits for at this
        moment. A training function that lets the error through ends with it, and so does its Dask
        future; one that catches it and returns has a result as always.
        The parameter server stays: it can be read, and `run` starts workers that go on from there.

        Raises
        ------
        DeadlineExceeded
            A worker did not end for as long as a shard may be unavailable.
        """
        self._require_open()
        return self._client.sync(self._stop)

    def close(self, checkpoint: bool = True) -> Any:
        """Take the group down: workers and hosts stop, last events arrive, the coordinator goes.

        A worker that is still running gets `GroupClosed` from its next request.

        Parameters
        ----------
        checkpoint
            Whether the last state is written, if the recovery writes checkpoints. Where that fails,
            it is a warning, and the checkpoint before is whole. Leaving ``with`` by an error does
            not write it.
        """
        if self._client.asynchronous:
            return self._client.sync(self._close, checkpoint)
        if self._open and self._connection.closed_here:
            self._let_go(checkpoint)
        elif self._open:
            self._client.sync(self._close, checkpoint)
        self._news.close()
        return None

    def _read(self, what: Callable[[Client], Awaitable[T]]) -> T:
        self._require_open()

        async def read() -> T:
            reader = Client(self.group, self._transport)
            try:
                return await what(reader)
            finally:
                await reader.close()

        found: T = self._client.sync(read)
        return found

    def _require_open(self) -> None:
        self._news.deliver()
        if not self._open:
            raise GroupClosed("this parameter server is closed")
        if self._connection.closed_here:
            raise GroupClosed("the Dask client of this parameter server is closed")

    @property
    def _worker_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.role == "worker"]

    def _submit(
        self,
        train: Callable[..., T],
        peers: Sequence[str],
        index: int,
        nodes: Sequence[Node],
        share: list[Any] | None,
        only_on: str | None = None,
    ) -> Any:
        with must_be_sent("train", "worker"):
            future = self._client.submit(
                run_worker,
                self.group,
                train,
                peers,
                index,
                "worker",
                {node.address: node.name for node in nodes},
                self._training.stops,
                share,
                key=f"dps-{peers[index]}-{self.group.name}-{platform_of(self._client).token()}",
                workers=[node.address for node in nodes],
                resources={"worker": 1} if nodes[0].resource else None,
                pure=False,
            )
        self._training.submitted(peers[index], future, only_on)
        return future

    async def _let_in(self) -> None:
        """Have workers that wait for a node start on those that have joined since they were run.

        Dask keeps a task to the addresses that there were, and a node that its nanny starts again
        has another one.
        """
        if not self._connection.can_break:
            return  # on virtual time workers end with their node
        places = {
            each.key: [node.address for node in self._worker_nodes if each.may_use(node)]
            for each in self._training.started.values()
        }
        await self._client.run_on_scheduler(widen, places)

    async def _apply(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        if self._caller is None:
            # Whoever called before it was resumed must not be taken for this one.
            generation = self.saved.run.generation + 1 if self.saved is not None else 0
            self._caller = Client(self.group, self._transport, incarnation=generation)
        self._note_updates()
        return await self._caller.apply(function, arguments)

    # -- up and down -----------------------------------------------------------------------------

    async def _start(self) -> None:
        self._port = port_of_driver(self._client)
        self._port.enter()
        port = self._port if self.group.transport != "dask" else None
        wanted = self.group.transport
        self._transport = ClusterTransport(self._client.rpc, Meter(), port=port, wanted=wanted)
        self._router = Router(self.group, self._transport)
        try:
            await self._shard_hosts.assign(self._router)
        except BaseException:
            await self._shard_hosts.stop()
            self._port.exit()
            raise
        self._open = True
        try:
            await self._bring_up()
        except BaseException:
            await self._close(checkpoint=False)
            raise

    async def _bring_up(self) -> None:
        client, name = self._client, self.group.name
        self._inbox.open()
        self._watch.open(self._router)
        self._training.open(self._router, self._transport)
        self._drops.open()
        client.subscribe_topic(node_topic(name), weakly(self._shard_hosts.node_joined))
        self._drainer.open()
        with must_be_sent("what functions= or another argument holds", "parts"):
            await client.register_plugin(CoordinatorPlugin(self.group, client.id))
        start = self._start_with
        await start.leave_description(platform_of(client).clock.now())
        seeder = Bootstrap(self._router, start.initial, start.states, start.tables)
        self._seeding.append(asyncio.create_task(seeder.run()))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._shard_hosts.make_hosts(self.nodes)
                table = await self._router.newer(-1)
                while not table.complete:
                    if isinstance(seeder.error, StoreUnavailable | RemoteError | InternalError):
                        raise seeder.error
                    table = await self._router.newer(table.version)
        except TimeoutError:
            raise CapacityError(
                f"after {START_SECONDS:g} s the shards are not served by {self.group.replicas} "
                "replicas each; look at what keeps the Dask workers busy, and at their logs"
            ) from None

    async def _checkpoint(self, limit: float) -> None:
        await save_all(self._router, limit)
        if not self._training.holding():
            self._news.unsaved = ""

    async def _stop(self) -> None:
        self._training.stops += 1
        timings = self.group.timings
        request = StopTraining(self._training.stops, timings.hold)
        until = asyncio.get_running_loop().time() + timings.unavailable
        while left := (await self._router.ask(request)).left:
            if asyncio.get_running_loop().time() >= until:
                raise DeadlineExceeded(f"{', '.join(left)}: still at work after stop()")

    def _note_updates(self) -> None:
        """From now on there are updates that may be in no checkpoint."""
        durability = self.group.recovery.durability
        if durability.writes_checkpoints:
            self._news.unsaved = (
                f"parameter server {self.name} was not closed: updates since its last checkpoint "
                f"({brief(durability)}) are in none. Leave its `with`, or call ps.close()"
            )

    async def _save_the_last(self) -> None:
        """Write the last state, if that is how it survives."""
        if not self.group.recovery.durability.writes_checkpoints:
            return
        try:
            await self._checkpoint(self.group.timings.call)
        except DpsError as error:
            text = (
                f"the last state of parameter server {self.name} is not in its checkpoints, for it "
                f"could not be written at the end: {error}. The one before is whole, and "
                "ParameterServer.resume goes on from it. To be sure of the last state, call "
                "ps.checkpoint() before the end, which waits for longer, and raises"
            )
            self._news.warn(text, LastStateNotSavedWarning)

    def _require_checkpoints(self) -> None:
        durability = self.group.recovery.durability
        if not durability.writes_checkpoints:
            raise ConfigurationError(
                f"{type(durability).__name__} writes no checkpoints: give "
                "recovery=Recovery(Checkpoint(path=...))"
            )

    async def _close(self, checkpoint: bool = True) -> None:
        if not self._open:
            return
        self._open = False
        self._watch.closing = True
        self._shares.clear()
        self._news.unsaved = ""
        if not self._connection.can_break:
            await self._close_in_order(checkpoint)
        elif self._connection.broken or not await self._closed_in_time(checkpoint):
            await self._abandon(checkpoint)
        if self._is_asynchronous:
            self._news.close()

    def _let_go(self, checkpoint: bool) -> None:
        """Close without the client, which was closed before, and its event loop with it."""
        self._open = False
        self._shares.clear()
        self._news.unsaved = ""
        for end in self._endings():
            end()
        if checkpoint:
            self._warn_of_last_state("the Dask client was closed before it")

    async def _closed_in_time(self, checkpoint: bool) -> bool:
        """Take the group down; return whether the scheduler was there until that was done."""
        closing = asyncio.create_task(self._close_in_order(checkpoint))
        broken = asyncio.create_task(self._connection.until_broken())
        try:
            await asyncio.wait((closing, broken), return_when=asyncio.FIRST_COMPLETED)
            in_time = closing.done() and not broken.done()
            if in_time:
                closing.result()
        finally:
            for task in (closing, broken):
                task.cancel()
            await asyncio.gather(closing, broken, return_exceptions=True)
        return in_time

    async def _abandon(self, checkpoint: bool) -> None:
        """Let go of what is in this process, without the scheduler, and so without the group."""
        self._lost = self._connection.lost
        self._watch.abandon()
        for task in self._seeding:
            task.cancel()
        ending = self._drainer.close(), self._shard_hosts.stop(), self._router.close()
        await asyncio.gather(*ending, *self._seeding, return_exceptions=True)
        self._port.exit()
        await self._end_runs()
        if checkpoint:
            self._warn_of_last_state("the connection to Dask's scheduler is gone")

    def _warn_of_last_state(self, why: str) -> None:
        if self.group.recovery.durability.writes_checkpoints:
            text = (
                f"{why}, and the last state of parameter server {self.name} is not in its "
                "checkpoints; ParameterServer.resume goes on from those"
            )
            self._news.warn(text, LastStateNotSavedWarning)

    async def _close_in_order(self, checkpoint: bool) -> None:
        await asyncio.gather(self._drainer.close(), return_exceptions=True)
        await self._end_workers()
        if self._caller is not None:
            await self._caller.close()
        try:
            if checkpoint:
                await self._save_the_last()
            await self._watch.close()
            if not self.group.recorded:  # who records counts messages; this is for the eye
                await self._training.look()
        finally:
            try:
                await self._take_no_more_in()
                await self._shard_hosts.finish_evaluators()
            finally:
                await self._take_down()

    async def _take_no_more_in(self) -> None:
        # Not before the last checkpoint: a server that was lost just now needs a node in its place.
        self._client.unsubscribe_topic(node_topic(self.group.name))
        for task in self._seeding:
            task.cancel()
        await asyncio.gather(*self._seeding, self._shard_hosts.stop(), return_exceptions=True)

    async def _scale(self, servers: int) -> None:
        group = self._shard_hosts.group
        servers = as_servers(servers, len(group.layout.shards), group.recovery)
        # Nodes that join a cluster without roles become servers as far as there are too few.
        self._shard_hosts.group = replace(group, servers=servers)
        await self._router.ask(Scale(servers))
        await self._until(
            lambda table: table.complete and not table.leaving, f"servers={servers}: shards"
        )

    async def _dismiss(self, name: str) -> None:
        await self._router.ask(Dismiss(name))

    async def _drain(self, node: str) -> None:
        hosts = self._shard_hosts.hosts
        found = [hosted for hosted in hosts if isinstance(node, str) and hosted.node.name == node]
        if not found:
            names = sorted(hosted.node.name for hosted in hosts)
            raise ConfigurationError(
                f"there is no node {shown(node)} that holds shards or states; there are: "
                f"{', '.join(names)}"
            )
        hosted = found[-1]
        host = hosted.endpoint
        await self._router.ask(Drain(host))
        await self._until(lambda table: host not in table.leaving, f"{node}: what it holds")
        await self._shard_hosts.release(hosted)

    async def _until(self, holds: Callable[[Table], bool], what: str) -> None:
        limit = self.group.timings.unavailable
        try:
            async with asyncio.timeout(limit):
                table = await self._router.fetch()
                while not holds(table):
                    table = await self._router.newer(table.version)
        except TimeoutError:
            raise ShardUnavailable(
                f"{what} could not be moved within {limit:g} s; they will be when what is in the "
                "way is over: a node that does not answer, or too few nodes"
            ) from None

    async def _take_down(self) -> None:
        """Leave the cluster as it was before the group, whose workers have ended."""
        await self._shard_hosts.finish_hosts()
        self._port.exit()
        await self._router.close()
        await self._client.run_on_scheduler(take_out, COORDINATOR_PREFIX + self.group.name)
        # Now that all who send them requests have ended: other hosts and the coordinator.
        self._shard_hosts.release_hosts()
        await self._inbox.close(self._shard_hosts.seated)
        self._drops.close()  # all that nodes have said has come
        await self._end_runs()
        await self._client.run_on_scheduler(forget, self.group.name)

    async def _end_workers(self) -> None:
        """Have the workers fail that are still running, and forget what does not end soon."""
        left = [each for each in self._training.futures if not each.done()]
        if not left:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.group.timings.call):
                await self._router.ask(CloseGroup())
                await asyncio.gather(*left, return_exceptions=True)
        await self._client.cancel([future for future in left if not future.done()])
