"""A virtual cluster for tests of one's own training: in place of a Dask client, with faults.

`ParameterServer`, its servers, workers and coordinator are the same code as on a real cluster, and
so is the injector that carries the faults out. Only Dask, the network and the clock are simulated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from dps.cluster.driver.roles import by_resources
from dps.cluster.heads import Heads
from dps.cluster.names import ANY_SHARD, Node, NodeSpec
from dps.cluster.node.worker_task import run_worker
from dps.cluster.platform import Running
from dps.cluster.transport.calls import ClusterTransport, Meter
from dps.core.names import role_of
from dps.core.ranges import refused, whole_argument
from dps.errors import ConfigurationError
from dps.events import Event, FaultMissed
from dps.faults import Fault
from dps.faults.expansion import expand
from dps.faults.injector import Injector
from dps.faults.targets import obstacles
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import AuditReply, Table
from dps.virtual.client import TaskFuture, VirtualClient, VirtualNodes
from dps.virtual.threads import VirtualFuture


class VirtualCluster(VirtualClient):
    """Nodes on virtual time; used in a ``with`` statement, and given to `ParameterServer`.

    Training functions run as they are, each on a node of its own, and the whole is over as soon as
    it is computed: nothing waits but the virtual clock. The same program with the same seed comes
    to the same end, bit by bit. A training function waits by `worker.sleep`; `time.sleep` is
    refused. Not thread-safe.

    Parameters
    ----------
    servers, workers, stores
        How many nodes there are of each kind: "server-0", "server-1" and so on; "worker-0" and so
        on. Any server may hold any shard. Stores, from "store-0" on, keep the states of stateless
        servers.
    seed
        How long each message and each bit of work takes is drawn from it, and whom a fault hits
        where that is left open.
    faults
        What happens to whom, such as ``Kill("server-0", AtUpdates(300))``. Seconds count from the
        moment at which the first worker is started; when the last one has ended, so have the
        faults.

    Attributes
    ----------
    events
        What the faults did, and what `note` was given.
    nodes
        The nodes, to be broken by hand as well.

    Raises
    ------
    ConfigurationError
        A fault cannot be simulated, such as a full disk. On leaving the ``with`` block: a fault did
        not happen, so what was tested was something else.
    """

    def __init__(
        self,
        servers: int = 1,
        workers: int = 1,
        *,
        stores: int = 1,
        seed: int = 0,
        faults: Sequence[Fault] = (),
    ) -> None:
        given = {"server": servers, "store": stores, "worker": workers}
        wanted = {role: whole_argument(f"{role}s", n, 1, "nodes") for role, n in given.items()}
        whole_argument("seed", seed, 0, "numbers")
        if not isinstance(faults, Sequence) or not all(isinstance(each, Fault) for each in faults):
            expected = 'a list of faults such as Kill("server-0", AtUpdates(300))'
            raise refused("faults", faults, expected)
        names = [f"{role}-{i}" for role, number in wanted.items() for i in range(number)]
        self._faults = expand(faults, seed, names)
        super().__init__([NodeSpec(name, role_of(name)) for name in names], seed)
        self.events: list[Event] = []
        self.nodes = VirtualNodes(self)
        self._seed = seed
        self._injector: Injector | None = None
        self._ending: Running | None = None
        self._training = 0
        for number, reason in obstacles(self._faults, self.nodes, names):
            self.close()
            raise ConfigurationError(f"fault {number} cannot be simulated: {reason}")

    def note(self, event: Event) -> None:
        """Keep an event; ``ParameterServer(..., on_event=cluster.note)`` has all of them here."""
        self.events.append(event)
        if self._injector is not None:
            self._injector.note(event)

    def submit(self, function: Callable[..., Any], *args: Any, **how: Any) -> TaskFuture[Any]:
        """Have a task run; the faults begin with the first worker."""
        if function is not run_worker:
            return super().submit(function, *args, **how)
        if self._injector is None:
            self._begin_faults(args[0])
        future = super().submit(function, *args, **how)
        self._training += 1
        future.add_done_callback(self._one_ended)
        return future

    def gather(self, futures: Iterable[VirtualFuture[Any]]) -> list[Any]:
        """Wait for all workers and for the end of the faults; return what the workers returned.

        Raises
        ------
        Exception
            The first error of a worker in order; `distributed.KilledWorker` if it was killed.
        """
        waited = list(futures)
        for future in waited:
            future.exception()
        if self._ending is not None:
            self._ending.join()
        return super().gather(waited)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        missed = [event for event in self.events if isinstance(event, FaultMissed)]
        if kind is None and missed:
            told = "; ".join(f"fault {e.fault} on {e.target}: {e.reason}" for e in missed)
            raise ConfigurationError(f"not everything happened that was planned: {told}")
        if kind is None and self._faults and self._injector is None:
            warnings.warn("no worker was started, so no fault happened", stacklevel=2)

    def _begin_faults(self, group: Group) -> None:
        seen: Any = _Observed(self, group)
        clock = self.dps_platform.clock
        self._injector = Injector(self._faults, self.nodes, seen, clock, self.note, self._seed)
        self._injector.__enter__()

    def _one_ended(self, future: Future[Any]) -> None:
        self._training -= 1
        if not self._training and self._ending is None:
            self._ending = self.dps_platform.start(self._end_faults, "end of the faults")

    def _end_faults(self) -> None:
        assert self._injector is not None
        self._injector.__exit__(None, None, None)

    def _add(self, spec: NodeSpec) -> None:
        super()._add(spec)
        if spec.resource == "server":
            self.started[spec.name].more_resources[ANY_SHARD] = 1


class _Observed:
    """What the injector has to know of a parameter server, found out as any client does.

    Attributes
    ----------
    group
        Its group.
    """

    def __init__(self, cluster: VirtualCluster, group: Group) -> None:
        self.group = group
        self._cluster = cluster
        pool: Any = cluster.rpc
        self._transport = ClusterTransport(pool, Meter())
        self._router = Router(group, self._transport)

    @property
    def nodes(self) -> list[Node]:
        """The nodes that are there, each with its role."""
        return by_resources({w.address: w.describe() for w in self._cluster.alive()})

    def table(self) -> Table:
        """Who serves what at this moment."""
        table: Table = self._cluster.sync(self._router.fetch)
        return table

    def audit(self) -> list[AuditReply | None]:
        """The numbers of each shard's state, None for one that does not answer."""
        heads = Heads(self.group, self._router, self._transport)
        replies: list[AuditReply | None] = self._cluster.sync(heads.audit_all)
        return replies
