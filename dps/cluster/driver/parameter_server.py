"""The facade of dps: `ParameterServer`, as a user of a Dask cluster sees it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from dps.cluster.driver.group_driver import GroupDriver
from dps.cluster.driver.news import IncidentWatch
from dps.cluster.driver.setup import Choices, Options, Start, afresh, check_client, from_path
from dps.cluster.heads import ask_heads
from dps.cluster.names import Node
from dps.cluster.node.actor import Score
from dps.cluster.node.logs import keep_quiet
from dps.cluster.platform import platform_of
from dps.core.arguments import check_function, explained
from dps.core.consistency import ASP, Consistency
from dps.core.filters.filter import Filter
from dps.core.functions import Function
from dps.core.leases import LEASE
from dps.core.placement import BALANCED, ConsistentHash
from dps.core.ranges import argument_above_zero
from dps.core.rules.rule import SGD, UpdateRule
from dps.core.tables.table import KEYS, SparseSpec
from dps.errors import ConfigurationError, GroupClosed
from dps.events import Failover, Sink
from dps.observe.tracking import MlflowRun
from dps.observe.views import Listing, ShardView, WorkerView, display, overview_html, overview_line
from dps.protocol.client.client import Client
from dps.protocol.messages import Description, Dismiss, Loss, Table
from dps.protocol.timings import Timings
from dps.protocol.transport import TransportChoice
from dps.recovery import model_files
from dps.recovery.strategy import Recovery

if TYPE_CHECKING:
    import distributed
    import pandas

    from dps.cluster.backends.assignment import NodeAssignment

T = TypeVar("T")

LOOK_SECONDS = 0.5  # between updates of the displayed progress


@explained
class ParameterServer:
    """Named arrays and sparse tables, sharded over Dask nodes and updated by asynchronous workers.

    Parameters
    ----------
    client
        A Dask client. Nodes with the Dask resource "server" hold shards, those with "worker" run
        training functions. If no node has such a resource, dps assigns the roles.
    params
        Name → array (float32 or float64): the initial values. May be empty if there are tables.
    tables
        Sparse tables, whose rows are created by the first push to them (see `SparseSpec`).
    shards
        Number of parts that the parameters are divided into.
    servers
        Number of nodes that hold shards at first; None: one for each replica, if there are enough.
    optimizer
        The server-side update rule: `SGD`, `Momentum`, `AdaGrad`, `Adam`, `AdamW`, `FTRL`,
        `Proximal` or `DelayedProximal` with a penalty, any of them within `Scheduled`,
        `WeightDecay`, `Clipped`, `Accumulated`, `StalenessAware` or `DelayCompensated`, or your own
        (registered with `dps.protocol.wire.message` if there are checkpoints). Or a rule for each
        array and table, by names (see `PerArray`), such as ``{"*.bias": SGD(0.1), "*": AdamW()}``.
    consistency
        `BSP()`, `SSP(tau)` or `ASP()`.
    recovery
        "none", "checkpoint", "chain", "stateless", or a `Recovery`. A `Checkpoint` needs a path
        that all nodes can reach.
    on_event
        Called with every event of the group, in the client's event loop: it must not block. None:
        events are not recorded.
    timings
        Durations of the protocol, such as deadlines and leases.
    about
        A JSON mapping that is kept beside checkpoints, for the program that resumes from them.
    filters, pull_filters
        The name of an array, or "*" for all others → a list of filters. `filters` apply to
        gradients (``[TopK(0.05), Quantise("bf16"), Lossless()]``), `pull_filters` to changes in the
        weights since a worker's last pull (``[SignificantlyModified(1e-4)]``). `pull` here and
        evaluators get unfiltered weights.
    functions
        Name → function that may be run on the shards, by `apply` here and in workers.
    seats
        `ExistingCluster.seats`, which define the nodes; None: see `client`.
    labels
        Name → text that is added to every metric and log line, such as ``{"model": "ranking"}``.
    on_loss
        The reaction to a loss of acknowledged updates: "warn" (a Python warning here, and a line in
        the logs of Dask's scheduler and of the workers' nodes), "raise" (also, every worker's next
        request raises `UpdatesLost`), or "ignore" (neither, and no `UpdatesDroppedWarning`).
    transport
        Between processes of the group: "auto" (shared memory between those of one user on one host,
        otherwise a stream), "shared_memory", "stream", or "dask". Dask's own connections are used
        where the chosen one does not work, and for the coordinator.
    placement
        Which of the `servers` holds which shard: "balanced" (the one with the fewest),
        "consistent_hash", or ``ConsistentHash(virtual_nodes=...)``.

    Attributes
    ----------
    group
        The description of the group, with all choices.
    saved
        The checkpoints that it was resumed from; None: it was not resumed.

    Raises
    ------
    CapacityError
        The cluster has too few nodes.
    ConfigurationError
        The parameters or choices cannot work.

    Notes
    -----
    With an asynchronous client, use ``async with``, and await what methods return (except `run`, as
    for `Client.submit`). Methods may be called from any thread. Those that ask shards raise
    `ShardUnavailable` if a shard stays down for longer than `Timings.unavailable`.

    Examples
    --------
    A virtual cluster takes the place of a Dask client, for tests:

    >>> import numpy as np
    >>> from dps import SGD, ParameterServer
    >>> from dps.testing import VirtualCluster
    >>> def train(worker):
    ...     for _ in range(10):
    ...         weights = worker.pull()
    ...         worker.push({"w": 2 * weights["w"]})
    >>> cluster = VirtualCluster(servers=2, workers=2)
    >>> params = {"w": np.ones(4, np.float32)}
    >>> with cluster, ParameterServer(cluster, params, optimizer=SGD(0.1), shards=2) as ps:
    ...     _ = cluster.gather(ps.run(train, workers=2))
    ...     [shard.version for shard in ps.shards]
    [20, 20]
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
        choices = Choices(
            shards=shards,
            servers=servers,
            tables=tables,
            optimizer=optimizer,
            consistency=consistency,
            recovery=recovery,
            filters=filters or {},
            pull_filters=pull_filters or {},
            placement=placement,
            about=about or {},
        )
        options = Options(
            timings=timings,
            on_event=on_event,
            functions=functions,
            seats=seats,
            labels=labels,
            on_loss=on_loss,
            transport=transport,
        )
        self._set_up(client, afresh(client, params, choices, options))

    @classmethod
    def resume(
        cls,
        client: distributed.Client,
        path: str | PathLike[str],
        *,
        shards: int | None = None,
        servers: int | None = None,
        **options: Any,
    ) -> ParameterServer:
        """Restore a parameter server from its checkpoints.

        Parameters
        ----------
        path
            The path of `Checkpoint`, or the folder of one parameter server in it.
        shards, servers
            The new number of shards and of nodes that hold them; None: as before. If the number of
            shards changes, each new one has the version of the old one with the fewest updates.
        options
            `on_event`, `timings`, `functions`, `seats`, `labels`, `on_loss` and `transport`, as for
            `ParameterServer`: checkpoints do not contain them.

        Raises
        ------
        StoreUnavailable
            There is no complete checkpoint of every shard.
        ConfigurationError
            The parameters cannot be divided into `shards` parts, or these over `servers` nodes.
        """
        check_client(client)
        server = cls.__new__(cls)
        server._set_up(client, from_path(client, path, shards, servers, Options(**options)))
        return server

    def _set_up(self, client: distributed.Client, start: Start) -> None:
        self.group = start.group
        self.saved = start.saved
        self._client = client
        self._driver = GroupDriver(client, start)
        weakref.finalize(self, self._driver.news.close)  # also when the program ends
        keep_quiet()
        if not client.asynchronous:
            client.sync(self._driver.start)

    def __enter__(self) -> ParameterServer:
        if self._client.asynchronous:
            raise ConfigurationError("the client is asynchronous: use `async with ParameterServer`")
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close(checkpoint=kind is None)

    async def __aenter__(self) -> ParameterServer:
        if not self._client.asynchronous:
            raise ConfigurationError("the client is synchronous: use `with ParameterServer`")
        await self._driver.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        await self._close(checkpoint=kind is None)

    # -- workers ---------------------------------------------------------------------------------

    def run(
        self,
        train: Callable[..., Any],
        workers: int | Literal["all"] = 1,
        data: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        shuffle: int | None = None,
        lease: int = LEASE,
    ) -> list[Any]:
        """Run a training function on nodes; return a Dask future for each worker.

        Parameters
        ----------
        train
            Called with a `Worker` in a Dask task for each worker; a plain function or a
            `functools.partial`, as for `Client.submit`. With `data` it is called with the worker
            and the list of its partitions. Its return value is the future's result.
        workers
            Number of workers. Each occupies a thread of a node until its function returns. With
            `batch_size` also "all": workers on all threads, also of nodes that join later, until
            every shard has applied every batch. Then `run` returns the workers that have finished.
        data
            A Dask array (in chunks of whole rows), DataFrame or bag, a list of futures such as
            `Client.scatter` returns, or a tuple of these. Workers get equal numbers of partitions,
            give or take one. Each share is computed on its worker's node, in order, and stays in
            memory until the group is closed, for restarts. With `batch_size`, see below.
        batch_size
            Workers lease batches of this many examples of `data`: an array (its rows), a sequence
            such as a list of files, a number (of indices), or a tuple or dict of these, which are
            sent to all nodes for workers; or a collection as above, whose partitions are computed
            once, and fetched by the workers. A batch of it has examples of one partition. `train`
            is called with the worker and `Batches`, and pushes exactly once for each. Every shard
            applies each batch once in each epoch, however many workers are lost, join or leave
            (`add_worker`). A shard that is restored to an earlier state applies the missing batches
            again. If a run over the same number of examples, with the same settings, was
            interrupted by `stop` or before a `resume`, this run continues with the remaining
            batches.
        epochs
            How often each example is used.
        shuffle
            The seed of the order of examples in each epoch; None: they stay in order.
        lease
            Batches that a worker takes at a time.

        Raises
        ------
        CapacityError
            Too few threads of the nodes for workers are free.
        ConfigurationError
            `train` is not such a function, or cannot be sent to a node; or `data` cannot be shared;
            or workers="all" without `batch_size`, or with an asynchronous client.
        """
        self._require_open()
        division, training, router = None, self._driver.training, self._driver.router
        if batch_size is not None:
            division = training.divide(train, workers, data, batch_size, lease, epochs, shuffle)
        elif (epochs, shuffle, lease) != (1, None, LEASE):
            raise ConfigurationError(
                "epochs, shuffle and lease are for leased data; give batch_size"
            )
        if workers != "all":
            futures = training.run(train, workers, data, division)
            self._driver.note_updates()
            return futures
        if division is None or self._client.asynchronous:
            raise ConfigurationError(
                'workers="all" needs data, batch_size and a synchronous client'
            )
        self._driver.note_updates()
        return training.run_on_all(train, data, division, partial(self._do, router.ask))

    def run_again(self, train: Callable[..., Any], worker: str, node: str) -> Any:
        """Restart a worker that was lost with its node; return its Dask future.

        The `worker`, such as "worker-0", joins as a new incarnation, with the same share of `data`,
        on the free node of this name. Raises `ConfigurationError` without such a worker or node.
        """
        self._require_open()
        return self._driver.training.run_again(train, worker, node)

    def add_worker(self, train: Callable[..., Any]) -> Any:
        """Start one more worker; return its Dask future.

        It begins at the clock of the slowest worker. `worker.index` is 0 of 1. If the last `run`
        leases its data, the worker leases batches too, and `train` is called with `Batches`.
        Errors as for `run`.
        """
        self._require_open()
        future = self._driver.training.add(train)
        self._driver.note_updates()
        return future

    def remove_worker(self, name: str) -> Any:
        """Ask a worker to leave: its `worker.leaving` becomes true, and its function decides.

        Raises `ConfigurationError` if no worker of this name, such as "worker-0", was started.
        """
        self._require_open()
        self._driver.training.of_name(name)
        return self._do(self._driver.router.ask, Dismiss(name))

    def stop(self) -> Any:
        """End the training: return when no worker pushes any more.

        Every worker's next request raises `TrainingStopped`, and so does one that is under way. The
        parameter server stays up: it can be read, and `run` starts workers that continue from its
        state. Raises `DeadlineExceeded` if a worker did not end within `Timings.unavailable`.
        """
        return self._do(self._driver.stop)

    def evaluate(self, score: Score, every: float = 1.0) -> Any:
        """Score snapshots of the weights on a node until the group is closed.

        The node has the Dask resource "evaluator"; without one, it is a node for workers. The first
        snapshot has no update that is pushed after this returns, unless a shard is down.

        Parameters
        ----------
        score
            Called with the weights. Returns the loss, or loss and accuracy (and perhaps objective
            and stationarity), or a mapping of names to numbers. If it fails or its result is
            invalid, `on_event` gets an `EvaluationMissed`; without `on_event`, dps warns once.
        every
            Seconds from one evaluation to the next.

        Raises
        ------
        ConfigurationError
            `score` is not a function of the weights, or `every` not a number above 0.
        CapacityError
            There is no such node.
        """
        self._require_open()
        check_function("score", score, ["weights"])
        every = argument_above_zero("every", every)
        hosts = self._driver.hosts
        return self._do(hosts.evaluators.begin, score, every, hosts.nodes)

    # -- parameters ------------------------------------------------------------------------------

    def pull(self) -> dict[str, np.ndarray]:
        """Return the current weights as fresh arrays, without waiting for any worker."""

        async def read(reader: Client) -> dict[str, np.ndarray]:
            await reader.pull()
            return {name: array.copy() for name, array in reader.weights().items()}

        return self._read(read)

    def pull_rows(self, table: str, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return rows of a sparse table by their keys, without waiting for any worker.

        The keys are whole numbers from 0 to 2⁶³ - 1, repeated or not. The rows have shape (keys,
        width); a row without updates has its initial value. Raises `ShapeMismatch` if the table is
        unknown, or a key is not such a number.
        """
        return self._read(lambda reader: reader.pull_rows(table, keys))

    def pull_range(
        self, table: str, start: int = 0, stop: int = KEYS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the existing rows of a sparse table with keys from `start` to below `stop`.

        Returns the keys (int64, sorted), and the rows of shape (keys, width). Errors as for
        `pull_rows`.
        """
        return self._read(lambda reader: reader.pull_range(table, start, stop))

    def apply(self, function: str, *args: Any) -> list[Any]:
        """Run a registered function on every shard, exactly once on each, even if nodes fail.

        Parameters
        ----------
        function
            Its name. It is called with the shard's part of each array (name → `Part`) and `args`,
            and returns a result, or `Changed` values and a result.
        args
            None, numbers, strings, arrays of numbers, and lists, tuples or string-keyed dicts of
            these.

        Returns
        -------
        results
            The result of each shard: of the same kinds as `args`, 1 MiB at most.

        Raises
        ------
        ConfigurationError
            There is no such function, or an argument is none of these. No shard was asked.
        FunctionFailed
            It failed on the shards that the message lists, where nothing changed.
        """
        return self._do(self._driver.apply, function, args)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the weights into a folder, from which `dps.load` reads them without a cluster.

        The folder has a safetensors file for each shard, and a manifest. An earlier model there is
        replaced in one step. Rows of sparse tables are included, the optimizer's state is not.
        Shards are read at different moments; for a consistent model, save when no worker runs.

        `path` is a folder that the driver can write, or an address that fsspec knows. Raises
        `StoreUnavailable` if it cannot be written, and `ConfigurationError` if the folder holds
        another kind of manifest, or fsspec does not know the path.
        """
        layout = self.group.layout

        async def write(reader: Client) -> None:
            await reader.pull()
            rows = {
                spec.name: await reader.pull_range(spec.name, 0, KEYS) for spec in layout.tables
            }
            state = reader.weights(), rows, reader.versions()
            await asyncio.to_thread(model_files.save, path, layout, *state)

        return self._read(write)

    def checkpoint(self) -> Any:
        """Write a checkpoint now; return when all updates acknowledged before are in it.

        Raises `ConfigurationError` if the recovery writes no checkpoints, and `StoreUnavailable` if
        it cannot be written; the previous one stays complete.
        """
        self._require_open()
        durability = self.group.recovery.durability
        if not durability.writes_checkpoints:
            raise ConfigurationError(
                f"{type(durability).__name__} writes no checkpoints: give "
                "recovery=Recovery(Checkpoint(path=...))"
            )
        return self._do(self._driver.checkpoint, self.group.timings.unavailable)

    # -- nodes -----------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the cluster, each with its role."""
        return self._driver.hosts.nodes

    @property
    def leaving(self) -> frozenset[str]:
        """The names of the nodes that are leaving, or have left, because they are shut down."""
        return frozenset(self._driver.hosts.leaving)

    def scale(self, servers: int) -> Any:
        """Hold the shards on this many nodes from now on; return when they are there.

        Training continues: a shard pauses only while its next server takes over.

        Raises
        ------
        ConfigurationError
            `servers` is less than the replicas of one shard, or more than those of all shards; or
            the recovery does not allow moves.
        CapacityError
            There are fewer nodes for servers.
        ShardUnavailable
            Shards could not be moved within `Timings.unavailable`; they move later.
        """
        return self._do(self._driver.hosts.scale, servers)

    def drain(self, node: str) -> Any:
        """Move all shards, stored states and buffered gradients off a node, and stop using it.

        When this returns, the node can be shut down without any loss. An idle node for servers
        takes its place; otherwise there is one server less.

        Raises
        ------
        ConfigurationError
            There is no such node of this name, or the recovery does not allow moves.
        CapacityError
            The other nodes cannot take over.
        NotServing
            It stores states or gradients, and a shard is down at this moment.
        ShardUnavailable
            See `scale`.
        """
        return self._do(self._driver.hosts.drain, node)

    # -- status ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the group, as in its logs, metrics and checkpoint paths."""
        return self.group.name

    @property
    def shards(self) -> Listing[ShardView]:
        """The status of each shard: its nodes, version, epoch and size.

        With an asynchronous client, and after `close`, this is the last known status.
        """
        self._ask(self._driver.training.look)
        return self._driver.training.shards()

    @property
    def workers(self) -> Listing[WorkerView]:
        """The status of each worker that was started: its clock, rate and last loss."""
        self._ask(self._driver.training.look)
        return self._driver.training.workers()

    @property
    def losses(self) -> list[Loss]:
        """The acknowledged updates that were lost, with an entry for each recovery that lost some.

        With an asynchronous client, these are the losses that are known so far.
        """
        return list(self._incidents.losses)

    @property
    def failovers(self) -> list[Failover]:
        """The last 100 recoveries of shards that had lost a server or replica.

        `str` describes one in a line. With an asynchronous client, these are those known so far.
        """
        return list(self._incidents.failovers)

    @property
    def updates_lost(self) -> int:
        """The number of lost acknowledged updates; one that two shards lost counts twice."""
        return self._incidents.updates_lost

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is not up yet."""
        return not self._driver.is_open

    @property
    def scheduler_lost(self) -> bool:
        """Whether the connection to Dask's scheduler broke while this was open.

        The group is lost then, even if Dask connects again; `resume` continues from checkpoints.
        """
        driver = self._driver
        return driver.lost or (driver.is_open and driver.connection.lost)

    def audit(self) -> list[Description | None]:
        """Return each shard's version, clocks and counts, None for one that does not answer."""
        return self._do(ask_heads, self._driver.router)

    def table(self) -> Table:
        """Return the current routing table: which node serves which shard."""
        return self._do(self._driver.router.fetch)

    def history(self) -> pandas.DataFrame:
        """Return what workers reported and evaluators scored, in the order of time.

        The driver keeps about 200,000 numbers; beyond that, every other number of the longest
        series is dropped. Numbers of a running worker arrive within `Timings.flush`. With a
        synchronous client, all earlier reports are included.

        Returns
        -------
        history
            A row for each number, with the columns `time` (UTC), `source` (a worker's name, or
            "evaluator"), `incarnation` (of the worker; 0 of evaluators), `metric`, `step` (the mean
            version of the shards in the evaluated weights, or those of the worker; -1 before its
            first pull), `value`, `report` (number of the worker's report in its incarnation, from
            1; 0 of evaluators) and `learning_rate` of an update of these weights, without the
            effect of staleness; NaN if arrays have different ones, and before the first pull.

        Raises
        ------
        ImportError
            The package pandas is not installed.
        """
        self._ask(self._driver.catch_up)
        self._driver.news.deliver()
        return self._driver.history.frame()

    def progress(self, total: int | None = None) -> None:
        """Show the progress of the training until the workers that run now have ended.

        Interrupting this ends the display, not the training. If no worker runs, it shows the end of
        the last `run`. With `total`, the number of gradients that these workers push in all, there
        is a bar and the time left. Raises `ConfigurationError` if that is not above 0, or if the
        client is asynchronous.
        """
        self._require_open()
        if self._client.asynchronous:
            raise ConfigurationError(
                "progress() needs a synchronous client; read ps.workers instead"
            )
        if total is not None:
            argument_above_zero("total", total)
        platform, training = platform_of(self._client), self._driver.training
        names = training.latest()
        since = None  # the duration of the last run is not known
        if training.pending(names):
            since = min(training.started[name].at for name in names)
        with display() as show:
            while True:
                futures = training.pending(names)
                if not futures:
                    self._ask(self._driver.catch_up)
                self._ask(training.look)
                self._driver.news.deliver()
                show(training.progress(names, total, since))
                if not futures:
                    return
                platform.wait(self._client, futures, LOOK_SECONDS, every=True)

    def log_to_mlflow(
        self,
        experiment: str,
        run_name: str | None = None,
        tracking_uri: str | PathLike[str] | None = None,
    ) -> str:
        """Log the training to MLflow from now until `close`; return the run's id.

        The run has the choices as parameters, such as "recovery.durability.kind"; the whole
        `history` as metrics, such as "worker-0/loss" or "evaluator/accuracy"; and a tag for each
        failover. A value that the tracking server refuses is skipped, with a warning. After
        `resume`, this continues the run of the earlier parameter server, if it has this experiment
        and name.

        Parameters
        ----------
        experiment
            The name of an experiment, which is created if there is none.
        run_name
            None: "dps-" and the name of the parameter server, or the name of the continued run.
        tracking_uri
            None: the address from `mlflow.set_tracking_uri` or MLflow's environment.

        Raises
        ------
        ConfigurationError
            An argument is not a string.
        StoreUnavailable
            The tracking server does not create the run, or does not answer within 30 s.
        """
        self._require_open()
        driver = self._driver
        run = MlflowRun(
            driver.history,
            experiment,
            run_name,
            tracking_uri,
            params=driver.training.choices,
            tags={f"dps.{name}": value for name, value in self.group.labels.items()},
            group=self.name,
            before=self.saved.run.name if self.saved is not None else None,
            warn=partial(driver.news.warn, category=RuntimeWarning),
        )
        driver.runs.append(run)
        driver.incidents.listen(run.failover)
        return run.id

    def __repr__(self) -> str:
        training = self._driver.training
        return overview_line(training.overview(self.closed), training.facts)

    def _repr_html_(self) -> str:
        training = self._driver.training
        self._ask(training.look)
        return overview_html(training.overview(self.closed), training.facts)

    # -- down ------------------------------------------------------------------------------------

    def close(self, checkpoint: bool = True) -> Any:
        """Take the group down: workers and hosts stop, last events arrive, the coordinator ends.

        The Dask cluster is left as it was. A worker that is still running gets `GroupClosed` from
        its next request. If the recovery writes checkpoints, the last state is written, unless
        `checkpoint` is false, or ``with`` is left by an error; a warning reports if that fails.
        """
        if self._client.asynchronous:
            return self._client.sync(self._close, checkpoint)
        if self.closed or self._driver.connection.closed_here:
            self._driver.let_go(checkpoint)
        else:
            self._client.sync(self._driver.close, checkpoint)
        self._driver.news.close()  # its warnings appear in the thread of the user
        return None

    async def _close(self, checkpoint: bool) -> None:
        await self._driver.close(checkpoint)
        self._driver.news.close()

    # -- asking the group ------------------------------------------------------------------------

    def _require_open(self) -> None:
        self._driver.news.deliver()
        if self.closed:
            raise GroupClosed("this parameter server is closed")
        if self._driver.connection.closed_here:
            raise GroupClosed("the Dask client of this parameter server is closed")

    def _do(self, request: Callable[..., Awaitable[T]], *args: Any) -> T:
        self._require_open()
        result: T = self._client.sync(request, *args)
        return result

    def _read(self, request: Callable[[Client], Awaitable[T]]) -> T:
        result: T = self._do(self._driver.read, request)
        return result

    def _ask(self, request: Callable[[], Awaitable[object]]) -> None:
        away = self.closed or self._client.asynchronous or self._driver.connection.closed_here
        if not away:
            self._client.sync(request)

    @property
    def _incidents(self) -> IncidentWatch:
        self._ask(self._driver.incidents.look)
        self._driver.news.deliver()
        return self._driver.incidents
