"""A cluster on a Dask deployment that exists already, by the address of its scheduler.

Its Dask workers become nodes while the cluster is open. None is started or ended here: a node that
was killed is replaced by an idle Dask worker, or by the next one that joins. That may be the same
one, restarted by its nanny or by what manages the deployment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import dask
from distributed import Client, Scheduler
from distributed.comm.addressing import parse_address
from distributed.comm.registry import get_backend
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.security import Security

from dps.cluster.backends.assignment import (
    NodeAssignment,
    assign,
    best,
    capacity,
    eligible,
    failing_together,
    too_few,
)
from dps.cluster.backends.base import ANSWER_SECONDS, Cluster, Process, check_scheduler, look_at
from dps.cluster.backends.local import DASK_SETTINGS
from dps.cluster.names import NodeSpec, Offer, resource_in
from dps.cluster.node.member import occupied, tidy
from dps.errors import CapacityError, ConfigurationError
from dps.protocol.tasks import Tasks

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
JOIN_SECONDS = 20.0
WITH_TLS = ("tls", "wss")
WAIT_SECONDS = 0.2
TELL_SECONDS = 10.0
NAME = "dps-reservations"


class ExistingCluster(Cluster):
    """Nodes on an existing Dask deployment, which others may use as well.

    The nodes are Dask workers with the Dask resource of their role if any worker has one. Otherwise
    dps chooses, with replicas on different hosts where it can.

    `CapacityError`: no scheduler answers, or it has too few Dask workers, or others use them for
    longer than `patience`. `ConfigurationError`: dps is not installed there, or in another version;
    or the address and the certificates do not match.
    """

    seats: NodeAssignment

    def __init__(
        self,
        address: str | None,  # of the scheduler; None: Dask's configuration (`scheduler-address`)
        nodes: Sequence[NodeSpec],
        security: Security | None = None,  # None: the certificates of Dask's configuration
        patience: float = 0.0,  # seconds to wait for Dask workers that others use
        notify: Callable[[str], None] = logger.info,
    ) -> None:
        super().__init__()
        self.room = 0  # how many such clusters fit on the deployment at once
        self.seats = NodeAssignment()
        self._notify = notify
        # The Dask workers that have answered, by address; the host of an offer is its machine.
        self._known: dict[str, tuple[Process, Offer]] = {}
        self._silent: set[str] = set()
        self._places: dict[str, Offer] = {}
        self._open: list[NodeSpec] = []
        self._filling = asyncio.Lock()
        self._tasks = Tasks(partial(logger.warning, "a lost node could not be replaced: %s"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(dask.config.set(DASK_SETTINGS))
            self.client = stack.enter_context(connected(address, security))
            check_scheduler(self.client)
            with contextlib.suppress(KeyError):  # the scheduler serves none
                self.dashboard = self.client.dashboard_link
            self.client.subscribe_topic("all", self._note)
            stack.callback(self.client.unsubscribe_topic, "all")
            stack.callback(self._leave)
            self.client.run_on_scheduler(reserve, "enter", self.client.id)
            offers = self._wait(nodes, patience)
            for node in nodes:
                self._seat(node, offers[node.name])
            self._stack = stack.pop_all()
        self.notes = failing_together({n: p.host for n, p in self._processes.items()})

    def start(self, node: NodeSpec) -> None:
        """Make an idle Dask worker this node, or otherwise the next one that joins."""
        with self._claimed(node):
            self._open.append(node)
            self.client.loop.add_callback(self._fill_soon)

    def kill(self, name: str) -> int:
        """Kill a node's process by SIGKILL; one on another host sends the signal to itself."""
        process = self._living(name)
        if process.own is not None:
            return super().kill(name)
        self.client.run(_end_at_once, workers=[process.address], wait=False)
        return process.pid

    # -- which Dask worker is which node ---------------------------------------------------------

    def _wait(self, nodes: Sequence[NodeSpec], patience: float) -> dict[str, Offer]:
        """Take a Dask worker for each node, as soon as enough of them are free."""
        began = enough = time.monotonic()
        reported = -math.inf
        while True:
            able, free = self.client.sync(self._look)
            self.room = capacity(nodes, able)
            places = assign(nodes, free)
            missing = len(nodes) - len(places)
            if not missing and self.client.sync(self._take, [o.address for o in places.values()]):
                return places
            now = time.monotonic()
            if self.room > 0:
                enough = now
            elif now - enough > JOIN_SECONDS:
                raise too_few(nodes, able)
            if self.room > 0 and missing:
                short = f"{missing} of {len(nodes)} nodes that other trials use or wait for"
                if now - began > patience:
                    raise CapacityError(
                        f"{short} are still missing after {patience:g} s; start more Dask "
                        "workers, run fewer trials at a time, or raise cluster.patience"
                    )
                if now - reported > TELL_SECONDS:
                    reported = now
                    self._notify(f"waiting for {short}, {now - began:.0f} s")
            time.sleep(WAIT_SECONDS)

    async def _look(self) -> tuple[list[Offer], list[Offer]]:
        """Return Dask workers that may become nodes, and those that answer and can do so now."""
        offers, free = await self.client.run_on_scheduler(reserve, "look", self.client.id)
        able = eligible([offer for offer in offers if offer.address not in self._silent])
        answers = [self._ask(offer) for offer in able if offer.address in free]
        return able, [offer for offer in await asyncio.gather(*answers) if offer is not None]

    async def _ask(self, offer: Offer) -> Offer | None:
        """Return an offer with its machine; None if its Dask worker is lost, silent or occupied."""
        address = offer.address
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if address not in self._known and (process := await look_at(self.client, address)):
                    self._known[address] = process, replace(offer, host=process.machine)
                answers = await self.client.run(occupied, workers=[address], on_error="ignore")
        except TimeoutError:
            self._silent.add(address)
            self._notify(
                f"ignoring the Dask worker at {address}: no answer within "
                f"{ANSWER_SECONDS:g} s; check whether it is overloaded"
            )
            return None
        known = self._known.get(address)
        return known[1] if known is not None and answers.get(address) is False else None

    async def _take(self, addresses: Sequence[str]) -> bool:
        """Reserve Dask workers unless another client was faster, and lift faults left on them."""
        client = self.client
        taken: bool = await client.run_on_scheduler(reserve, "take", client.id, addresses)
        if taken:
            await client.run(tidy, workers=addresses, on_error="ignore")
        return taken

    def _note(self, event: tuple[float, Any]) -> None:
        match event[1]:
            case {"action": "remove-worker", "worker": str(address)}:
                with self._lock:
                    self._known.pop(address, None)
                    self._silent.discard(address)
                    self._forget(address)
                    self.seats.specs.pop(address, None)  # another one may join there
            case {"action": "add-worker" | "dps-freed"}:
                self._fill_soon()

    def _fill_soon(self) -> None:
        self._tasks.start(self._fill())

    async def _fill(self) -> None:
        async with self._filling:
            for node in list(self._open):
                while True:
                    _, free = await self._look()
                    with self._lock:
                        taken = {n: at for n, at in self._places.items() if n not in self._lost}
                    if (offer := best(node, free, taken)) is None:
                        break
                    if await self._take([offer.address]):
                        self._open.remove(node)
                        self._seat(node, offer)
                        break

    def _seat(self, node: NodeSpec, offer: Offer) -> None:
        with self._lock:
            self._specs[node.name] = node
            self._processes[node.name] = self._known[offer.address][0]
            self._places[node.name] = offer
        self.seats.take(offer.address, node)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # the scheduler may be gone
            self.client.run_on_scheduler(reserve, "leave", self.client.id)


def connected(address: str | None, security: Security | None) -> Client:
    """Return a client of an existing Dask scheduler; parameters as for `ExistingCluster`.

    `CapacityError`: no scheduler answers. `ConfigurationError`: there is no address, or it does not
    match the certificates.
    """
    wanted = address or dask.config.get("scheduler-address", None)
    if wanted is None:
        raise ConfigurationError(
            "no address of a Dask scheduler: set cluster.address, such as tcp://10.0.0.1:8786, or "
            "the environment variable DASK_SCHEDULER_ADDRESS"
        )
    certificates = security or Security()
    scheme, _ = parse_address(wanted)
    # Dask would not try such an address, but leave a client that cannot be closed.
    try:
        get_backend(scheme)
        arguments = certificates.get_connection_args("client")
    except ValueError:
        raise ConfigurationError(
            f"{wanted} is not the address of a Dask scheduler; expected tcp://HOST:PORT or tls://…"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"the certificates of Dask's configuration cannot be used ({error}); correct "
            "distributed.comm.tls, or set cluster.tls"
        ) from error
    if scheme in WITH_TLS and arguments["ssl_context"] is None:
        raise ConfigurationError(
            f"{wanted} needs certificates; name them in cluster.tls "
            "({ca_file: …, cert: …, key: …}), or in Dask's configuration (distributed.comm.tls)"
        )
    if scheme not in WITH_TLS and arguments["require_encryption"]:
        raise ConfigurationError(
            f"{wanted} is an address without TLS, but certificates are given, or required by "
            "Dask's configuration; use an address that begins with tls://, or leave the "
            "certificates out"
        )
    try:
        return Client(wanted, security=certificates, set_as_default=False, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError) as error:
        raise CapacityError(
            f"no Dask scheduler answers at {wanted} ({error}); start one with `dask scheduler`, or "
            "correct the address. With TLS it begins with tls://, and both sides need certificates "
            "of one authority."
        ) from error


# -- what runs in the processes of the deployment ------------------------------------------------


async def _end_at_once() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Reservations(SchedulerPlugin):
    """The Dask workers that each client uses: a table in the scheduler's process (`reserve`).

    With it the trials of several drivers share a deployment. Each client takes all nodes that it
    needs, or none, in the order of arrival. They are free again when the client leaves, or its
    connection ends. While any client has nodes, the scheduler does not restart tasks of lost ones.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.name = NAME
        self._scheduler = scheduler
        self._taken: dict[str, set[str]] = {}
        # Clients that wait for their first nodes, in the order of arrival.
        self._waiting: dict[str, None] = {}
        self._allowed_failures = scheduler.allowed_failures
        scheduler.allowed_failures = 0

    def enter(self, client: str) -> None:
        """Add a client at the end of the queue."""
        self._taken[client] = set()
        self._waiting[client] = None

    def look(self, client: str) -> tuple[list[Offer], frozenset[str]]:
        """Return the Dask workers, and the addresses of those that a client may take."""
        # None is free while earlier clients wait.
        workers, free = self._scheduler.workers, frozenset[str]()
        if client not in self._waiting or client == next(iter(self._waiting)):
            free = frozenset(workers).difference(*self._taken.values())
        offers = [
            Offer(address, str(w.name), w.host, w.nthreads, resource_in({"resources": w.resources}))
            for address, w in workers.items()
        ]
        return offers, free

    def take(self, client: str, addresses: Collection[str]) -> bool:
        """Take all of these for a client, or none if one is not free; return if it did."""
        if not self.look(client)[1].issuperset(addresses):
            return False
        self._taken[client] |= set(addresses)
        self._waiting.pop(client, None)
        return True

    def leave(self, client: str) -> None:
        """Free the nodes of a client; the last one leaves the scheduler as it was."""
        if self._taken.pop(client, None) is None:
            return
        self._waiting.pop(client, None)
        self._scheduler.log_event("all", {"action": "dps-freed"})  # Dask workers are free again
        if not self._taken:
            self._scheduler.allowed_failures = self._allowed_failures
            self._scheduler.remove_plugin(NAME)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Free the nodes of a client that is gone; called by Dask."""
        self.leave(client)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a lost Dask worker: another one may join at its address."""
        for addresses in self._taken.values():
            addresses.discard(worker)


def reserve(act: str, client: str, *arguments: Any, dask_scheduler: Scheduler) -> Any:
    """Call a method of `Reservations`, such as "enter"; clients run this in the scheduler."""
    if act == "enter" and NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Reservations(dask_scheduler))
    table = dask_scheduler.plugins.get(NAME)
    return getattr(table, act)(client, *arguments) if table is not None else None
