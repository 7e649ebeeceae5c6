"""A cluster of virtual nodes, which can be broken as any other: see `dps.cluster.backends.base`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from dps.cluster.backends.base import Act, Cluster
from dps.cluster.names import NodeSpec
from dps.sim.process import Process

if TYPE_CHECKING:
    from dps.virtual.client import VirtualClient


class VirtualNodes(Cluster):
    """The nodes of a virtual client. What is done to one has its effect at once."""

    NO_QUEUE = (
        "to requeue a job or take a host away, nodes must be jobs of Slurm, which nodes on virtual "
        "time are not; plan a kill by signal"
    )

    def __init__(self, client: VirtualClient) -> None:
        super().__init__()
        self._stack.callback(client.close)
        self._virtual = client
        dask: Any = client  # it has what dps uses of one
        self.client = dask

    @property
    def pids(self) -> dict[str, int]:
        """A number for each node that was started."""
        return {name: node.dps_platform.pid for name, node in self._virtual.started.items()}

    def spec(self, name: str) -> NodeSpec:
        """What the node of this name was started as."""
        return self._virtual.node(name).spec

    def start(self, node: NodeSpec) -> None:
        """Have one more node; it joins when it is up."""
        self._virtual.start(node)

    def kill(self, name: str) -> int:
        """Kill a node's process; return its number."""
        self._virtual.kill(name)
        return self.pids[name]

    def gone(self, name: str, deadline: float) -> bool:
        """Whether a node's process has ended."""
        return not self._process(name).alive

    def stopped(self, name: str, deadline: float) -> bool:
        """Whether a node's process is stopped."""
        return self._process(name).paused_at is not None

    def running(self, name: str, deadline: float) -> bool:
        """Whether a node's process is there and not stopped."""
        process = self._process(name)
        return process.alive and process.paused_at is None

    def cpu_seconds(self, name: str) -> float:
        """Nothing: what this computer uses says nothing of those that are simulated."""
        return 0.0

    def obstacle(self, name: str, act: Act) -> str | None:
        """Why something cannot be done to a node's process; None: it can."""
        if act == "limit":
            return f"{name} is a node on virtual time, whose disk is in memory and never full"
        return self.NO_QUEUE if act in ("requeue", "host") else None

    def _process(self, name: str) -> Process:
        return self._virtual.node(name).process

    def _signal(self, name: str, number: int) -> int:
        process = self._process(name)
        if not process.alive:
            raise ProcessLookupError(f"{name}: there is no such process")
        if number == signal.SIGSTOP:
            self._virtual.network.pause(process)
        else:
            self._virtual.network.resume(process)
        return self.pids[name]
