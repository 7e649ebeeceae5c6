"""A cluster of processes on this machine, each node with a name and a role.

Nodes are forked from a server process that has imported what they need, so one is up in a fraction
of a second. There are no nannies: a process that dies stays dead until it is replaced. Everything
listens on loopback only (the scheduler on `host`, if given), and with TLS unless that is switched
off: other users of the machine reach loopback too. Every process ends with the driver, however that
ends: the scheduler's process also ends paused nodes and removes all files.
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
from collections.abc import Callable, Coroutine, Sequence
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

from dps.cluster.backends.base import Cluster, Process
from dps.cluster.backends.processes import (
    end_with_parent,
    fork_context,
    is_gone,
    process_of,
    scratch_prefix,
)
from dps.cluster.backends.tls import (
    LOOPBACK,
    SchedulerOfMembers,
    WorkerOfMembers,
    dashboard_settings,
    kept_in,
    remove_keys,
    temporary,
)
from dps.cluster.names import NodeSpec
from dps.errors import CapacityError, SchedulerLost

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
STOP_SECONDS = 5.0
LOOK_SECONDS = 0.1
MOMENT_SECONDS = 0.5  # from a broken connection until the end of its process shows

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
    """A Dask scheduler and nodes with roles, each in its own process, on this machine.

    Use as a context manager; leaving it ends every process. Not thread-safe, but `kill`, `pause`,
    `resume` and `start` may be called from another thread than the one that uses `client`.

    Parameters
    ----------
    nodes
        The nodes to start.
    preload
        Modules that nodes need, to be imported once for all of them.
    dashboard
        Whether to serve Dask's dashboard, if bokeh is installed.
    host
        The address of this machine on which the scheduler listens.
    security
        The certificates of all processes; connections without them are refused. None: those of
        Dask's own configuration if it requires encryption, otherwise temporary ones of this
        cluster. "off": as Dask's own configuration defines; without TLS, every user of this machine
        and every process that reaches a port can run code as you.
    scratch
        The folder in which the cluster creates a folder for certificates and temporary files;
        None: the system's folder for temporary files.
    notify
        Called with a warning if the cluster has no TLS; by default a Python warning.

    Attributes
    ----------
    client
        A Dask client that is connected to the cluster.
    security
        The certificates of its processes, each in a file.

    Raises
    ------
    CapacityError
        The scheduler or the nodes did not start in time.
    SchedulerLost
        The scheduler's process ended before the nodes were up.

    Examples
    --------
    >>> import numpy as np
    >>> from dps import LocalCluster, NodeSpec, ParameterServer
    >>> nodes = [NodeSpec("server-0", "server"), NodeSpec("worker-0", "worker")]
    >>> with LocalCluster(nodes) as cluster, ParameterServer(
    ...     cluster.client, {"w": np.zeros(3)}
    ... ) as ps:
    ...     ps.pull()["w"]
    array([0., 0., 0.])
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        preload: Sequence[str] = (),
        dashboard: bool = False,
        host: str = LOOPBACK,
        security: Security | Literal["off"] | None = None,
        scratch: str | None = None,
        notify: Callable[[str], None] = warnings.warn,
    ) -> None:
        super().__init__()
        known = security if isinstance(security, Security) else Security()
        if security is None and not known.require_encryption:
            known = temporary()
        if not known.require_encryption:
            reached = "" if host == LOOPBACK else f"and every process that can reach {host} "
            notify(f"without TLS, every user of this machine {reached}can run code as you")
        self._context = fork_context(preload)
        self._children: dict[str, ForkServerProcess] = {}
        with contextlib.ExitStack() as stack:
            self._scratch = stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix=scratch_prefix(os.getpid()), dir=scratch, ignore_cleanup_errors=True
                )
            )
            stack.callback(remove_keys, Path(self._scratch))  # the rest may not be removable
            stack.callback(self._stop_processes)
            # By default, a Dask scheduler listens without TLS even if its configuration forbids it.
            self.security = kept_in(Path(self._scratch), known)
            stack.enter_context(dask.config.set(DASK_SETTINGS))
            shown = dashboard and find_spec("bokeh") is not None
            try:
                self.address = self._start_scheduler(shown, host)
                for node in nodes:
                    self.start(node)
                self.client = self._connected()
                stack.callback(self._disconnect)
                link = {"distributed.dashboard.link": f"{{scheme}}://{LOOPBACK}:{{port}}/status"}
                settings = {**dashboard_settings(self.security, "scheduler"), **link}
                with dask.config.set(settings):
                    self.dashboard = self.client.dashboard_link if shown else None
                if nodes:
                    self.client.wait_for_workers(len(nodes), timeout=START_SECONDS)
            except Exception as error:
                if "scheduler" in self._processes and self.gone("scheduler", MOMENT_SECONDS):
                    raise SchedulerLost(
                        "the process of Dask's scheduler ended while the nodes started"
                    ) from error
                if isinstance(error, TimeoutError):
                    raise CapacityError(f"the cluster did not start in time: {error}") from error
                raise
            self._stack = stack.pop_all()

    def start(self, node: NodeSpec) -> None:
        """Start one more node, which joins when it is up; errors as for `Cluster.start`."""
        with self._lock, self._claimed(node):
            leader = self.pids["scheduler"]
            arguments = (leader, self.address, node, self._scratch, self.security)
            self._start_process(node.name, _run_node, arguments)

    def _connected(self) -> Client:
        """Connect to the scheduler; raise if its process ends, which Dask does not notice."""
        connecting: Future[Client] = Future()

        def connect() -> None:
            choices = {"security": self.security, "timeout": START_SECONDS}
            try:
                connecting.set_result(Client(self.address, set_as_default=False, **choices))
            except BaseException as error:  # noqa: BLE001 - raised below
                connecting.set_exception(error)

        threading.Thread(target=connect, daemon=True, name="dps-connect").start()
        while not wait([connecting], LOOK_SECONDS).done:
            self._living("scheduler")
        return connecting.result()

    def _disconnect(self) -> None:
        try:
            self.client.close()
        except Exception:
            # Dask raises the error of its attempts to reconnect if another program has the port.
            if not self.gone("scheduler", MOMENT_SECONDS):
                raise
            logger.debug("cannot close the client of a scheduler that has ended", exc_info=True)

    def _start_scheduler(self, dashboard: bool, host: str) -> str:
        receive, send = self._context.Pipe(duplex=False)
        arguments = (self._scratch, dashboard, host, self.security, send)
        self._start_process("scheduler", _run_scheduler, arguments)
        send.close()
        if not receive.poll(START_SECONDS):
            raise TimeoutError("the Dask scheduler has not reported its address")
        return str(receive.recv())

    def _start_process(self, name: str, target: Any, arguments: tuple[Any, ...]) -> None:
        child = self._context.Process(target=target, args=arguments, name=f"dps-{name}")
        child.start()
        # Forget children that have ended: each keeps two files open.
        self._children = {n: each for n, each in self._children.items() if each.is_alive()}
        self._children[name] = child
        pid = child.pid or 0
        self._processes[name] = Process(pid, process_of(pid))
        if self._processes[name].own is None:
            self._lost.add(name)  # it has ended already

    def _stop_processes(self) -> None:
        # Everything that must last is recorded or stored by now. The scheduler is killed last, so
        # that no node logs its loss.
        for child in reversed(self._children.values()):
            child.kill()
        for child in self._children.values():
            child.join(STOP_SECONDS)


# -- what runs in the processes ------------------------------------------------------------------


def _run_scheduler(scratch: str, dashboard: bool, host: str, security: Security, send: Any) -> None:
    """Run the scheduler as the leader of the process group of the whole cluster."""
    os.setpgid(0, 0)

    async def run() -> None:
        dask.config.set({"temporary-directory": scratch})  # a scheduler has no parameter for it
        dask.config.set(dashboard_settings(security, "scheduler"))
        async with SchedulerOfMembers(
            host=host,
            port=0,
            security=security,
            dashboard=dashboard,
            dashboard_address=f"{LOOPBACK}:0",
        ) as scheduler:
            send.send(scheduler.address)
            send.close()
            await scheduler.finished()

    def clean_up() -> None:
        killed = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid != os.getpid() and os.getpgid(pid) == os.getpgrp():
                    os.kill(pid, signal.SIGKILL)  # no other signal ends paused nodes
                    killed.append(pid)
        for pid in killed:
            is_gone(pid, STOP_SECONDS)
        remove_keys(Path(scratch))
        shutil.rmtree(scratch, ignore_errors=True)

    _run_until_parent_ends(run, clean_up)


def _run_node(leader: int, address: str, node: NodeSpec, scratch: str, security: Security) -> None:
    """Run a node in the process group of the scheduler."""
    try:
        os.setpgid(0, leader)
    except (ProcessLookupError, PermissionError):
        return  # Ctrl-C has ended the scheduler

    async def run() -> None:
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
        ) as worker:
            await worker.finished()

    # A node that starts as the cluster ends may create the folder again.
    _run_until_parent_ends(run, partial(shutil.rmtree, scratch, ignore_errors=True))


def _run_until_parent_ends(
    run: Callable[[], Coroutine[Any, Any, None]], clean_up: Callable[[], None]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(clean_up)
    dask.config.set(DASK_SETTINGS)
    # Losses are expected, and recorded as events; errors of tasks come with their futures.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    asyncio.run(run())
