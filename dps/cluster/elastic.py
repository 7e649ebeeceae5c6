"""Owns the part of the facade by which servers and workers come and go while training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dps.cluster.hosting import Hosting
from dps.cluster.roles import Node
from dps.cluster.worker import Worker
from dps.core.rebalancing import as_servers
from dps.errors import CapacityError, ConfigurationError, ShardUnavailable
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Dismiss, Drain, Scale, Table

if TYPE_CHECKING:
    from collections.abc import MutableSet

    import distributed

T = TypeVar("T")


class Elastic:
    """What `ParameterServer` can do to itself while it runs. Methods may be called in any thread.

    With an asynchronous Dask client, await what `scale`, `drain` and `remove_worker` return.
    """

    group: Group
    _client: distributed.Client
    _router: Router
    _hosting: Hosting
    _futures: MutableSet[Any]
    _started_workers: int

    if TYPE_CHECKING:

        @property
        def nodes(self) -> list[Node]: ...
        def run(self, train: Callable[[Worker], T], workers: int = 1) -> list[Any]: ...
        def _require_open(self) -> None: ...

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
        self._require_open()
        nodes = [node for node in self.nodes if node.role == "worker"]
        threads = sum(node.threads for node in nodes)
        busy = sum(not future.done() for future in self._futures)
        if busy >= threads:
            raise CapacityError(
                f"the {len(nodes)} nodes for workers have {threads} threads in all, and {busy} "
                "workers run there; start more Dask workers, or remove a worker before"
            )
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
        if name not in known:
            there = f"{known[0]} to {known[-1]}" if known else "none"
            raise ConfigurationError(f"there is no worker {name!r}; started were: {there}")
        return self._client.sync(self._dismiss, name)

    async def _scale(self, servers: int) -> None:
        group = self._hosting.group
        servers = as_servers(servers, len(group.layout.shards), group.recovery)
        # Nodes that join a cluster without roles become servers as far as there are too few.
        self._hosting.group = replace(group, servers=servers)
        await self._router.ask(Scale(servers))
        await self._until(
            lambda table: table.complete and not table.leaving, f"servers={servers}: shards"
        )

    async def _dismiss(self, name: str) -> None:
        await self._router.ask(Dismiss(name))

    async def _drain(self, node: str) -> None:
        hosts = self._hosting.hosts
        found = [hosted for hosted in hosts if hosted.node.name == node]
        if not found:
            names = sorted(hosted.node.name for hosted in hosts)
            raise ConfigurationError(
                f"there is no node {node!r} that holds shards or states; there are: "
                f"{', '.join(names)}"
            )
        hosted = found[-1]
        host = hosted.endpoint
        await self._router.ask(Drain(host))
        await self._until(lambda table: host not in table.leaving, f"{node}: what it holds")
        await self._hosting.release(hosted)

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
