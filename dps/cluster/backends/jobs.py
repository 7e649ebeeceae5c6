"""A cluster of jobs: a Dask scheduler on this machine, and for each node a job of its own.

Jobs are submitted to a queueing system (`dps.cluster.backends.jobqueue`) and may wait there. When
the Dask scheduler ends, so does every node, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.security import Security

from dps.cluster.backends.assignment import failing_together
from dps.cluster.backends.jobqueue import (
    JobGroup,
    Queue,
    address_on,
    interface_of,
    job_of,
    shared_folder,
)
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.remote import Placed, RemoteNodes, check_scheduler, look_at
from dps.cluster.names import NodeSpec, Offer
from dps.errors import CapacityError, ConfigurationError
from dps.protocol.tasks import Tasks

logger = logging.getLogger(__name__)

COMMAND_SECONDS = 30.0
LOOK_SECONDS = 0.05
TELL_SECONDS = 10.0


class JobCluster(RemoteNodes):
    """Nodes as jobs of a queueing system.

    Parameters
    ----------
    queue
        The queueing system.
    groups
        What the jobs of each role ask for, by its Dask resource.
    nodes
        The nodes to submit jobs for.
    interface
        The network interface of the scheduler and of the nodes; None: as `jobqueue.yaml` says, else
        the one that reaches other machines.
    security
        The certificates of all processes, as for `LocalCluster`. If they are not in files yet, they
        are kept in a folder that all machines see: `shared-temp-directory` in `jobqueue.yaml`, else
        the working directory.
    patience
        For how many seconds jobs may wait in the queue.
    tell
        Is told when jobs are waited for.

    Attributes
    ----------
    client
        A Dask client that is connected to the scheduler.
    seats
        None: nodes have the names and resources that Dask knows.
    notes
        What should be known about where the nodes are.

    Raises
    ------
    ConfigurationError
        dask-jobqueue is not installed, or a job is refused.
    CapacityError
        Jobs were not started in time.
    """

    def __init__(
        self,
        queue: Queue,
        groups: Mapping[str, JobGroup],
        nodes: Sequence[NodeSpec],
        interface: str | None,
        security: Security | None,
        patience: float,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._queue = queue
        self._groups = groups
        self._interface = interface or interface_of(queue)
        self._jobs: dict[str, Any] = {}
        self._submitted: list[Any] = []
        self._handing_in: set[asyncio.Future[None]] = set()
        self._unusable: list[str] = []
        self._specs: dict[str, NodeSpec] = {}
        self._welcoming = Tasks(self._not_welcomed)
        host = address_on(self._interface)
        with contextlib.ExitStack() as stack:
            self._head = stack.enter_context(
                LocalCluster(
                    [],
                    ("dps.cluster.driver.parameter_server",),
                    host=host,
                    security=security or "off",
                    tell=lambda line: tell(f"warning: {line}"),
                    scratch=shared_folder(queue) if security is not None else None,
                )
            )
            self.client = self._head.client
            check_scheduler(self.client)
            stack.callback(self._cancel)
            self.client.subscribe_topic("all", self._note)
            # Before the jobs end: the scheduler would complain that nobody hears of their loss.
            stack.callback(self.client.unsubscribe_topic, "all")
            for node in nodes:
                self.start(node)
            self._wait(patience, tell)
            self._stack = stack.pop_all()
        self.notes = tuple(failing_together(self._offers()))

    def spec(self, name: str) -> NodeSpec:
        """What the node of this name was submitted as."""
        return self._specs[name]

    def start(self, node: NodeSpec) -> None:
        """Submit a job for one more node; it joins when the job has started.

        Raises
        ------
        ConfigurationError
            There is a node of this name, or the job is refused.
        """
        with self._lock:
            if node.name in self._specs and node.name not in self._lost:
                raise ConfigurationError(f"there is a node named {node.name!r} already")
            self._lost.discard(node.name)
            self._specs[node.name] = node
        self._submit(node, self._groups[node.resource])

    def _submit(self, node: NodeSpec, group: JobGroup) -> None:
        head = self._head
        job = job_of(self._queue, group, node, head.address, self._interface, head.security)
        self._submitted.append(job)
        try:
            self.client.sync(self._hand_in, job)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"the job of {node.name} could not be submitted: {error}"
            ) from error
        self._jobs[node.name] = job

    async def _hand_in(self, job: Any) -> None:
        # Whoever is interrupted must not lose the number of a job that is submitted all the same.
        task = asyncio.ensure_future(job.start())
        self._handing_in.add(task)
        task.add_done_callback(self._handing_in.discard)
        await asyncio.shield(task)

    def kill(self, name: str) -> int:
        """Have the queueing system send SIGKILL to all processes of a node's job."""
        node = self.living(name)
        try:
            _call([*self._queue.kill, self._jobs[name].job_id])
        except (OSError, subprocess.SubprocessError) as error:
            self.living(name)  # if it has ended meanwhile, that is why
            told = getattr(error, "stderr", None) or error
            raise ConfigurationError(f"the job of {name} could not be killed: {told}") from error
        return node.process.pid

    # -- jobs that wait, start and end -----------------------------------------------------------

    def _wait(self, patience: float, tell: Callable[[str], None]) -> None:
        began = told = time.monotonic()
        while waiting := sorted(self._waiting()):
            if self._unusable:
                raise ConfigurationError(self._unusable[0])
            now = time.monotonic()
            if now - began > patience:
                jobs = ", ".join(f"{name} (job {self._jobs[name].job_id})" for name in waiting)
                raise CapacityError(
                    f"after {patience:g} s these jobs have not started, or could not reach the "
                    f"scheduler at {self._head.address}: {jobs}. Look at the queue and at their "
                    "logs, ask for less, or have cluster.patience longer."
                )
            if now - told > TELL_SECONDS:
                told = now
                tell(f"waiting for {len(waiting)} of {len(self._specs)} jobs, {now - began:.0f} s")
            time.sleep(LOOK_SECONDS)

    def _waiting(self) -> set[str]:
        """The nodes that have not joined yet."""
        return self._specs.keys() - self.pids.keys()

    def _note(self, event: tuple[float, Any]) -> None:
        """Take note of what the scheduler says: a node has joined, or is lost."""
        match event[1]:
            case {"action": "remove-worker", "worker": str(address)}:
                with self._lock:
                    self._lost |= {n for n, node in self._nodes.items() if node.address == address}
            case {"action": "add-worker", "worker": str(address)}:
                self._welcoming.start(self._welcome(address))

    async def _welcome(self, address: str) -> None:
        while (known := (await self._present()).get(address)) is not None:
            if await self._join(str(known["name"]), address):
                return

    def _not_welcomed(self, error: Exception) -> None:
        if isinstance(error, OSError):
            logger.warning("the scheduler cannot be asked who has joined: %s", error)
        else:
            self._unusable.append(f"a job has started, and cannot become a node: {error}")
            logger.warning("%s", self._unusable[-1])

    async def _present(self) -> dict[str, Any]:
        present: dict[str, Any] = (await self.client.scheduler.identity(n_workers=-1))["workers"]
        return present

    async def _join(self, name: str, address: str) -> bool:
        """Take a node in that has joined; return whether it has answered."""
        try:
            found = await look_at(self.client, [address])
        except TimeoutError:
            logger.info("%s has started at %s, and does not answer yet", name, address)
            return False
        if name in self._specs and address in found:
            with self._lock:
                self._lost.discard(name)
                self._nodes[name] = Placed(self._specs[name], address, found[address])
        return True

    def _offers(self) -> dict[str, Offer]:
        return {
            name: Offer(node.address, name, self._host_of(name), 1, None)
            for name, node in self._nodes.items()
        }

    def _host_of(self, name: str) -> str:
        """The host of a node that has joined."""
        return self._nodes[name].process.host

    def _cancel(self) -> None:
        """Cancel all jobs by one command, however many there are: there may not be much time."""
        with contextlib.suppress(OSError, TimeoutError):  # the scheduler may be gone
            self.client.sync(self._settle)
        numbers = [job.job_id for job in self._submitted if job.job_id is not None]
        if not numbers:
            return
        try:
            _call([*shlex.split(self._submitted[0].cancel_command), *numbers])
        except (OSError, subprocess.SubprocessError) as error:
            # Most queueing systems complain of jobs that have ended, and cancel the others.
            logger.info("jobs were cancelled: %s", getattr(error, "stderr", None) or error)

    async def _settle(self) -> None:
        """Wait for jobs that are being submitted."""
        await asyncio.gather(*self._handing_in, return_exceptions=True)


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_SECONDS)
