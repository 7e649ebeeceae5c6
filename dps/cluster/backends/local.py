"""A cluster of processes on this machine, each node with a name and a role.

Nodes are forked from one server process that has imported what they need, so a fresh node is up in
a fraction of a second. There are no nannies: a process that dies stays dead until it is replaced.
Everything listens on loopback only, and with TLS unless that is switched off, for loopback keeps no
other user of the machine out. Every process ends when the driver does, however it ends: the
scheduler's process sees to it that paused nodes end as well, and that no files are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from importlib.util import find_spec
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import dask
import psutil
from distributed import Client
from distributed.security import Security

from dps.cluster.backends.base import Act, Cluster
from dps.cluster.backends.fork_server import fork_context
from dps.cluster.backends.processes import (
    end_with_parent,
    is_gone,
    is_running,
    is_stopped,
    process_of,
    scratch_prefix,
    send,
)
from dps.cluster.backends.tls import (
    DASHBOARD,
    LOOPBACK,
    SchedulerOfMembers,
    WorkerOfMembers,
    dashboard_settings,
    kept_in,
    or_temporary,
    remove_keys,
)
from dps.cluster.names import NodeSpec
from dps.errors import CapacityError, ConfigurationError, SchedulerLost

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
STOP_SECONDS = 5.0
LOOK_SECONDS = 0.1
MOMENT_SECONDS = 0.5  # until the end of a process shows whose connections broke

DASK_SETTINGS = {
    # The attempt after a loss must not stall for the default 30 s.
    "distributed.comm.timeouts.connect": "2s",
    "distributed.comm.retry.count": 0,
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.allowed-failures": 0,
    "distributed.worker.profile.enabled": False,
    # Logs for Dask's developers: each connection would keep its last 1,000 messages.
    "distributed.admin.low-level-log-length": 50,
    "distributed.admin.system-monitor.gil.enabled": False,
}


class LocalCluster(Cluster):
    """A Dask scheduler and nodes with roles, each in a process of its own, on this machine.

    Parameters
    ----------
    nodes
        The nodes to start.
    preload
        Modules that nodes need, to be imported once for all of them.
    dashboard
        Whether to serve Dask's dashboard, if bokeh is installed, which it is made with.
    host
        The address of this machine on which the scheduler listens.
    security
        The certificates of all processes; who has none of them is refused (see
        `dps.cluster.backends.tls`). None: those of Dask's own configuration if it requires
        encryption, else temporary ones of this cluster's own. "off": what Dask's own configuration
        says, which is no TLS unless it requires encryption; whoever reaches a port, as every user
        of this machine does, can then run code as you.
    scratch
        The folder in which the cluster makes its own, for files that go with it, such as
        certificates; None: the system's for temporary files.
    tell
        Is told if the cluster has no TLS; by default it is a warning of Python's.

    Attributes
    ----------
    client
        A Dask client that is connected to the cluster.
    dashboard
        The address of Dask's dashboard; None: there is none.
    security
        What its processes know each other by, with every certificate in a file.
    seats, notes
        None, and none: nodes have the names and resources that Dask knows
        (`dps.cluster.backends.base`).

    Raises
    ------
    CapacityError
        The scheduler or the nodes did not start in time.
    SchedulerLost
        The scheduler's process ended before the nodes were up.

    Notes
    -----
    Use as a context manager; leaving it ends every process. Not thread-safe, but `kill`,
    `pause`, `resume` and `start` may be called from another thread than the one that uses `client`.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        preload: Sequence[str] = (),
        dashboard: bool = False,
        host: str = LOOPBACK,
        security: Security | Literal["off"] | None = None,
        scratch: str | None = None,
        tell: Callable[[str], None] = warnings.warn,
    ) -> None:
        super().__init__()
        known = or_temporary(security)
        if not known.require_encryption:
            tell(_open_to(host))
        self._context = fork_context(preload)
        self._processes: dict[str, ForkServerProcess] = {}
        self._pids: dict[str, int] = {}
        self._found: dict[str, psutil.Process | None] = {}
        self._specs: dict[str, NodeSpec] = {}
        self._starting = threading.Lock()
        with contextlib.ExitStack() as stack:
            self._scratch = stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix=scratch_prefix(os.getpid()), dir=scratch, ignore_cleanup_errors=True
                )
            )
            stack.callback(remove_keys, Path(self._scratch))  # that may be all that can be removed
            stack.callback(self._stop_processes)
            stack.enter_context(dask.config.set(DASK_SETTINGS))
            # Dask's own default for a scheduler would listen plainly even if that is forbidden.
            self.security = kept_in(Path(self._scratch), known)
            shown = dashboard and find_spec("bokeh") is not None
            with self._needing_the_scheduler():
                self.address, web = self._start_scheduler(shown, host)
                self.dashboard = web if shown else None
                for node in nodes:
                    self.start(node)
                self.client = self._connected()
                stack.callback(self._disconnect)
                if nodes:
                    self._wait_for(len(nodes))
            self._stack = stack.pop_all()

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each node that was started, and of the scheduler."""
        return dict(self._pids)

    def spec(self, name: str) -> NodeSpec:
        """What the node of this name was started as.

        Raises
        ------
        KeyError
            None was.
        """
        return self._specs[name]

    def start(self, node: NodeSpec) -> None:
        """Start one more node; it joins when it is up.

        Raises
        ------
        ConfigurationError
            A node of this name is running.
        """
        with self._starting:
            running = self._processes.get(node.name)
            if running is not None and running.is_alive():
                raise ConfigurationError(f"there is a node named {node.name!r} already")
            self._specs[node.name] = node
            arguments = (self.address, node, self._scratch, self.security)
            self._start_process(node.name, _run_in_group, (self.pids["scheduler"], arguments))

    def kill(self, name: str) -> int:
        """Send SIGKILL to a node's process; return its pid.

        Raises
        ------
        ProcessLookupError
            It is gone already.
        """
        return self._signal(name, signal.SIGKILL)

    def gone(self, name: str, deadline: float) -> bool:
        """Whether a node's process ends within `deadline` seconds."""
        return is_gone(self._found[name], deadline)

    def stopped(self, name: str, deadline: float) -> bool:
        """Whether a node's process is stopped by a signal within `deadline` seconds."""
        return is_stopped(self._found[name], deadline)

    def running(self, name: str, deadline: float) -> bool:
        """Whether a node's process is there and not stopped within `deadline` seconds."""
        return is_running(self._found[name], deadline)

    def obstacle(self, name: str, act: Act) -> str | None:
        """There is none to signals: the processes are all of this machine, and of this user."""
        return self.NO_QUEUE if act in ("requeue", "host") else None

    def _signal(self, name: str, number: int) -> int:
        return send(self._found[name], name, number)

    @contextlib.contextmanager
    def _needing_the_scheduler(self) -> Iterator[None]:
        """Say so if something fails meanwhile because the scheduler's process has ended."""
        try:
            yield
        except Exception as error:
            if "scheduler" in self._found and self.gone("scheduler", MOMENT_SECONDS):
                raise SchedulerLost(
                    "the process of Dask's scheduler ended while the nodes came up"
                ) from error
            raise

    def _connected(self) -> Client:
        """Connect to the scheduler, as long as it is there: Dask tries one that is gone as well."""
        connecting: Future[Client] = Future()

        def connect() -> None:
            try:
                connecting.set_result(
                    Client(
                        self.address,
                        security=self.security,
                        set_as_default=False,
                        timeout=START_SECONDS,
                    )
                )
            except BaseException as error:  # noqa: BLE001 (raised below)
                connecting.set_exception(error)

        threading.Thread(target=connect, daemon=True, name="dps-connect").start()
        while not wait([connecting], LOOK_SECONDS).done:
            if self.gone("scheduler", 0.0):
                raise ConnectionError(f"nobody listens at {self.address} any more")
        return connecting.result()

    def _disconnect(self) -> None:
        try:
            self.client.close()
        except Exception:
            # Dask raises what stopped its attempts to connect again, if the port went to others.
            if not self.gone("scheduler", MOMENT_SECONDS):
                raise
            logger.debug("the client of a scheduler that is gone was not closed", exc_info=True)

    def _start_scheduler(self, dashboard: bool, host: str) -> tuple[str, str]:
        receive, send = self._context.Pipe(duplex=False)
        arguments = (self._scratch, dashboard, host, self.security, send)
        self._start_process("scheduler", _run_and_clean_up, arguments)
        send.close()
        if not receive.poll(START_SECONDS):
            raise CapacityError(f"the Dask scheduler did not start within {START_SECONDS:g} s")
        address, web = receive.recv()
        return str(address), str(web)

    def _start_process(self, name: str, target: Any, arguments: tuple[Any, ...]) -> None:
        process = self._context.Process(target=target, args=arguments, name=f"dps-{name}")
        process.start()
        self._forget_ended()
        self._processes[name] = process
        self._pids[name] = process.pid or 0
        self._found[name] = process_of(self._pids[name])

    def _forget_ended(self) -> None:
        """Let go of what is held for processes that are gone: each costs two open files."""
        for name, process in list(self._processes.items()):
            if not process.is_alive():
                process.close()
                del self._processes[name]

    def _wait_for(self, nodes: int) -> None:
        try:
            self.client.wait_for_workers(nodes, timeout=START_SECONDS)
        except TimeoutError:
            raise CapacityError(
                f"fewer than {nodes} nodes were up after {START_SECONDS:g} s"
            ) from None

    def _stop_processes(self) -> None:
        # Nothing on a node is worth a goodbye: what must last has been recorded or stored. The
        # scheduler goes last, so that no node has the time to complain of its loss.
        for process in reversed(self._processes.values()):
            process.kill()
        for process in self._processes.values():
            process.join(STOP_SECONDS)


def _open_to(host: str) -> str:
    reached = "" if host == LOOPBACK else f"whoever reaches {host} and "
    return f"without TLS {reached}every user of this machine can run code as you in this cluster"


# -- what runs in the processes ------------------------------------------------------------------


def _run_and_clean_up(
    scratch: str, dashboard: bool, host: str, security: Security, send: Any
) -> None:
    """Be the scheduler, and the leader of the process group of all that belongs to the cluster."""
    os.setpgid(0, 0)

    def end() -> None:
        others = [pid for pid in _group() if pid != os.getpid()]
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # paused nodes end by nothing else
        for pid in others:
            is_gone(pid, STOP_SECONDS)
        remove_keys(Path(scratch))
        shutil.rmtree(scratch, ignore_errors=True)

    _run_until_parent_ends(_run_scheduler(scratch, dashboard, host, security, send), end)


def _run_in_group(leader: int, arguments: tuple[str, NodeSpec, str, Security]) -> None:
    os.setpgid(0, leader)
    # Where nobody else could: a node that starts as the cluster ends makes the folder again.
    clean_up = partial(shutil.rmtree, arguments[2], ignore_errors=True)
    _run_until_parent_ends(_run_node(*arguments), clean_up)


def _group() -> Iterator[int]:
    """The processes of this process's group."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == os.getpgrp():
                yield pid


def _run_until_parent_ends(run: Coroutine[Any, Any, None], end: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(end)
    dask.config.set(DASK_SETTINGS)
    # Losses are expected and recorded as events; what fails in a task comes with its future.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    asyncio.run(run)


async def _run_scheduler(
    scratch: str, dashboard: bool, host: str, security: Security, send: Any
) -> None:
    dask.config.set({"temporary-directory": scratch})  # it has no parameter for it
    dask.config.set(dashboard_settings(security, "scheduler"))
    async with SchedulerOfMembers(
        host=host,
        port=0,
        security=security,
        dashboard=dashboard,
        dashboard_address=f"{LOOPBACK}:0",
    ) as scheduler:
        scheme = "http" if dask.config.get(f"{DASHBOARD}.cert") is None else "https"
        web = f"{scheme}://{LOOPBACK}:{scheduler.http_server.port}/status"
        send.send((scheduler.address, web))
        send.close()
        await scheduler.finished()


async def _run_node(address: str, node: NodeSpec, scratch: str, security: Security | None) -> None:
    dask.config.set(dashboard_settings(security, "worker"))
    async with WorkerOfMembers(
        address,
        name=node.name,
        nthreads=node.threads,
        resources={node.resource: node.threads},
        host=LOOPBACK,
        security=security,
        memory_limit=0,
        dashboard=False,
        local_directory=scratch,
        lifetime=node.lifetime,
    ) as worker:
        await worker.finished()
