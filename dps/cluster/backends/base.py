"""The interface of all kinds of clusters: start nodes with names and roles, and break them.

A kind is a subclass of `Cluster` that passes `tests/contracts/test_clusters.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self

import psutil

from dps.cluster.backends.processes import State, holds, process_of, state_of
from dps.cluster.names import NodeSpec
from dps.cluster.transport.memory import machine
from dps.errors import ConfigurationError

if TYPE_CHECKING:
    import distributed

    from dps.cluster.backends.assignment import NodeAssignment

# Acts of a fault on the process of a node; disturbed messages are not among them.
Act = Literal["kill", "requeue", "host", "pause", "limit"]

ANSWER_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Process:
    """The process of a node."""

    pid: int
    own: psutil.Process | None  # None if this process cannot send it signals
    address: str = ""  # its Dask address, or "" if unknown
    host: str = ""
    machine: str = ""  # the same for all processes of a machine


class Cluster(ABC):
    """Nodes with roles on Dask; used as a context manager.

    Nodes are known by their names, such as "server-0". Methods that take a name raise `KeyError` if
    no such node was started, and those that signal a process raise `ProcessLookupError` if it has
    ended. `start`, and the methods that break nodes, may be called from another thread than the one
    that uses `client`.
    """

    # Why requeueing a job or taking a host away is impossible; None if it is possible.
    NO_QUEUE: str | None = (
        "only nodes that are Slurm jobs can be requeued or lose their host; plan a kill by signal"
    )
    client: distributed.Client
    dashboard: str | None = None  # the address of Dask's dashboard, if there is one
    seats: NodeAssignment | None = None  # None: Dask's own names and resources define the nodes
    notes: tuple[str, ...] = ()  # sentences for the user of an experiment on this cluster

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()  # what `close` undoes
        self._specs: dict[str, NodeSpec] = {}
        self._processes: dict[str, Process] = {}
        self._lost: set[str] = set()  # the nodes that the scheduler has lost
        self._lock = threading.RLock()

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each node that was started, on its own host."""
        with self._lock:
            return {name: process.pid for name, process in self._processes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End what was started, and leave the rest as it was."""
        self._stack.close()

    def spec(self, name: str) -> NodeSpec:
        """Return what a node was started as."""
        return self._specs[name]

    @abstractmethod
    def start(self, node: NodeSpec) -> None:
        """Start one more node; raises `ConfigurationError` if one of this name runs already."""

    def kill(self, name: str) -> int:
        """Kill a node's process, so that it can do nothing any more; return its pid."""
        return self._signal(name, signal.SIGKILL)

    def requeue(self, name: str) -> int:
        """Requeue a node's job; return the pid of the process that this ends.

        Slurm restarts the job as the node `dps.core.names.replacement(name)`.
        `ConfigurationError`: the nodes of this cluster are not jobs of Slurm.
        """
        raise ConfigurationError(self.NO_QUEUE)

    def take_host(self, name: str) -> int:
        """Take the host of a node away, with all nodes on it; return the node's pid.

        It is given back when a node replaces one that was on it, and when the cluster closes.
        `ConfigurationError`: as for `requeue`.
        """
        raise ConfigurationError(self.NO_QUEUE)

    def on_host_of(self, name: str) -> tuple[str, ...]:
        """Return the nodes that `take_host` would kill."""
        return (name,)

    def account(self, name: str) -> str:
        """Return what the queueing system reports of a node that was killed; "" without one."""
        return ""

    def pause(self, name: str) -> int:
        """Stop a node's process with SIGSTOP; return its pid."""
        return self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> int:
        """Resume a node's process with SIGCONT; return its pid."""
        return self._signal(name, signal.SIGCONT)

    def gone(self, name: str, deadline: float) -> bool:
        """Whether a node's process ends within `deadline` seconds."""
        return holds(lambda: self._state(name) == "gone", deadline)

    def stopped(self, name: str, deadline: float) -> bool:
        """Whether a node's process is stopped within `deadline` seconds; false on another host."""
        return holds(lambda: self._state(name) == "stopped", deadline)

    def running(self, name: str, deadline: float) -> bool:
        """Whether a node's process runs, and is not stopped, within `deadline` seconds."""
        return holds(lambda: self._state(name) == "running", deadline)

    def obstacle(self, name: str, act: Act) -> str | None:
        """Return why something cannot be done to a node's process; None if it can."""
        if act in ("requeue", "host"):
            return self.NO_QUEUE
        process = self._processes[name]
        if process.own is not None or act == "kill":
            return None
        return (
            f"cannot stop, slow down or limit {name} (process {process.pid} on host "
            f"{process.host}) from this host; run dps there as the same user, or plan a kill, "
            "cut or delay"
        )

    def _state(self, name: str) -> State:
        """Return the state of a process: from the system, or whether the scheduler has lost it."""
        if (own := self._processes[name].own) is not None:
            return state_of(own)
        return "gone" if name in self._lost else "running"

    @contextlib.contextmanager
    def _claimed(self, node: NodeSpec) -> Iterator[None]:
        """Register a node while it is started; forget it if that fails. Refuse a name in use."""
        name = node.name
        with self._lock:
            if name in self._specs and not (name in self._processes and self.gone(name, 0.0)):
                raise ConfigurationError(f"a node named {name!r} already exists")
            self._processes.pop(name, None)
            self._lost.discard(name)
            self._specs[name] = node
        try:
            yield
        except BaseException:
            del self._specs[name]
            raise

    def _living(self, name: str) -> Process:
        process = self._processes[name]
        if self.gone(name, 0.0):
            raise ProcessLookupError(f"process {process.pid} of {name} has already ended")
        return process

    def _signal(self, name: str, number: int) -> int:
        process = self._living(name)
        if process.own is None:
            raise ConfigurationError(self.obstacle(name, "pause"))
        try:
            process.own.send_signal(number)
        except psutil.NoSuchProcess as error:
            raise ProcessLookupError(f"the process of {name} has already ended") from error
        return process.pid

    def _forget(self, address: str) -> None:
        with self._lock:
            self._lost |= {n for n, p in self._processes.items() if p.address == address}


async def look_at(client: distributed.Client, address: str) -> Process | None:
    """Return the process of a Dask worker; None if the worker is lost by then.

    `ConfigurationError`: dps is not installed there, or in another version. `TimeoutError`: the
    worker does not answer.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        answers = await client.run(_describe, workers=[address], on_error="return")
    answer = answers.get(address)
    lost = answer is None or isinstance(answer, OSError)
    return None if lost else _process(answer, address, "worker")


def check_scheduler(client: distributed.Client) -> None:
    """Refuse a scheduler that cannot run the coordinator; raises `ConfigurationError`."""
    try:
        answer: Any = client.run_on_scheduler(_describe)
    except Exception as error:  # noqa: BLE001 - any error is reported
        answer = error
    _process(answer, client.scheduler.address, "scheduler")


def _process(answer: Any, address: str, kind: str) -> Process:
    where = f"Dask {kind} at {address}"
    advice = "install the same versions of dps and of its requirements on both sides"
    if isinstance(answer, Exception):
        raise ConfigurationError(f"dps cannot run on the {where}: {answer!r}; {advice}")
    version, pid, uid, host, boot, namespace = answer
    own, _, our_uid, _, our_boot, our_namespace = _describe()
    if version != own:
        raise ConfigurationError(f"the {where} has dps {version}, expected {own}; {advice}")
    here = (boot, namespace) == (our_boot, our_namespace) and our_uid in (0, uid)
    return Process(pid, process_of(pid) if here else None, address, host, boot or host)


def _describe() -> tuple[str, int, int, str, str, str]:
    host, boot = socket.gethostname(), machine()
    namespace = os.readlink("/proc/self/ns/pid") if boot else host
    version = import_module("dps").__version__  # which imports modules of this layer
    return version, os.getpid(), os.geteuid(), host, boot, namespace
