"""Nodes whose processes somebody else has started, perhaps on other machines.

What is done to a process of this machine is done by signals, and seen in what the system says of
it. Of one on another machine only its loss is known, by the scheduler.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import distributed
import psutil

from dps.cluster.backends.base import Act, Cluster
from dps.cluster.backends.processes import is_gone, is_running, is_stopped, process_of, send
from dps.cluster.names import NodeSpec
from dps.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Placed:
    """A node, and which Dask worker it is or was."""

    spec: NodeSpec
    address: str
    process: Process


class RemoteNodes(Cluster):
    """The part of a cluster (`dps.cluster.backends.base`) that looks after its nodes' processes."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[str, Placed] = {}
        self._lost: set[str] = set()
        self._lock = threading.RLock()

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each node that there has been, on its own host."""
        with self._lock:
            return {name: node.process.pid for name, node in self._nodes.items()}

    def spec(self, name: str) -> NodeSpec:
        """What the node of this name was asked for as."""
        return self._nodes[name].spec

    def gone(self, name: str, deadline: float) -> bool:
        """Whether a node's process ends in time; of another host, the scheduler tells."""
        process = self._nodes[name].process
        if process.here:
            return is_gone(process.own, deadline)
        return _holds(lambda: name in self._lost, deadline)

    def stopped(self, name: str, deadline: float) -> bool:
        """Whether a node's process is stopped in time; one of another host never is."""
        process = self._nodes[name].process
        return process.here and is_stopped(process.own, deadline)

    def running(self, name: str, deadline: float) -> bool:
        """Whether a node's process is there and not stopped in time."""
        process = self._nodes[name].process
        return is_running(process.own, deadline) if process.here else name not in self._lost

    def obstacle(self, name: str, act: Act) -> str | None:
        """Why something cannot be done to a node's process; None: it can."""
        if act in ("requeue", "host"):
            return self.NO_QUEUE
        process = self._nodes[name].process
        if process.here or act == "kill":
            return None
        return (
            f"{name} is process {process.pid} on host {process.host}, which cannot be stopped, "
            "slowed down or limited from here; run dps on that host and as the same user, or "
            "plan a kill, cut or delay"
        )

    def living(self, name: str) -> Placed:
        """Return a node; raises `ProcessLookupError` if its process is gone."""
        node = self._nodes[name]
        if self.gone(name, 0.0):
            raise ProcessLookupError(f"process {node.process.pid} of {name} is gone already")
        return node

    def _signal(self, name: str, number: int) -> int:
        """Send a signal to a node's process, which must be one of this machine."""
        process = self.living(name).process
        obstacle = self.obstacle(name, "pause")
        if obstacle is not None:
            raise ConfigurationError(obstacle)
        return send(process.own, name, number)


def _holds(condition: Callable[[], bool], deadline: float) -> bool:
    until = time.monotonic() + deadline
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


ANSWER_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Process:
    """Where a process runs: `host` as people call it, `machine` as it is known for sure.

    `own` is the process itself if signals of this process reach it.
    """

    pid: int
    host: str
    machine: str
    own: psutil.Process | None

    @property
    def here(self) -> bool:
        """Whether signals of this process reach it."""
        return self.own is not None


async def look_at(client: distributed.Client, addresses: Sequence[str]) -> dict[str, Process]:
    """Find out where Dask workers run; those that are lost meanwhile are left out.

    Raises
    ------
    ConfigurationError
        dps is not installed there, or another version is.
    TimeoutError
        Some do not answer.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        answers = await client.run(_what_runs_there(), workers=list(addresses), on_error="return")
    return {
        address: _process(answer, f"Dask worker at {address}")
        for address, answer in answers.items()
        if not isinstance(answer, OSError)
    }


def check_scheduler(client: distributed.Client) -> None:
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
    return Process(pid, host, boot or host, process_of(pid) if here else None)


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
