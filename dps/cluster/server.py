"""Owns the facade: `ParameterServer`, which brings a group up on a Dask cluster and takes it down.

The driver keeps two things that nobody else can: it makes the host actor on every node that joins,
and it holds the initial values, which it installs wherever the coordinator asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dps.cluster.audit import Readable
from dps.cluster.choices import check_functions, checked_labels
from dps.cluster.elastic import Elastic
from dps.cluster.evaluator import Score
from dps.cluster.hosting import Hosting
from dps.cluster.inbox import Inbox
from dps.cluster.plugin import CoordinatorPlugin, forget, node_topic, take_out
from dps.cluster.relief import Relief
from dps.cluster.roles import Node
from dps.cluster.starting import Start, afresh, from_path
from dps.cluster.transport import COORDINATOR_PREFIX, DaskTransport, Meter
from dps.cluster.weak import weakly
from dps.cluster.worker import Worker, run_worker
from dps.core.consistency import ASP, Consistency
from dps.core.filters import Filter
from dps.core.functions import Function
from dps.core.recovery import Recovery
from dps.core.rules import SGD, UpdateRule
from dps.core.sparse import SparseSpec
from dps.errors import CapacityError, ConfigurationError, StoreUnavailable
from dps.events import Sink
from dps.protocol.client import Client as Caller
from dps.protocol.group import Timings
from dps.protocol.messages import CloseGroup
from dps.protocol.router import Router
from dps.protocol.seeder import Seeder

if TYPE_CHECKING:
    import distributed

    from dps.cluster.seats import Seats

T = TypeVar("T")

START_SECONDS = 60.0


class ParameterServer(Readable, Elastic):
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
        The server-side update rule: `SGD`, `Momentum`, `AdaGrad`, `Adam`, `FTRL`, `Proximal` or
        `DelayedProximal` with a penalty, any of them within `StalenessAware` or
        `DelayCompensated`, or one of your own (for checkpoints it must be registered with
        `dps.protocol.wire.message`).
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
    functions
        Name → function that may be run on the shards, by `apply` here and in workers.
    seats
        Which Dask worker is which node, on a cluster of `dps.cluster.existing`; None: as Dask's
        resources say, or as dps shares the nodes out.
    labels
        Name → text that goes with every metric of the group, and with every line that it logs,
        such as ``{"model": "ranking"}``.

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
    `close` (or leaving ``with``) takes the group down and leaves the cluster as it was. Methods may
    be called from any thread.
    """

    def __init__(
        self,
        client: distributed.Client,
        params: Mapping[str, np.ndarray],
        *,
        tables: Sequence[SparseSpec] = (),
        shards: int = 1,
        servers: int | None = None,
        optimizer: UpdateRule = SGD(0.01),  # noqa: B008 - a frozen value
        consistency: Consistency = ASP(),  # noqa: B008 - a frozen value
        recovery: str | Recovery = "none",
        on_event: Sink | None = None,
        timings: Timings = Timings(),  # noqa: B008 - a frozen value
        about: Mapping[str, Any] | None = None,
        filters: Mapping[str, Sequence[Filter]] | None = None,
        functions: Mapping[str, Function] | None = None,
        seats: Seats | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        choices = optimizer, consistency, recovery, timings
        kept = about or {}
        start = afresh(client, params, shards, *choices, kept, tables, filters, servers)
        self._set_up(client, start, on_event, functions or {}, seats, labels or {})

    @classmethod
    def resume(
        cls,
        client: distributed.Client,
        path: str,
        *,
        on_event: Sink | None = None,
        timings: Timings = Timings(),  # noqa: B008 - a frozen value
        functions: Mapping[str, Function] | None = None,
        seats: Seats | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> ParameterServer:
        """Bring a parameter server up again from its checkpoints alone.

        Parameters
        ----------
        path
            What `Checkpoint` was given, or the folder of one parameter server in it.
        on_event, timings, functions, seats, labels
            As for a new one: they are not in the checkpoints.

        Raises
        ------
        StoreUnavailable
            There is no whole checkpoint of every shard.
        """
        server = cls.__new__(cls)
        start = from_path(client, path, timings)
        server._set_up(client, start, on_event, functions or {}, seats, labels or {})
        return server

    def _set_up(
        self,
        client: distributed.Client,
        start: Start,
        on_event: Sink | None,
        functions: Mapping[str, Function],
        seats: Seats | None,
        labels: Mapping[str, str],
    ) -> None:
        check_functions(functions, start.group.recovery)
        group = replace(
            start.group,
            recorded=on_event is not None,
            functions=dict(functions),
            labels=checked_labels(labels),
        )
        start = replace(start, group=group)
        self.group = group
        self.saved = start.saved
        self._client = client
        self._start_with = start
        self._inbox = Inbox(client, start.group.name, on_event)
        self._hosting = Hosting(client, group, seats)
        self._relief = Relief(client, self._hosting, self._drain, on_event)
        self._caller: Caller | None = None
        self._started_workers = 0
        self._futures: set[Any] = set()
        self._open = False
        if not client.asynchronous:
            client.sync(self._start)

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the cluster, each with its role."""
        return self._hosting.nodes

    @property
    def leaving(self) -> frozenset[str]:
        """The names of the nodes that were told to leave, or have left after that."""
        return frozenset(self._relief.names)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> ParameterServer:
        await self._start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    # -- what a user does ------------------------------------------------------------------------

    def run(self, train: Callable[[Worker], T], workers: int = 1) -> list[Any]:
        """Run a training function on `workers` nodes.

        Parameters
        ----------
        train
            Called with a `Worker` in a Dask task on each node; a plain function or a
            `functools.partial`, as for `Client.submit`.
        workers
            How many to start. Each occupies a thread of a node until its function returns.

        Returns
        -------
        futures
            One Dask future for each worker, with what its function returned.

        Raises
        ------
        CapacityError
            The worker nodes have too few threads.
        """
        if not callable(train):
            raise ConfigurationError(f"train={train!r}, expected a function of the worker")
        if workers < 1:
            raise ConfigurationError(f"workers={workers}, expected at least 1")
        self._require_open()
        nodes = [node for node in self.nodes if node.role == "worker"]
        threads = sum(node.threads for node in nodes)
        if workers > threads:
            raise CapacityError(
                f"workers={workers}, but the {len(nodes)} nodes left for workers have {threads} "
                "threads in all; start more Dask workers or ask for fewer"
            )
        first, self._started_workers = self._started_workers, self._started_workers + workers
        peers = [f"worker-{number}" for number in range(first, first + workers)]
        return [self._submit(train, peers, index, nodes) for index in range(workers)]

    def run_again(self, train: Callable[[Worker], T], worker: str, node: str) -> Any:
        """Start a worker again that was lost with its node; return its Dask future.

        It enters as another incarnation: nothing of the one before is taken for its own.

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
        nodes = [known for known in self.nodes if (known.name, known.role) == (node, "worker")]
        if not nodes:
            raise ConfigurationError(f"there is no node {node!r} for workers")
        return self._submit(train, [worker], 0, nodes)

    def evaluate(self, score: Score, every: float = 1.0) -> Any:
        """Score snapshots of the weights on a node of their own, until the group is closed.

        Nothing that is pushed after this has returned is in the first one, unless a shard is down.

        Parameters
        ----------
        score
            Called with the weights; returns loss and accuracy, which are recorded as `Evaluated`.
        every
            Seconds from one evaluation to the next.

        Raises
        ------
        CapacityError
            No node has the Dask resource "evaluator", nor is one left for workers.
        """
        return self._client.sync(self._hosting.evaluate, score, every)

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
            What it returned on each shard: of the same kinds as `args`, 1 MiB at most; tuples come
            as lists.

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

    def close(self) -> Any:
        """Take the group down: workers and hosts stop, last events arrive, the coordinator goes.

        A worker that is still running gets `GroupClosed` from its next request.
        """
        return self._client.sync(self._close)

    def _submit(
        self, train: Callable[[Worker], T], peers: Sequence[str], index: int, nodes: Sequence[Node]
    ) -> Any:
        future = self._client.submit(
            run_worker,
            self.group,
            train,
            peers,
            index,
            "worker",
            {node.address: node.name for node in nodes},
            key=f"dps-{peers[index]}-{self.group.name}-{uuid.uuid4().hex[:8]}",
            workers=[node.address for node in nodes],
            resources={"worker": 1} if nodes[0].resource else None,
            pure=False,
        )
        # Held also if the caller does not: a worker whose future is gone runs on.
        self._futures = {each for each in self._futures if not each.done()} | {future}
        return future

    async def _apply(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        if self._caller is None:
            # Whoever called before it was resumed must not be taken for this one.
            generation = self.saved.run.generation + 1 if self.saved is not None else 0
            self._caller = Caller(self.group, self._transport, incarnation=generation)
        return await self._caller.apply(function, arguments)

    # -- up and down -----------------------------------------------------------------------------

    async def _start(self) -> None:
        self._transport = DaskTransport(self._client.rpc, Meter())
        self._router = Router(self.group, self._transport)
        await self._hosting.assign(self._router)
        self._open = True
        try:
            await self._bring_up()
        except BaseException:
            await self._close()
            raise

    async def _bring_up(self) -> None:
        client, name = self._client, self.group.name
        self._inbox.open()
        client.subscribe_topic(node_topic(name), weakly(self._hosting.node_joined))
        self._relief.open()
        await client.register_plugin(CoordinatorPlugin(self.group, client.id))
        start = self._start_with
        await start.leave_description()
        seeder = Seeder(self.group, start.initial, self._transport, self._router, start.states)
        self._seeding = asyncio.create_task(seeder.run())
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._hosting.make_hosts(self.nodes)
                table = await self._router.newer(-1)
                while not table.complete:
                    if isinstance(seeder.error, StoreUnavailable):
                        raise seeder.error
                    table = await self._router.newer(table.version)
        except TimeoutError:
            raise CapacityError(
                f"after {START_SECONDS:g} s the shards are not served by {self.group.replicas} "
                "replicas each; look at what keeps the Dask workers busy, and at their logs"
            ) from None

    async def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._client.unsubscribe_topic(node_topic(self.group.name))
        tasks = [self._seeding] if hasattr(self, "_seeding") else []
        for task in tasks:
            task.cancel()
        ends = (self._relief.close(), self._hosting.stop())
        await asyncio.gather(*tasks, *ends, return_exceptions=True)
        await self._hosting.finish_evaluators()
        await self._end_workers()
        if self._caller is not None:
            await self._caller.close()
        await self._hosting.finish_hosts()
        await self._router.close()
        await self._client.run_on_scheduler(take_out, COORDINATOR_PREFIX + self.group.name)
        await self._inbox.close(self._hosting.seated)
        await self._client.run_on_scheduler(forget, self.group.name)

    async def _end_workers(self) -> None:
        """Have the workers fail that are still running, and forget what does not end soon."""
        left = [future for future in self._futures if not future.done()]
        self._futures = set()
        if not left:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.group.timings.call):
                await self._router.ask(CloseGroup())
                await asyncio.gather(*left, return_exceptions=True)
        await self._client.cancel([future for future in left if not future.done()])
