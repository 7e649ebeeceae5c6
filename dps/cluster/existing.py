"""Owns a cluster that somebody else runs: a Dask scheduler and Dask workers, by their address.

Its Dask workers become nodes for as long as the cluster is open. None is started or ended here: a
node that was killed is replaced by a Dask worker that is idle, or by the next one that joins, which
may be the same one, started again by its nanny or by whatever looks after the deployment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import dask
from distributed import Client, Scheduler
from distributed.comm.addressing import parse_address
from distributed.comm.registry import get_backend
from distributed.security import Security

from dps.cluster.local import DASK_SETTINGS, NodeSpec
from dps.cluster.processes import ANSWER_SECONDS, Process, check_scheduler, look_at
from dps.cluster.remote import Placed, RemoteNodes
from dps.cluster.roles import resource_in
from dps.cluster.seats import Offer, Seats, best, eligible, failing_together, seated
from dps.errors import CapacityError, ConfigurationError, DpsError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
JOIN_SECONDS = 20.0
LOOK_SECONDS = 0.05
WITH_TLS = ("tls", "wss")


class ExistingCluster(RemoteNodes):
    """Nodes on a Dask deployment that is there already.

    Parameters
    ----------
    address
        That of the Dask scheduler; None: Dask's own configuration names it (`scheduler-address`).
    nodes
        The nodes that are needed. They are Dask workers with the Dask resource of their role, if
        any worker has one; else dps chooses, with replicas on different hosts where it can.
    security
        The certificates of the deployment; None: what Dask's own configuration says.

    Attributes
    ----------
    client
        A Dask client that is connected to the scheduler.
    seats
        Which Dask worker is which node.
    notes
        What should be known about where the nodes are.

    Raises
    ------
    CapacityError
        No scheduler answers, or it has too few Dask workers.
    ConfigurationError
        dps is not installed there, or another version is; or address and certificates do not go
        together.

    Notes
    -----
    While it is open, the scheduler does not start tasks of lost workers again by itself
    (`allowed-failures`). Nodes of one deployment must not be used by two clusters at a time.
    """

    def __init__(
        self, address: str | None, nodes: Sequence[NodeSpec], security: Security | None = None
    ) -> None:
        super().__init__()
        self.seats = Seats()
        self._offers: dict[str, Offer] = {}
        self._processes: dict[str, Process] = {}
        self._open: list[NodeSpec] = []
        self._welcoming: set[asyncio.Task[None]] = set()
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(dask.config.set(DASK_SETTINGS))
            self.client = stack.enter_context(_connected(address, security))
            check_scheduler(self.client)
            self.client.subscribe_topic("all", self._note)
            stack.callback(self.client.unsubscribe_topic, "all")
            taken = self._places(nodes)
            for node in nodes:
                self._seat(node, taken[node.name])
            before = self.client.run_on_scheduler(_allow_failures, 0)
            stack.callback(self._put_back, before)
            self._stack = stack.pop_all()
        self.notes = tuple(failing_together(self._named(taken)))

    def __enter__(self) -> ExistingCluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def dashboard(self) -> str | None:
        """The address of Dask's dashboard, where the scheduler serves one."""
        try:
            link: str | None = self.client.dashboard_link
        except KeyError:
            return None
        return link

    def start(self, node: NodeSpec) -> None:
        """Have an idle Dask worker become this node, or else the next one that joins.

        Raises
        ------
        ConfigurationError
            There is a node of this name.
        """
        with self._lock:
            if node.name in self._nodes.keys() - self._lost or node in self._open:
                raise ConfigurationError(f"there is a node named {node.name!r} already")
            self._open.append(node)
        self._fill()

    def kill(self, name: str) -> int:
        """Have SIGKILL sent to a node's process, by itself if it is on another host."""
        node = self.living(name)
        if node.process.here:
            os.kill(node.process.pid, signal.SIGKILL)
        else:
            self.client.run(_end_at_once, workers=[node.address], wait=False)
        return node.process.pid

    def close(self) -> None:
        """Leave the deployment as it was, but for what was killed."""
        self._stack.close()

    # -- which Dask worker is which node ---------------------------------------------------------

    def _places(self, nodes: Sequence[NodeSpec]) -> dict[str, Offer]:
        """Find a Dask worker for each node; wait a little for those that are still to join."""
        until = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                return seated(nodes, self._present())
            except CapacityError:
                if time.monotonic() > until:
                    raise
            time.sleep(LOOK_SECONDS)

    def _present(self) -> list[Offer]:
        workers = self.client.sync(self.client.scheduler.identity, n_workers=-1)["workers"]
        try:
            self.client.sync(self._look_at, workers)
        except TimeoutError:
            raise CapacityError(
                f"some Dask workers did not answer within {ANSWER_SECONDS:g} s; look at what keeps "
                "them busy, and at their logs"
            ) from None
        with self._lock:
            return list(self._offers.values())

    def _note(self, event: tuple[float, Any]) -> None:
        """Take note of what the scheduler says: a Dask worker has joined, or is lost."""
        match event[1]:
            case {"action": "remove-worker", "worker": str(address)}:
                self._forget(address)
            case {"action": "add-worker", "worker": str(address)}:
                task = asyncio.ensure_future(self._welcome(address))
                self._welcoming.add(task)
                task.add_done_callback(self._welcoming.discard)

    async def _welcome(self, address: str) -> None:
        try:
            workers = (await self.client.scheduler.identity(n_workers=-1))["workers"]
            if address in workers:
                await self._look_at({address: workers[address]})
                self._fill()
        except (DpsError, OSError, TimeoutError) as error:
            logger.warning("a Dask worker that joined cannot become a node: %s", error)

    def _forget(self, address: str) -> None:
        with self._lock:
            self._offers.pop(address, None)
            self._processes.pop(address, None)
            self._lost |= {name for name, node in self._nodes.items() if node.address == address}
            self.seats.leave(address)

    async def _look_at(self, workers: dict[str, dict[str, Any]]) -> None:
        """Find out where Dask workers run that are not known yet."""
        new = [address for address in workers if address not in self._processes]
        if not new:
            return
        for address, process in (await look_at(self.client, new)).items():
            info = workers[address]
            with self._lock:
                self._processes[address] = process
                self._offers[address] = Offer(
                    address, str(info["name"]), process.machine, info["nthreads"], resource_in(info)
                )

    def _fill(self) -> None:
        """Give the places that are open to whom is free."""
        with self._lock:
            for node in list(self._open):
                able = eligible(self._offers.values())
                free = [offer for offer in able if self.seats.of(offer.address) is None]
                offer = best(node, free, self._living_places())
                if offer is not None:
                    self._open.remove(node)
                    self._seat(node, offer)

    def _seat(self, node: NodeSpec, offer: Offer) -> None:
        with self._lock:
            self._lost.discard(node.name)
            process = self._processes[offer.address]
            self._nodes[node.name] = Placed(node, offer.address, process)
        self.seats.take(offer.address, node)

    def _living_places(self) -> dict[str, Offer]:
        known = ((name, self._offers.get(node.address)) for name, node in self._nodes.items())
        living = {name: offer for name, offer in known if offer is not None}
        return {name: offer for name, offer in living.items() if name not in self._lost}

    def _named(self, taken: dict[str, Offer]) -> dict[str, Offer]:
        """The same with hosts as people call them."""
        return {
            name: Offer(o.address, o.name, self._processes[o.address].host, o.threads, o.resource)
            for name, o in taken.items()
        }

    def _put_back(self, allowed_failures: int) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # the scheduler may be gone
            self.client.run_on_scheduler(_allow_failures, allowed_failures)


def _connected(address: str | None, security: Security | None) -> Client:
    wanted = address or dask.config.get("scheduler-address", None)
    if wanted is None:
        raise ConfigurationError(
            "no address of a Dask scheduler: give cluster.address, as in tcp://10.0.0.1:8786, or "
            "set DASK_SCHEDULER_ADDRESS"
        )
    certificates = security or Security()
    _require_fitting(wanted, certificates)
    try:
        return Client(wanted, security=certificates, set_as_default=False, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError) as error:
        raise CapacityError(
            f"no Dask scheduler answers at {wanted} ({error}); start one with `dask scheduler`, "
            f"or correct the address{_of_certificates(wanted)}"
        ) from error


def _require_fitting(address: str, security: Security) -> None:
    """Refuse an address that Dask would not even try: it leaves a client that cannot be closed."""
    scheme, _ = parse_address(address)
    try:
        get_backend(scheme)
        arguments = security.get_connection_args("client")
    except ValueError:
        raise ConfigurationError(
            f"{address} is no address of a Dask scheduler; expected tcp://10.0.0.1:8786, or tls://"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"the certificates that Dask is configured with cannot be used ({error}); correct "
            "distributed.comm.tls, or give cluster.tls"
        ) from error
    if scheme in WITH_TLS and arguments["ssl_context"] is None:
        raise ConfigurationError(
            f"{address} asks for certificates, and none are given; name them by cluster.tls "
            "({ca_file: …, cert: …, key: …}), or in Dask's own configuration (distributed.comm.tls)"
        )
    if scheme not in WITH_TLS and arguments["require_encryption"]:
        raise ConfigurationError(
            f"{address} is an address without TLS, and certificates are given, or required by "
            "Dask's own configuration; give the address that begins with tls://, or no certificates"
        )


def _of_certificates(address: str) -> str:
    """What may be wrong besides, as far as the address tells."""
    if parse_address(address)[0] in WITH_TLS:
        return "; with TLS, both must have certificates of the same authority"
    return "; one that runs with TLS has an address that begins with tls://"


# -- what runs in the processes of the deployment ------------------------------------------------


async def _end_at_once() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _allow_failures(number: int, dask_scheduler: Scheduler) -> int:
    """Say how often a task may lose its worker and is started again; return what it was."""
    before: int = dask_scheduler.allowed_failures
    dask_scheduler.allowed_failures = number
    return before
