"""A virtual cluster for tests of your training: in place of a Dask client, with faults.

`ParameterServer`, its servers, workers and coordinator run the same code as on a real cluster, and
so does the injector of faults. Only Dask, the network and the clock are simulated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from dps.cluster.driver.roles import by_resources
from dps.cluster.heads import ask_heads
from dps.cluster.names import ANY_SHARD, Node, NodeSpec
from dps.cluster.node.worker_task import run_worker
from dps.cluster.platform import Running
from dps.cluster.transport.calls import ClusterTransport, Meter
from dps.core.names import role_of
from dps.core.ranges import integer_argument, refused
from dps.errors import ConfigurationError
from dps.events import Event, FaultMissed
from dps.faults import Fault
from dps.faults.expansion import expand
from dps.faults.injector import Injector
from dps.faults.targets import obstacles
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.virtual.client import TaskFuture, VirtualClient
from dps.virtual.threads import VirtualFuture


class VirtualCluster(VirtualClient):
    """Nodes on virtual time; used in a ``with`` statement, and given to `ParameterServer`.

    Training functions run unchanged, each on a separate node. Only the virtual clock waits, so a
    training takes as long as its computations. The same program with the same seed has the same
    results, bit by bit. A training function waits by `worker.sleep`; `time.sleep` is refused. Not
    thread-safe.

    Parameters
    ----------
    servers, workers, stores
        Numbers of nodes, which are named "server-0", "server-1" and so on. Any server may hold any
        shard. Stores keep the states of stateless servers.
    seed
        Seed of the durations of messages and work, and of choices that faults leave open.
    faults
        Faults such as ``Kill("server-0", AtUpdates(300))``. Seconds count from the start of the
        first worker; faults end when the last worker has ended. The methods `kill`, `pause` and
        `resume` break a node at once.

    Attributes
    ----------
    events
        Events of the faults, and those that `note` received.

    Raises
    ------
    ConfigurationError
        A fault cannot be simulated, such as a full disk. On leaving the ``with`` block: a fault did
        not happen, so the program has not tested it.

    Examples
    --------
    >>> import numpy as np
    >>> from dps import SGD, ParameterServer
    >>> from dps.faults import AtUpdates, Kill
    >>> def train(worker):
    ...     for _ in range(10):
    ...         worker.push({"w": np.ones(4)})
    >>> with VirtualCluster(servers=2, faults=[Kill("server-0", AtUpdates(5))]) as cluster:
    ...     start = {"w": np.zeros(4)}
    ...     with ParameterServer(cluster, start, recovery="chain", optimizer=SGD(1.0)) as ps:
    ...         futures = ps.run(train)
    ...         results = cluster.gather(futures)
    ...         ps.pull()["w"]
    array([-10., -10., -10., -10.])
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
        wanted = {role: integer_argument(f"{role}s", n, 1, "nodes") for role, n in given.items()}
        integer_argument("seed", seed, 0, "numbers")
        if not isinstance(faults, Sequence) or not all(isinstance(each, Fault) for each in faults):
            expected = 'a list of faults such as Kill("server-0", AtUpdates(300))'
            raise refused("faults", faults, expected)
        names = [f"{role}-{i}" for role, number in wanted.items() for i in range(number)]
        self._faults = expand(faults, seed, names)
        super().__init__([NodeSpec(name, role_of(name)) for name in names], seed)
        self.events: list[Event] = []
        self._seed = seed
        self._injector: Injector | None = None
        self._ending: Running | None = None
        self._training = 0
        for number, reason in obstacles(self._faults, self, names):
            self.close()
            raise ConfigurationError(f"fault {number} cannot be simulated: {reason}")

    def note(self, event: Event) -> None:
        """Add an event to `events`; ``ParameterServer(..., on_event=cluster.note)`` adds all."""
        self.events.append(event)
        if self._injector is not None:
            self._injector.note(event)

    def submit(self, function: Callable[..., Any], *args: Any, **how: Any) -> TaskFuture[Any]:
        """Run a task; the faults begin with the first worker."""
        if function is not run_worker:
            return super().submit(function, *args, **how)
        if self._injector is None:
            ps: Any = _Observed(self, args[0])
            self._injector = Injector(self._faults, self, ps, self.note, self._seed)
            self._injector.__enter__()
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

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if exc_info[0] is not None:
            return
        missed = [event for event in self.events if isinstance(event, FaultMissed)]
        if missed:
            reasons = "; ".join(f"fault {e.fault} on {e.target}: {e.reason}" for e in missed)
            raise ConfigurationError(f"planned faults did not happen: {reasons}")
        if self._faults and self._injector is None:
            warnings.warn("no worker was started, so no planned fault happened", stacklevel=2)

    def _one_ended(self, future: Future[Any]) -> None:
        self._training -= 1
        if not self._training and self._ending is None and self._injector is not None:
            end = partial(self._injector.__exit__, None, None, None)
            self._ending = self.dps_platform.start(end, "end of the faults")

    def _add(self, spec: NodeSpec) -> None:
        super()._add(spec)
        if spec.resource == "server":
            self._workers[spec.name].more_resources[ANY_SHARD] = 1


class _Observed:
    """The part of `ParameterServer` that the injector uses, for another client of the group."""

    def __init__(self, cluster: VirtualCluster, group: Group) -> None:
        self.group = group
        self._cluster = cluster
        pool: Any = cluster.rpc
        self._router = Router(group, ClusterTransport(pool, Meter()))

    @property
    def nodes(self) -> list[Node]:
        return by_resources({w.address: w.describe() for w in self._cluster.alive()})

    def table(self) -> Any:
        return self._cluster.sync(self._router.fetch)

    def audit(self) -> Any:
        return self._cluster.sync(ask_heads, self._router)
