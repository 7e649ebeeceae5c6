"""Nodes as jobs of a queueing system, which are submitted with dask-jobqueue.

A Dask scheduler runs on this machine, and each node is a separate job, which may wait in the queue.
Every node ends with the scheduler, however that ends. The settings of dask-jobqueue are the
defaults. dask-jobqueue is imported on first use, and the side effects of its import are undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import dask
from distributed.security import Security
from distributed.utils import get_ip, get_ip_interface

from dps.cluster.backends.assignment import failing_together
from dps.cluster.backends.base import Cluster, look_at
from dps.cluster.backends.local import DASK_SETTINGS, LocalCluster
from dps.cluster.backends.processes import ENVIRONMENT
from dps.cluster.backends.tls import WorkerOfMembers, dashboard_settings
from dps.cluster.names import NodeSpec
from dps.core.names import replacement
from dps.errors import CapacityError, ConfigurationError
from dps.protocol.tasks import Tasks

logger = logging.getLogger(__name__)

WORKER_CLASS = f"{WorkerOfMembers.__module__}.{WorkerOfMembers.__qualname__}"
AMOUNTS = ("job-cpu", "job-mem", "resource-spec", "ncpus", "mem")
LOGS = "job-logs"  # unless `jobqueue.yaml` names a folder for them
COMMAND_SECONDS = 30.0
LOOK_SECONDS = 0.2
TELL_SECONDS = 10.0

# The commands that kill a job at once; the job's number follows.
KILL = {
    # Without --batch, Slurm cancels the whole job: it sends SIGTERM first, and SIGKILL later.
    "slurm": ("scancel", "--signal=KILL", "--batch"),
    "pbs": ("qsig", "-s", "SIGKILL"),
    "lsf": ("bkill", "-s", "KILL"),
    "sge": ("qdel",),  # sends SIGKILL at once; only managers may use -f
}
_NUMBERED = (
    "DPS_AGAIN=",
    "for _ in $(seq ${SLURM_RESTART_COUNT:-0})",
    f"do DPS_AGAIN={replacement('$DPS_AGAIN')}; done",
)


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a cluster: where they are submitted, and what they ask for."""

    kind: str  # a key of `KILL`, which is also the queueing system's name in `jobqueue.yaml`
    # Settings for the Dask resource of each role: "queue", "cores", "memory" and "walltime", where
    # they differ from `jobqueue.yaml`, and further "directives".
    groups: Mapping[str, Mapping[str, Any]]
    interface: str | None = None  # of the scheduler and the nodes; None: see `host`

    def options(self, node: NodeSpec) -> dict[str, Any]:
        """Return the settings of a node's job, including those of `jobqueue.yaml`."""
        options = {**self.site(), **self.groups[node.resource]}
        options["cores"] = options.get("cores") or node.threads
        own = options.get("directives") or ()
        options["directives"] = (*(options.get("job-extra-directives") or ()), *own)
        return options

    def site(self) -> dict[str, Any]:
        """Return the settings in `jobqueue.yaml`."""
        settings = dask.config.get(f"jobqueue.{self.kind}", {})
        return {key.replace("_", "-"): value for key, value in settings.items()}

    def job(
        self, node: NodeSpec, scheduler: str, security: Security, directives: Sequence[str] = ()
    ) -> Any:
        """Return the job of a node as dask-jobqueue represents it, without submitting it.

        `ConfigurationError`: dask-jobqueue is not installed, or a setting is missing.
        """
        create, slurm = self.job_class(), self.kind == "slurm"
        options = self.options(node)
        if options.get("memory") is None:
            raise ConfigurationError(
                f"no memory is set for the jobs: set cluster.memory, such as 2GB, or "
                f"jobqueue.{self.kind}.memory in Dask's configuration"
            )
        extra = options.get("worker-extra-args") or ()
        if not any(option.startswith("--lifetime") for option in extra):
            extra = (*extra, *lifetime_options(self.kind, options.get("walltime")))
        logs = options.get("log-directory") or LOGS
        # dask-jobqueue fails if another trial creates the folder just before it does.
        os.makedirs(logs, exist_ok=True)
        # These settings would take precedence over the cores and the memory of this group.
        own = not {"cores", "memory"}.isdisjoint(self.groups[node.resource])
        with dask.config.set({f"jobqueue.{self.kind}.{key}": None for key in AMOUNTS if own}):
            return create(
                **{key: options.get(key) for key in ("queue", "cores", "memory", "walltime")},
                scheduler=scheduler,
                # On Slurm, a job that is requeued becomes a node of another name.
                name=f"{node.name}$DPS_AGAIN" if slurm else node.name,
                job_name=f"dps-{node.name}",
                processes=1,
                # The node replaces the shell, so that a signal to the script reaches it.
                python=f"exec {options.get('python') or sys.executable}",
                nanny=False,  # a node that dies stays dead, so that its loss is seen and counted
                interface=self.interface,
                log_directory=logs,
                worker_extra_args=[
                    *extra,
                    # A node has the threads of its role, however many cores its job has; its
                    # memory is limited by the queueing system. The last value of an option counts.
                    *("--nthreads", str(node.threads), "--memory-limit", "0", "--no-dashboard"),
                    *("--resources", f"{node.resource}={node.threads}"),
                    *_tls_options(security),
                ],
                # If a job is lost with its host, the fault plan defines its replacement.
                job_extra_directives=[
                    *(("--no-requeue",) if slurm else ()),
                    *options["directives"],
                    *directives,
                ],
                job_script_prologue=[
                    *(options.get("job-script-prologue") or ()),
                    *_exports(security),
                    *(_NUMBERED if slurm else ()),
                ],
            )

    def host(self) -> str:
        """Return this machine's address on the interface that is set here or in `jobqueue.yaml`."""
        interface = self.interface or self.site().get("interface")
        try:
            # The last one is the address on the interface that reaches other machines.
            return str(get_ip_interface(interface) if interface else get_ip())
        except (KeyError, ValueError) as error:
            raise ConfigurationError(f"cluster.interface: {error}") from error

    def job_class(self) -> Any:
        """Import dask-jobqueue, at first in the main thread; return the class of a job."""
        # The import replaces the handler of SIGINT, and writes to the user's configuration folder;
        # both are prevented.
        before, place = signal.getsignal(signal.SIGINT), dask.config.PATH
        try:
            with tempfile.TemporaryDirectory(prefix="dps-") as elsewhere:
                dask.config.PATH = elsewhere
                module = import_module(f"dask_jobqueue.{self.kind}")
                return getattr(module, f"{self.kind.upper()}Job")
        except ImportError as error:
            raise ConfigurationError(
                "dask-jobqueue, which submits the jobs, is not installed: pip install dask-jobqueue"
            ) from error
        finally:
            dask.config.PATH = place
            if signal.getsignal(signal.SIGINT) is not before:
                signal.signal(signal.SIGINT, before)


def lifetime_options(kind: str, walltime: str | None) -> tuple[str, ...]:
    """Return the options of `dask worker` that end a node before its job."""
    # The walltime is read as the queueing system reads it. In an unknown form it sets no limit.
    days, dash, clock = (walltime or "0").strip().rpartition("-")
    numbers = clock.split(":")
    if len(numbers) > 3 or not all(n.isdecimal() for n in (*numbers, days or "0")):
        return ()
    # LSF has no seconds, unless three numbers are given. A single number of Slurm is in minutes.
    in_minutes = len(numbers) < {"lsf": 3, "slurm": 2}.get(kind, 0)
    first = 3600 if dash else 60 ** (len(numbers) - 1 + in_minutes)
    clock_seconds = sum(int(number) * first / 60**place for place, number in enumerate(numbers))
    seconds = 86400 * int(days or 0) + clock_seconds
    # Dask draws it from 85% to 95% of the walltime, or from 15 to 5 min less if that is longer.
    spread = min(0.05 * seconds, 300.0)
    lifetime = f"{seconds - 2 * spread:.0f}s", "--lifetime-stagger", f"{spread:.0f}s"
    return ("--lifetime", *lifetime) if seconds else ()


def _tls_options(security: Security) -> Sequence[str]:
    """Return the options of a node for its certificates, quoted: dask-jobqueue does not quote."""
    if not security.require_encryption:
        return ()
    files = security.get_tls_config_for_role("worker")
    key = files["key"] or files["cert"]  # one file may have both
    named = {"ca-file": files["ca_file"], "cert": files["cert"], "key": key}
    options = (word for n, path in named.items() for word in (f"--tls-{n}", shlex.quote(path)))
    return ("--protocol", "tls://", *options, "--worker-class", WORKER_CLASS)


def _exports(security: Security) -> Sequence[str]:
    dask_settings = {
        "DASK_" + key.upper().replace(".", "__").replace("-", "_"): value
        for key, value in {**DASK_SETTINGS, **dashboard_settings(security, "worker")}.items()
    }
    settings = {**ENVIRONMENT, **dask_settings}
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in settings.items()]
    return ["umask 077", *exports]  # not every queueing system passes the umask on


@dataclass(eq=False, repr=False)
class JobCluster(Cluster):
    """Nodes as jobs of a queueing system.

    `ConfigurationError`: dask-jobqueue is not installed, or a job is refused. `CapacityError`: jobs
    were not started in time.
    """

    jobs: Jobs
    nodes: Sequence[NodeSpec]
    # None: what Dask's own configuration defines. Certificates that are not in files yet are
    # written to a folder that all machines see (`shared-temp-directory` in `jobqueue.yaml`,
    # otherwise the working directory).
    security: Security | None
    patience: float  # seconds that jobs may wait in the queue
    notify: Callable[[str], None]  # called with a line of text while jobs are waited for

    def __post_init__(self) -> None:
        super().__init__()
        self._job_of: dict[str, Any] = {}  # by the name of its node
        self._submitted: list[tuple[Any, Future[None]]] = []
        self._unusable: list[str] = []
        self._admitting = Tasks(self._not_admitted)
        shared = self.jobs.site().get("shared-temp-directory")
        folder = os.path.expanduser(os.path.expandvars(shared)) if shared else os.getcwd()
        with contextlib.ExitStack() as stack:
            self._head = stack.enter_context(
                LocalCluster(
                    [],
                    ("dps.cluster.driver.parameter_server",),
                    host=self.jobs.host(),
                    security=self.security or "off",
                    notify=lambda line: self.notify(f"warning: {line}"),
                    scratch=folder if self.security is not None else None,
                )
            )
            self.client = self._head.client
            stack.callback(self._cancel)
            self.client.subscribe_topic("all", self._note)
            # Before the jobs end: otherwise the scheduler logs that its events have no receiver.
            stack.callback(self.client.unsubscribe_topic, "all")
            for node in self.nodes:
                self.start(node)
            self._wait()
            self._stack = stack.pop_all()
        self.notes = failing_together({name: self._host_of(name) for name in self._processes})

    def start(self, node: NodeSpec) -> None:
        """Submit a job for one more node; a refusal raises `ConfigurationError`."""
        with self._claimed(node):
            self._submit(node)

    def kill(self, name: str) -> int:
        """Make the queueing system send SIGKILL to all processes of a node's job."""
        process = self._living(name)
        try:
            run_command(*KILL[self.jobs.kind], self._job_of[name].job_id)
        except (OSError, subprocess.SubprocessError) as error:
            self._living(name)  # raises another error if it has ended
            reason = getattr(error, "stderr", None) or error
            raise ConfigurationError(f"the job of {name} could not be killed: {reason}") from error
        return process.pid

    # -- jobs that wait, start and end -----------------------------------------------------------

    def _submit(self, node: NodeSpec, directives: Sequence[str] = ()) -> None:
        job = self.jobs.job(node, self._head.address, self._head.security, directives)
        # An interrupt ends the wait, not the submission, so the number of the job is not lost.
        loop: Any = self.client.loop
        submitting = asyncio.run_coroutine_threadsafe(job.start(), loop.asyncio_loop)
        self._submitted.append((job, submitting))
        try:
            submitting.result()
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"the job of {node.name} could not be submitted: {error}"
            ) from error
        self._job_of[node.name] = job

    def _wait(self) -> None:
        began = reported = time.monotonic()
        while waiting := sorted(self._waiting()):
            if self._unusable:
                raise ConfigurationError(self._unusable[0])
            now = time.monotonic()
            if now - began > self.patience:
                jobs = ", ".join(f"{name} (job {self._job_of[name].job_id})" for name in waiting)
                raise CapacityError(
                    f"these jobs did not start, or did not reach the scheduler at "
                    f"{self._head.address}, within {self.patience:g} s: {jobs}. Check the queue "
                    "and their logs, request less, or raise cluster.patience."
                )
            if now - reported > TELL_SECONDS:
                reported, total = now, len(self._specs)
                self.notify(f"waiting for {len(waiting)} of {total} jobs, {now - began:.0f} s")
            time.sleep(LOOK_SECONDS)

    def _waiting(self) -> set[str]:
        return self._specs.keys() - self.pids.keys()

    def _note(self, event: tuple[float, Any]) -> None:
        match event[1]:
            case {"action": "remove-worker", "worker": str(address)}:
                self._forget(address)
            case {"action": "add-worker", "worker": str(address)}:
                self._admitting.start(self._admit(address))

    async def _admit(self, address: str) -> None:
        process = None
        while process is None:
            workers = (await self.client.scheduler.identity(n_workers=-1))["workers"]
            if address not in workers:
                return
            with contextlib.suppress(TimeoutError):
                process = await look_at(self.client, address)
        with self._lock:
            if (name := str(workers[address]["name"])) in self._specs:
                self._lost.discard(name)
                self._processes[name] = process

    def _not_admitted(self, error: Exception) -> None:
        message = f"a job has started, but cannot become a node: {error}"
        logger.warning(message)
        if not isinstance(error, OSError):  # otherwise the scheduler could not be asked
            self._unusable.append(message)

    def _host_of(self, name: str) -> str:
        return self._processes[name].host

    def _cancel(self) -> None:
        """Cancel all jobs with one command, because there may not be much time."""
        wait([submitting for _, submitting in self._submitted], COMMAND_SECONDS)
        jobs = [job for job, _ in self._submitted if job.job_id is not None]
        if not jobs:
            return
        try:
            run_command(*shlex.split(jobs[0].cancel_command), *(job.job_id for job in jobs))
        except (OSError, subprocess.SubprocessError) as error:
            # Most queueing systems complain of jobs that have ended, and cancel the others.
            logger.info("jobs were cancelled: %s", getattr(error, "stderr", None) or error)


def run_command(*command: str, check: bool = True) -> str:
    """Run a command of the queueing system; return what it prints."""
    done = subprocess.run(
        command, check=check, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    return done.stdout
