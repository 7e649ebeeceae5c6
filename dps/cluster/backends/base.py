"""What every kind of cluster can do: nodes with names and roles are started, and broken.

What an experiment needs of a cluster is said here and nowhere else: a new kind is one more class
with these methods, and passes `tests/contracts/test_clusters.py`.
"""

from __future__ import annotations

import contextlib
import signal
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, Self

from dps.errors import ConfigurationError

if TYPE_CHECKING:
    import distributed

    from dps.cluster.backends.assignment import NodeAssignment
    from dps.cluster.names import NodeSpec

# What is done to the process of a node, besides sending it messages.
Act = Literal["kill", "requeue", "host", "pause", "limit"]


class Cluster(ABC):
    """Nodes with roles on Dask, whoever runs them; used as a context manager.

    Nodes are known by their names: "server-0" and the like. Each method that takes one raises
    `KeyError` if no node of this name was started, and those that signal a process raise
    `ProcessLookupError` if it is gone already. `start`, and what breaks nodes, may be called from
    another thread than the one that uses `client`. What only a queueing system can do is refused
    unless a kind of cluster says otherwise.

    Attributes
    ----------
    client
        A Dask client that is connected to the cluster.
    dashboard
        The address of Dask's dashboard; None: there is none.
    seats
        Which Dask worker is which node; None: Dask's own names and resources tell.
    notes
        What who runs an experiment here should know, in sentences.
    NO_QUEUE
        Why no job can be requeued and no host taken away.
    """

    NO_QUEUE = (
        "to requeue a job or take a host away, nodes must be jobs of Slurm, which these are not; "
        "plan a kill by signal"
    )
    client: distributed.Client
    dashboard: str | None = None
    seats: NodeAssignment | None = None
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()  # what is to be undone in the end

    @property
    @abstractmethod
    def pids(self) -> dict[str, int]:
        """Process id of each node that was started, on its own host."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @abstractmethod
    def spec(self, name: str) -> NodeSpec:
        """What the node of this name was started as."""

    @abstractmethod
    def start(self, node: NodeSpec) -> None:
        """Have one more node; it joins when it is up. `ConfigurationError`: its name is taken."""

    @abstractmethod
    def kill(self, name: str) -> int:
        """Kill a node's process, so that it can do nothing any more; return its pid."""

    def requeue(self, name: str) -> int:
        """End a node's job, which is queued again and becomes the next node in its place.

        That node comes by itself, and is named `dps.core.names.replacement(name)`. Returns the pid
        of the process that ends. `ConfigurationError`: it cannot be done.
        """
        raise ConfigurationError(self.NO_QUEUE)

    def take_host(self, name: str) -> int:
        """Take the host of a node away, with all nodes on it, if that was not done; return its pid.

        It is given back when a node starts in the place of one that was on it, and in any case in
        the end. `ConfigurationError`: it cannot be done.
        """
        raise ConfigurationError(self.NO_QUEUE)

    def on_host_of(self, name: str) -> tuple[str, ...]:
        """The nodes that `take_host` would kill."""
        return (name,)

    def account(self, name: str) -> str:
        """What the queueing system says of a node that was killed; "" where there is none."""
        return ""

    def pause(self, name: str) -> int:
        """Stop a node's process with SIGSTOP; return its pid."""
        return self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> int:
        """Let a node's process go on with SIGCONT; return its pid."""
        return self._signal(name, signal.SIGCONT)

    @abstractmethod
    def gone(self, name: str, deadline: float) -> bool:
        """Whether a node's process ends within `deadline` seconds."""

    @abstractmethod
    def stopped(self, name: str, deadline: float) -> bool:
        """Whether a node's process is stopped within `deadline` seconds."""

    @abstractmethod
    def running(self, name: str, deadline: float) -> bool:
        """Whether a node's process is there and not stopped within `deadline` seconds."""

    @abstractmethod
    def obstacle(self, name: str, act: Act) -> str | None:
        """Why something cannot be done to a node's process; None: it can."""

    def close(self) -> None:
        """End what was started, and leave the rest as it was."""
        self._stack.close()

    @abstractmethod
    def _signal(self, name: str, number: int) -> int:
        """Send a signal to a node's process; return its pid."""
