"""Nodes as jobs of a queueing system, which are submitted with dask-jobqueue.

A Dask scheduler runs on this machine, and each node is a job of its own that may wait in the queue.
Every node ends with the scheduler, however that ends. The settings of dask-jobqueue are the
defaults. It is imported when it is needed, and the side effects of its import are undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import dask
from distributed.security import Security
from distributed.utils import get_ip, get_ip_interface

from dps.cluster.backends.assignment import failing_together
from dps.cluster.backends.base import Cluster, check_scheduler, look_at
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
LOOK_SECONDS = 0.05
TELL_SECONDS = 10.0

# A node's lifetime is drawn from 85% to 95% of its job's walltime, or from 15 to 5 minutes less
# than the walltime if that is longer.
SPREAD = 0.05
MOST_SPREAD = 300.0

# The unit in seconds of each number of a walltime, by how many numbers it has.
_HOURS = (3600, 60, 1)
_SECONDS_ALONE = {1: (1,), 2: (60, 1), 3: _HOURS}


@dataclass(frozen=True, slots=True)
class Queue:
    """A queueing system.

    Attributes
    ----------
    job
        The class of dask-jobqueue for one job.
    kill
        The command that kills a job at once, without the job's number.
    units
        How it reads walltimes.
    directives, prologue
        Lines for the head and for the beginning of each job script.
    again
        A suffix of each node's name in its script. A job that is restarted must become a node of
        another name.
    """

    job: str
    kill: tuple[str, ...]
    units: Mapping[int, tuple[int, ...]]
    directives: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    again: str = ""


QUEUES = {
    "slurm": Queue(
        "slurm.SLURMJob",
        # For a whole job, SIGKILL is a request to cancel it: SIGTERM would come first, and time.
        ("scancel", "--signal=KILL", "--batch"),
        {1: (60,), 2: (60, 1), 3: _HOURS},
        ("--no-requeue",),  # if it is lost with its host, the fault plan defines its replacement
        (
            "DPS_AGAIN=",
            "for _ in $(seq ${SLURM_RESTART_COUNT:-0})",
            f"do DPS_AGAIN={replacement('$DPS_AGAIN')}; done",
        ),
        "$DPS_AGAIN",
    ),
    "pbs": Queue("pbs.PBSJob", ("qsig", "-s", "SIGKILL"), _SECONDS_ALONE),
    "lsf": Queue("lsf.LSFJob", ("bkill", "-s", "KILL"), {1: (60,), 2: (3600, 60), 3: _HOURS}),
    # It sends SIGKILL at once; -f is for managers.
    "sge": Queue("sge.SGEJob", ("qdel",), _SECONDS_ALONE),
}


@dataclass(frozen=True, slots=True)
class JobGroup:
    """What the jobs of one role ask for; where it is None, `jobqueue.yaml` decides.

    `directives` are added to the job script after the others, such as "--constraint=fast".
    """

    queue: str | None = None
    cores: int | None = None
    memory: str | None = None
    walltime: str | None = None
    directives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a cluster: where they are submitted, and what they ask for.

    Attributes
    ----------
    kind
        A key of `QUEUES`, which is also the queueing system's name in `jobqueue.yaml`.
    groups
        What the jobs of each role ask for, by its Dask resource.
    interface
        The network interface of the scheduler and of the nodes; None: the one in `jobqueue.yaml`,
        otherwise the one that reaches other machines.
    """

    kind: str
    groups: Mapping[str, JobGroup]
    interface: str | None = None

    @property
    def queue(self) -> Queue:
        """The queueing system."""
        return QUEUES[self.kind]

    def group(self, node: NodeSpec) -> JobGroup:
        """Return what the job of a node asks for, with the defaults of `jobqueue.yaml`."""
        asked = self.groups[node.resource]
        whole = {k: self.setting(k) if v is None else v for k, v in asdict(asked).items()}
        whole["directives"] = (*self._lines("job-extra-directives"), *asked.directives)
        return JobGroup(**whole)

    def cores(self, node: NodeSpec) -> int:
        """Return how many cores the job of a node asks for."""
        return int(self.group(node).cores or node.threads)

    def job(
        self, node: NodeSpec, scheduler: str, security: Security, directives: Sequence[str] = ()
    ) -> Any:
        """Return the job of a node as dask-jobqueue represents it, without submitting it.

        Raises
        ------
        ConfigurationError
            dask-jobqueue is not installed, or a setting is missing.
        """
        cls = self._job_class()
        asked, group = self.groups[node.resource], self.group(node)
        if group.memory is None:
            raise ConfigurationError(
                f"how much memory is a job to have? Give cluster.memory, as in 2GB, or "
                f"jobqueue.{self.kind}.memory in Dask's configuration"
            )
        logs = self.setting("log-directory") or LOGS
        # dask-jobqueue fails if another trial creates the folder just before it does.
        os.makedirs(logs, exist_ok=True)
        own = asked.cores is not None or asked.memory is not None
        # These settings would take precedence over the cores and the memory that are asked for.
        without = {f"jobqueue.{self.kind}.{key}": None for key in AMOUNTS} if own else {}
        encrypted = security.require_encryption
        with dask.config.set(without):
            job = cls(
                scheduler=scheduler,
                name=f"{node.name}{self.queue.again}",
                job_name=f"dps-{node.name}",
                queue=group.queue,
                cores=self.cores(node),
                memory=group.memory,
                walltime=group.walltime,
                processes=1,
                # A signal to the script must reach the node: it replaces the shell.
                python=f"exec {self.setting('python') or sys.executable}",
                nanny=False,  # a node that dies stays dead, so that its loss is seen and counted
                interface=self.interface,
                protocol="tls://" if encrypted else None,
                security=_in_script(security) if encrypted else None,
                log_directory=logs,
                worker_extra_args=[
                    *self._worker_options(group.walltime),
                    # A node has the threads of its role, however many cores its job has; its
                    # memory is limited by the queueing system.
                    *("--nthreads", str(node.threads), "--memory-limit", "0", "--no-dashboard"),
                    *("--resources", f"{node.resource}={node.threads}"),
                    *(("--worker-class", WORKER_CLASS) if encrypted else ()),
                ],
                job_extra_directives=[*self.queue.directives, *group.directives, *directives],
                job_script_prologue=[
                    *self._lines("job-script-prologue"),
                    *_exports(security),
                    *self.queue.prologue,
                ],
            )
        job._command_template = _each_once(job._command_template)
        return job

    def script(self, node: NodeSpec, encrypted: bool) -> str:
        """Return the job script of a node; errors as `job`."""
        files = {f"tls_{key}": f"FOLDER/{key}" for key in ("ca_file", "worker_cert", "worker_key")}
        security = Security(require_encryption=True, **files) if encrypted else Security()
        scheduler = f"{'tls' if encrypted else 'tcp'}://SCHEDULER:PORT"
        script: str = self.job(node, scheduler, security).job_script()
        with contextlib.suppress(OSError):  # created for the job, which is not submitted
            os.rmdir(LOGS)
        return script

    def check(self) -> None:
        """Raise `ConfigurationError` if this machine cannot submit jobs or lacks the interface."""
        command = shlex.split(self._job_class().submit_command)[0]
        if shutil.which(command) is None:
            raise ConfigurationError(
                f"jobs of {self.kind} are submitted with {command}, which is not there; run dps on "
                "a machine from which jobs can be submitted"
            )
        self.host()

    def host(self) -> str:
        """Return this machine's address on the interface; raises `ConfigurationError`."""
        _jobqueue()
        interface = self.interface or self.setting("interface")
        try:
            return str(get_ip_interface(interface) if interface else get_ip())
        except (KeyError, ValueError) as error:
            raise ConfigurationError(f"cluster.interface: {error}") from error

    def shared_folder(self) -> str:
        """Return a folder that all machines see: the one in `jobqueue.yaml`, or the current one."""
        named = self.setting("shared-temp-directory")
        return os.path.expanduser(os.path.expandvars(named)) if named else os.getcwd()

    def setting(self, key: str) -> Any:
        """Return a setting of `jobqueue.yaml`; None if it is not there."""
        return dask.config.get(f"jobqueue.{self.kind}.{key}", None)

    def _lines(self, key: str) -> Sequence[str]:
        lines: Sequence[str] = self.setting(key) or ()
        return lines

    def _worker_options(self, walltime: str | None) -> Sequence[str]:
        """Return the options of every node; a lifetime of the user's own is kept."""
        own = self._lines("worker-extra-args")
        has_lifetime = any(option.startswith("--lifetime") for option in own)
        return own if has_lifetime else (*own, *lifetime_options(self.kind, walltime))

    def _job_class(self) -> Any:
        module, _, name = self.queue.job.partition(".")
        return getattr(getattr(_jobqueue(), module), name)


def seconds_of(kind: str, walltime: str) -> float | None:
    """Return a walltime in seconds, as a queueing system reads it; None if it has another form."""
    days, dash, clock = walltime.strip().rpartition("-")
    numbers = clock.split(":")
    units = _HOURS[: len(numbers)] if dash else QUEUES[kind].units.get(len(numbers), ())
    if len(units) != len(numbers) or not all(n.isdecimal() for n in (*numbers, days or "0")):
        return None
    return 86400.0 * int(days or 0) + sum(int(n) * u for n, u in zip(numbers, units, strict=True))


def lifetime_options(kind: str, walltime: str | None) -> tuple[str, ...]:
    """Return the options of `dask worker` that end a node before its job; none without a limit."""
    seconds = seconds_of(kind, walltime) if walltime is not None else None
    if not seconds:
        return ()
    spread = min(SPREAD * seconds, MOST_SPREAD)
    lifetime = seconds - 2 * spread
    return ("--lifetime", f"{lifetime:.0f}s", "--lifetime-stagger", f"{spread:.0f}s")


def _in_script(security: Security) -> Security:
    """Return the certificates of a node, quoted for a command line."""
    files = security.get_tls_config_for_role("worker")
    key = files["key"] or files["cert"]  # it may be in the same file
    named = {"ca_file": files["ca_file"], "worker_cert": files["cert"], "worker_key": key}
    quoted = {f"tls_{name}": shlex.quote(path) for name, path in named.items()}
    return Security(require_encryption=True, **quoted)


def _each_once(command: str) -> str:
    """Remove limits that are given again later: dask-jobqueue adds those of the job."""
    return re.sub(r" (--nthreads|--memory-limit) \S+(?=.* \1 )", "", command)


def _exports(security: Security) -> list[str]:
    """Return the environment of nodes as lines of a job script."""
    dask_settings = {
        "DASK_" + key.upper().replace(".", "__").replace("-", "_"): value
        for key, value in {**DASK_SETTINGS, **dashboard_settings(security, "worker")}.items()
    }
    settings = {**ENVIRONMENT, **dask_settings}
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in settings.items()]
    return ["umask 077", *exports]  # not every queueing system passes the umask on


def _jobqueue() -> ModuleType:
    """Import dask-jobqueue; must first be called in the main thread.

    Its import takes over SIGINT, and writes a file to the user's configuration.
    """
    before, place = signal.getsignal(signal.SIGINT), dask.config.PATH
    try:
        with tempfile.TemporaryDirectory(prefix="dps-") as elsewhere:
            dask.config.PATH = elsewhere
            import dask_jobqueue
    except ImportError as error:
        raise ConfigurationError(
            "jobs are submitted with dask-jobqueue, which is not installed: in a clone of dps, "
            "pip install -e '.[jobqueue]'"
        ) from error
    finally:
        dask.config.PATH = place
        if signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)
    found: ModuleType = dask_jobqueue
    return found


class JobCluster(Cluster):
    """Nodes as jobs of a queueing system.

    Parameters
    ----------
    jobs
        Where they are submitted, and what they ask for.
    nodes
        The nodes to submit jobs for.
    security
        The certificates of all processes; None: what Dask's own configuration defines. Those that
        are not in files yet are written to a folder that all machines see:
        `shared-temp-directory` in `jobqueue.yaml`, otherwise the working directory.
    patience
        How many seconds jobs may wait in the queue.
    tell
        Called with a line of text while jobs are waited for.

    Raises
    ------
    ConfigurationError
        dask-jobqueue is not installed, or a job is refused.
    CapacityError
        Jobs were not started in time.
    """

    def __init__(
        self,
        jobs: Jobs,
        nodes: Sequence[NodeSpec],
        security: Security | None,
        patience: float,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._jobs = jobs
        self._job_of: dict[str, Any] = {}  # by the name of its node
        self._submitted: list[Any] = []
        self._submitting: list[asyncio.Future[None]] = []
        self._unusable: list[str] = []
        self._welcoming = Tasks(self._not_welcomed)
        host = jobs.host()
        with contextlib.ExitStack() as stack:
            self._head = stack.enter_context(
                LocalCluster(
                    [],
                    ("dps.cluster.driver.parameter_server",),
                    host=host,
                    security=security or "off",
                    tell=lambda line: tell(f"warning: {line}"),
                    scratch=jobs.shared_folder() if security is not None else None,
                )
            )
            self.client = self._head.client
            check_scheduler(self.client)
            stack.callback(self._cancel)
            self.client.subscribe_topic("all", self._note)
            # Before the jobs end: the scheduler would complain that its events reach no one.
            stack.callback(self.client.unsubscribe_topic, "all")
            for node in nodes:
                self.start(node)
            self._wait(patience, tell)
            self._stack = stack.pop_all()
        self.notes = failing_together({name: self._host_of(name) for name in self._processes})

    def start(self, node: NodeSpec) -> None:
        """Submit a job for one more node; a refusal raises `ConfigurationError`."""
        self._claim(node)
        self._submit(node)

    def kill(self, name: str) -> int:
        """Make the queueing system send SIGKILL to all processes of a node's job."""
        process = self._living(name)
        try:
            run_command(*self._jobs.queue.kill, self._job_of[name].job_id)
        except (OSError, subprocess.SubprocessError) as error:
            self._living(name)  # if it has ended meanwhile, that is why
            told = getattr(error, "stderr", None) or error
            raise ConfigurationError(f"the job of {name} could not be killed: {told}") from error
        return process.pid

    # -- jobs that wait, start and end -----------------------------------------------------------

    def _submit(self, node: NodeSpec, directives: Sequence[str] = ()) -> None:
        job = self._jobs.job(node, self._head.address, self._head.security, directives)
        self._submitted.append(job)
        try:
            self.client.sync(self._start_job, job)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"the job of {node.name} could not be submitted: {error}"
            ) from error
        self._job_of[node.name] = job

    async def _start_job(self, job: Any) -> None:
        # An interrupt must not lose the number of a job that is submitted all the same.
        submitting = asyncio.ensure_future(job.start())
        self._submitting.append(submitting)
        await asyncio.shield(submitting)

    def _wait(self, patience: float, tell: Callable[[str], None]) -> None:
        began = told = time.monotonic()
        while waiting := sorted(self._waiting()):
            if self._unusable:
                raise ConfigurationError(self._unusable[0])
            now = time.monotonic()
            if now - began > patience:
                jobs = ", ".join(f"{name} (job {self._job_of[name].job_id})" for name in waiting)
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
        """Return the nodes that have not joined yet."""
        return self._specs.keys() - self.pids.keys()

    def _note(self, event: tuple[float, Any]) -> None:
        """Handle an event of the scheduler: a node has joined, or is lost."""
        match event[1]:
            case {"action": "remove-worker", "worker": str(address)}:
                self._forget(address)
            case {"action": "add-worker", "worker": str(address)}:
                self._welcoming.start(self._welcome(address))

    async def _welcome(self, address: str) -> None:
        """Take a node in that has joined, when it answers."""
        while True:
            workers = (await self.client.scheduler.identity(n_workers=-1))["workers"]
            if address not in workers:
                return
            name = str(workers[address]["name"])
            try:
                process = await look_at(self.client, address)
                break
            except TimeoutError:
                logger.info("%s has started at %s, and does not answer yet", name, address)
        with self._lock:
            if name in self._specs and process is not None:
                self._lost.discard(name)
                self._processes[name] = process

    def _not_welcomed(self, error: Exception) -> None:
        if isinstance(error, OSError):
            logger.warning("the scheduler cannot be asked who has joined: %s", error)
        else:
            self._unusable.append(f"a job has started, and cannot become a node: {error}")
            logger.warning("%s", self._unusable[-1])

    def _host_of(self, name: str) -> str:
        return self._processes[name].host

    def _cancel(self) -> None:
        """Cancel all jobs with one command, because there may not be much time."""

        async def submitted() -> None:
            await asyncio.gather(*self._submitting, return_exceptions=True)

        with contextlib.suppress(OSError, TimeoutError):  # the scheduler may be gone
            self.client.sync(submitted)
        numbers = [job.job_id for job in self._submitted if job.job_id is not None]
        if not numbers:
            return
        try:
            run_command(*shlex.split(self._submitted[0].cancel_command), *numbers)
        except (OSError, subprocess.SubprocessError) as error:
            # Most queueing systems complain of jobs that have ended, and cancel the others.
            logger.info("jobs were cancelled: %s", getattr(error, "stderr", None) or error)


def run_command(*command: str, check: bool = True) -> str:
    """Run a command of the queueing system; return what it prints."""
    done = subprocess.run(
        command, check=check, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    return done.stdout
