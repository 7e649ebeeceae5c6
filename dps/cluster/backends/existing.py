"""A cluster that somebody else runs: a Dask scheduler and Dask workers, by their address.

Its Dask workers become nodes for as long as the cluster is open. None is started or ended here: a
node that was killed is replaced by a Dask worker that is idle, or by the next one that joins, which
may be the same one, started again by its nanny or by whatever looks after the deployment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dask
from distributed import Client
from distributed.comm.addressing import parse_address
from distributed.comm.registry import get_backend
from distributed.security import Security

from dps.cluster.backends.assignment import (
    NodeAssignment,
    best,
    eligible,
    failing_together,
    placed,
    rooms,
    seated,
)
from dps.cluster.backends.local import DASK_SETTINGS
from dps.cluster.backends.processes import send
from dps.cluster.backends.remote import (
    ANSWER_SECONDS,
    Placed,
    Process,
    RemoteNodes,
    check_scheduler,
    look_at,
)
from dps.cluster.names import NodeSpec, Offer
from dps.cluster.node.member import occupied, tidy
from dps.cluster.scheduler import reservations
from dps.cluster.scheduler.reservations import Found, look, take
from dps.errors import CapacityError, ConfigurationError
from dps.protocol.tasks import Tasks

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
JOIN_SECONDS = 20.0
WITH_TLS = ("tls", "wss")
WAIT_SECONDS = 0.2
TELL_SECONDS = 10.0


class ExistingCluster(RemoteNodes):
    """Nodes on a Dask deployment that is there already, which others may use as well.

    Parameters
    ----------
    address
        That of the Dask scheduler; None: Dask's own configuration names it (`scheduler-address`).
    nodes
        The nodes that are needed. They are Dask workers with the Dask resource of their role, if
        any worker has one; else dps chooses, with replicas on different hosts where it can.
    security
        The certificates of the deployment; None: what Dask's own configuration says.
    patience
        For how many seconds Dask workers are waited for that others have.
    tell
        Is told when they are waited for.

    Attributes
    ----------
    client
        A Dask client that is connected to the scheduler.
    seats
        Which Dask worker is which node.
    notes
        What should be known about where the nodes are.
    room
        For how many such clusters at once the deployment has Dask workers.

    Raises
    ------
    CapacityError
        No scheduler answers, or it has too few Dask workers, or others have had them for too long.
    ConfigurationError
        dps is not installed there, or another version is; or address and certificates do not go
        together.

    Notes
    -----
    While it is open, its Dask workers are nobody else's (`dps.cluster.scheduler.reservations`), and
    the scheduler does not start tasks of lost workers again by itself (`allowed-failures`).
    """

    def __init__(
        self,
        address: str | None,
        nodes: Sequence[NodeSpec],
        security: Security | None = None,
        patience: float = 0.0,
        tell: Callable[[str], None] = logger.info,
    ) -> None:
        super().__init__()
        self.room = 0
        self._patience = patience
        self._tell = tell
        self.seats: NodeAssignment = NodeAssignment()
        self._offers: dict[str, Offer] = {}
        self._processes: dict[str, Process] = {}
        self._open: list[NodeSpec] = []
        self._deaf: set[str] = set()
        self._filling = asyncio.Lock()
        self._tasks = Tasks(_not_filled)
        with contextlib.ExitStack() as stack:
            stack.enter_context(dask.config.set(DASK_SETTINGS))
            self.client = stack.enter_context(connected(address, security))
            check_scheduler(self.client)
            with contextlib.suppress(KeyError):  # the scheduler serves none
                self.dashboard = self.client.dashboard_link
            self.client.subscribe_topic("all", self._note)
            stack.callback(self.client.unsubscribe_topic, "all")
            stack.callback(self._leave)
            self.client.run_on_scheduler(reservations.enter, self.client.id)
            taken = self._places(nodes)
            for node in nodes:
                self._seat(node, taken[node.name])
            self._stack = stack.pop_all()
        self.notes = tuple(failing_together(self._named(taken)))

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
        self.client.loop.add_callback(self._fill_soon)

    def kill(self, name: str) -> int:
        """Have SIGKILL sent to a node's process, by itself if it is on another host."""
        node = self.living(name)
        if node.process.here:
            send(node.process.own, name, signal.SIGKILL)
        else:
            self.client.run(_end_at_once, workers=[node.address], wait=False)
        return node.process.pid

    # -- which Dask worker is which node ---------------------------------------------------------

    def _places(self, nodes: Sequence[NodeSpec]) -> dict[str, Offer]:
        """Take a Dask worker for each node, as soon as there are enough that nobody else has."""
        waiting = _Waiting(len(nodes), self._patience, self._tell)
        while True:
            found = self.client.sync(self._look)
            self.room = rooms(nodes, found.offers)
            free = self.client.sync(self._usable, found)
            places = placed(nodes, free)
            if len(places) == len(nodes):
                if self.client.sync(self._take, [offer.address for offer in places.values()]):
                    return places
                continue
            if not waiting.of_use(self.room > 0, len(nodes) - len(places)):
                seated(nodes, found.offers)
            time.sleep(WAIT_SECONDS)

    async def _look(self) -> Found:
        """See which Dask workers there are; those that do not answer are left out."""
        found: Found = await self.client.run_on_scheduler(look, self.client.id)
        there = tuple(offer for offer in found.offers if offer.address not in self._deaf)
        return Found(there, found.free)

    async def _usable(self, found: Found) -> list[Offer]:
        """Which of the free Dask workers can become nodes now, and on which machines they run."""
        able = [offer for offer in eligible(found.offers) if offer.address in found.free]
        answers = await asyncio.gather(*(self._ask(offer) for offer in able))
        return [offer for offer in answers if offer is not None]

    async def _ask(self, offer: Offer) -> Offer | None:
        """Find out where a Dask worker runs, and whether what ran there before is over."""
        address = offer.address
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if address not in self._processes:
                    self._know(offer, await look_at(self.client, [address]))
                answers = await self.client.run(occupied, workers=[address], on_error="ignore")
        except TimeoutError:
            self._deaf.add(address)
            self._tell(
                f"the Dask worker at {address} does not answer within "
                f"{ANSWER_SECONDS:g} s and is left out; look at what keeps it busy"
            )
            return None
        return self._offers.get(address) if answers.get(address) is False else None

    def _know(self, offer: Offer, processes: Mapping[str, Process]) -> None:
        with self._lock:
            for address, process in processes.items():
                self._processes[address] = process
                self._offers[address] = replace(offer, host=process.machine)

    async def _take(self, addresses: Sequence[str]) -> bool:
        """Take Dask workers, unless somebody was faster, and rid them of what faults have left."""
        taken: bool = await self.client.run_on_scheduler(take, self.client.id, addresses)
        if taken:
            await self.client.run(tidy, workers=addresses, on_error="ignore")
        return taken

    def _note(self, event: tuple[float, Any]) -> None:
        """Take note of what the scheduler says: a Dask worker has joined, is lost, or is free."""
        match event[1]:
            case {"action": "remove-worker", "worker": str(address)}:
                self._forget(address)
            case {"action": "add-worker" | reservations.FREED}:
                self._fill_soon()

    def _forget(self, address: str) -> None:
        with self._lock:
            self._offers.pop(address, None)
            self._processes.pop(address, None)
            self._deaf.discard(address)
            self._lost |= {name for name, node in self._nodes.items() if node.address == address}
            self.seats.leave(address)

    def _fill_soon(self) -> None:
        """Look who can take the places that are open; called in the client's event loop."""
        self._tasks.start(self._fill())

    async def _fill(self) -> None:
        async with self._filling:
            while self._open and await self._fill_one():
                pass

    async def _fill_one(self) -> bool:
        """Give a place that is open to whom is free; False: there is nobody for any of them."""
        free = await self._usable(await self._look())
        for node in list(self._open):
            offer = best(node, free, self._living_places())
            if offer is not None:
                if await self._take([offer.address]):
                    self._open.remove(node)
                    self._seat(node, offer)
                return True
        return False

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
            name: replace(offer, host=self._processes[offer.address].host)
            for name, offer in taken.items()
        }

    def _leave(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # the scheduler may be gone
            self.client.run_on_scheduler(reservations.leave, self.client.id)


class _Waiting:
    """How long nodes have been waited for, and for what; says so, and when it is of no use."""

    def __init__(self, nodes: int, patience: float, tell: Callable[[str], None]) -> None:
        self._nodes = nodes
        self._patience = patience
        self._tell = tell
        self._began = self._enough = time.monotonic()
        self._told = -math.inf

    def of_use(self, enough: bool, missing: int) -> bool:
        """Whether to wait on; False: there have been too few Dask workers for too long.

        Raises
        ------
        CapacityError
            There are enough, but others have had them for too long.
        """
        now = time.monotonic()
        if not enough:
            return now - self._enough <= JOIN_SECONDS
        self._enough = now
        short = f"{missing} of {self._nodes} nodes that other trials have, or wait for"
        if now - self._began > self._patience:
            raise CapacityError(
                f"after {self._patience:g} s of waiting there are still {short}; start more Dask "
                "workers, run less at a time, or have cluster.patience longer"
            )
        if now - self._told > TELL_SECONDS:
            self._told = now
            self._tell(f"waiting for {short}, {now - self._began:.0f} s")
        return True


def connected(address: str | None, security: Security | None) -> Client:
    """Return a client of a Dask scheduler that is there.

    Parameters
    ----------
    address
        That of the scheduler; None: the one that Dask is configured with.
    security
        Certificates; None: what Dask's own configuration says.

    Raises
    ------
    CapacityError
        No scheduler answers.
    ConfigurationError
        There is no address, or it and the certificates do not go together.
    """
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


def _not_filled(error: Exception) -> None:
    logger.warning("a place could not be given to another Dask worker: %s", error)
