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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Client, Scheduler

from dps.cluster.kinds import Act
from dps.cluster.local import DASK_SETTINGS, NodeSpec, is_gone, is_running, is_stopped
from dps.cluster.roles import resource_in
from dps.cluster.seats import Offer, Seats, best, eligible, failing_together, seated
from dps.errors import CapacityError, ConfigurationError, DpsError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
JOIN_SECONDS = 20.0
ANSWER_SECONDS = 15.0
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """Where a Dask worker runs, by its own account; `here` tells whether signals reach it."""

    pid: int
    host: str
    machine: str
    here: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """A node, and which Dask worker it is or was."""

    spec: NodeSpec
    address: str
    process: Process


class ExistingCluster:
    """Nodes on a Dask deployment that is there already.

    Parameters
    ----------
    address
        That of the Dask scheduler; None: Dask's own configuration names it (`scheduler-address`).
    nodes
        The nodes that are needed. They are Dask workers with the Dask resource of their role, if
        any worker has one; else dps chooses, with replicas on different hosts where it can.

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
        dps is not installed there, or another version is.

    Notes
    -----
    While it is open, the scheduler does not start tasks of lost workers again by itself
    (`allowed-failures`). Nodes of one deployment must not be used by two clusters at a time.
    """

    def __init__(self, address: str | None, nodes: Sequence[NodeSpec]) -> None:
        self.seats = Seats()
        self._offers: dict[str, Offer] = {}
        self._processes: dict[str, Process] = {}
        self._nodes: dict[str, Placed] = {}
        self._lost: set[str] = set()
        self._open: list[NodeSpec] = []
        self._welcoming: set[asyncio.Task[None]] = set()
        self._lock = threading.RLock()
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            stack.enter_context(dask.config.set(DASK_SETTINGS))
            self.client = stack.enter_context(_connected(address))
            _must_have_dps(self.client)
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

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each node that there has been, on its own host."""
        with self._lock:
            return {name: node.process.pid for name, node in self._nodes.items()}

    def spec(self, name: str) -> NodeSpec:
        """What the node of this name was asked for as."""
        return self._nodes[name].spec

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
        node = self._living(name)
        if node.process.here:
            os.kill(node.process.pid, signal.SIGKILL)
        else:
            self.client.run(_end_at_once, workers=[node.address], wait=False)
        return node.process.pid

    def pause(self, name: str) -> int:
        """Send SIGSTOP to a node's process, which must be one of this machine."""
        return self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> int:
        """Send SIGCONT to a node's process, which must be one of this machine."""
        return self._signal(name, signal.SIGCONT)

    def gone(self, name: str, deadline: float) -> bool:
        """Whether a node's process ends in time; of another host, the scheduler tells."""
        process = self._nodes[name].process
        if process.here:
            return is_gone(process.pid, deadline)
        return _holds(lambda: name in self._lost, deadline)

    def stopped(self, name: str, deadline: float) -> bool:
        """Whether a node's process is stopped in time; one of another host never is."""
        process = self._nodes[name].process
        return process.here and is_stopped(process.pid, deadline)

    def running(self, name: str, deadline: float) -> bool:
        """Whether a node's process is there and not stopped in time."""
        process = self._nodes[name].process
        return is_running(process.pid, deadline) if process.here else name not in self._lost

    def obstacle(self, name: str, act: Act) -> str | None:
        """Why something cannot be done to a node's process; None: it can."""
        process = self._nodes[name].process
        if process.here or act == "kill":
            return None
        return (
            f"{name} is process {process.pid} on host {process.host}, which cannot be stopped, "
            "slowed down or limited from here; run dps on that host and as the same user, or "
            "plan a kill, cut or delay"
        )

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
        async with asyncio.timeout(ANSWER_SECONDS):
            found = await self.client.run(_what_runs_there(), workers=new, on_error="return")
        for address, answer in found.items():
            if isinstance(answer, OSError):  # it is lost already
                continue
            process = _process(answer, f"Dask worker at {address}")
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

    # -- what is done to processes ---------------------------------------------------------------

    def _living(self, name: str) -> Placed:
        node = self._nodes[name]
        if self.gone(name, 0.0):
            raise ProcessLookupError(f"process {node.process.pid} of {name} is gone already")
        return node

    def _signal(self, name: str, number: int) -> int:
        pid = self._living(name).process.pid
        obstacle = self.obstacle(name, "pause")
        if obstacle is not None:
            raise ConfigurationError(obstacle)
        os.kill(pid, number)
        return pid

    def _put_back(self, allowed_failures: int) -> None:
        with contextlib.suppress(OSError, TimeoutError):  # the scheduler may be gone
            self.client.run_on_scheduler(_allow_failures, allowed_failures)


def _connected(address: str | None) -> Client:
    wanted = address or dask.config.get("scheduler-address", None)
    if wanted is None:
        raise ConfigurationError(
            "no address of a Dask scheduler: give cluster.address, as in tcp://10.0.0.1:8786, or "
            "set DASK_SCHEDULER_ADDRESS"
        )
    try:
        return Client(wanted, set_as_default=False, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError, ValueError) as error:
        raise CapacityError(
            f"no Dask scheduler answers at {wanted} ({error}); start one with `dask scheduler`, "
            "or correct the address"
        ) from error


def _must_have_dps(client: Client) -> None:
    """Refuse a scheduler that cannot run the coordinator; raises `ConfigurationError`."""
    try:
        answer: Any = client.run_on_scheduler(_what_runs_there())
    except Exception as error:  # noqa: BLE001 - whatever was raised there is told
        answer = error
    _process(answer, f"Dask scheduler at {client.scheduler.address}")


def _process(answer: Any, where: str) -> Process:
    """What a process has said about itself; raises `ConfigurationError` if dps cannot use it."""
    advice = "install the same version of dps and of its requirements there as here"
    if isinstance(answer, Exception):
        raise ConfigurationError(f"dps cannot run on the {where}: {answer!r}; {advice}")
    version, pid, uid, host, boot, namespace = answer
    ours, _, our_uid, _, our_boot, our_namespace = _what_runs_there()()
    if version != ours:
        raise ConfigurationError(f"the {where} has dps {version}, and here is {ours}; {advice}")
    here = (boot, namespace) == (our_boot, our_namespace) and our_uid in (0, uid)
    return Process(pid, host, boot or host, here)


def _holds(condition: Callable[[], bool], deadline: float) -> bool:
    until = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


# -- what runs in the processes of the deployment ------------------------------------------------


def _what_runs_there() -> Callable[[], tuple[str, int, int, str, str, str]]:
    """A function that tells which dps there is in a process, and on which machine it runs.

    It goes there as a whole, for a function of a module that is missing there could not say so.
    """

    def tell() -> tuple[str, int, int, str, str, str]:
        import importlib
        import os
        import socket
        from pathlib import Path

        version = importlib.import_module("dps").__version__
        boot = Path("/proc/sys/kernel/random/boot_id")
        return (
            version,
            os.getpid(),
            os.geteuid(),
            socket.gethostname(),
            boot.read_text().strip() if boot.exists() else "",
            os.readlink("/proc/self/ns/pid") if boot.exists() else socket.gethostname(),
        )

    return tell


async def _end_at_once() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _allow_failures(number: int, dask_scheduler: Scheduler) -> int:
    """Say how often a task may lose its worker and is started again; return what it was."""
    before: int = dask_scheduler.allowed_failures
    dask_scheduler.allowed_failures = number
    return before
