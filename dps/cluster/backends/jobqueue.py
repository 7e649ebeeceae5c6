"""What batch queueing systems need to be told: jobs with a node each, and how one is killed.

The jobs are those of dask-jobqueue, with its own settings as defaults. It is imported when it is
needed, and what it does to a program by being imported is taken back.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import dask
from dask.utils import parse_bytes
from distributed.security import Security
from distributed.utils import get_ip, get_ip_interface

from dps.cluster.backends.fork_server import ENVIRONMENT
from dps.cluster.backends.local import DASK_SETTINGS
from dps.cluster.backends.tls import WorkerOfMembers, dashboard_settings
from dps.cluster.names import NodeSpec
from dps.core.names import replacement
from dps.errors import ConfigurationError

WORKER_CLASS = f"{WorkerOfMembers.__module__}.{WorkerOfMembers.__qualname__}"
SOMEWHERE = "SCHEDULER:PORT"
AMOUNTS = ("job-cpu", "job-mem", "resource-spec", "ncpus", "mem")
LOGS = "job-logs"  # unless `jobqueue.yaml` names a folder for them


@dataclass(frozen=True, slots=True)
class Queue:
    """A queueing system.

    Attributes
    ----------
    kind
        What it is called here, and in `jobqueue.yaml`.
    job
        The class of dask-jobqueue for one job.
    kill
        The command that has a job end at once; the job's number is appended.
    directives, prologue, again
        Lines for the head of each job script and for its beginning, and what is appended to the
        name of a node in it: a job that is started again must become a node of another name.
    """

    kind: str
    job: str
    kill: tuple[str, ...]
    directives: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    again: str = ""


QUEUES = {
    queue.kind: queue
    for queue in (
        Queue(
            "slurm",
            "slurm.SLURMJob",
            # Of a whole job, SIGKILL is a request to cancel it: SIGTERM would come first, and time.
            ("scancel", "--signal=KILL", "--batch"),
            ("--no-requeue",),  # lost with its host, it is replaced as a fault plan says
            (
                "DPS_AGAIN=",
                "for _ in $(seq ${SLURM_RESTART_COUNT:-0})",
                f"do DPS_AGAIN={replacement('$DPS_AGAIN')}; done",
            ),
            "$DPS_AGAIN",
        ),
        Queue("pbs", "pbs.PBSJob", ("qsig", "-s", "SIGKILL")),
        Queue("lsf", "lsf.LSFJob", ("bkill", "-s", "KILL")),
        Queue("sge", "sge.SGEJob", ("qdel",)),  # by SIGKILL at once; -f is for managers
    )
}


@dataclass(frozen=True, slots=True)
class JobGroup:
    """What the jobs of nodes of one role ask for; what is None is as `jobqueue.yaml` says.

    `directives` are put into the job script after the others, such as "--constraint=fast".
    """

    queue: str | None = None
    cores: int | None = None
    memory: str | None = None
    walltime: str | None = None
    directives: tuple[str, ...] = ()


def cores_of(queue: Queue, group: JobGroup, node: NodeSpec) -> int:
    """Return how many cores the job of a node asks for."""
    return int(group.cores or _default(queue, "cores") or node.threads)


def job_of(
    queue: Queue,
    group: JobGroup,
    node: NodeSpec,
    scheduler: str,
    interface: str | None,
    security: Security,
) -> Any:
    """Return the job of a node, as dask-jobqueue has it: nothing is submitted yet.

    Raises
    ------
    ConfigurationError
        dask-jobqueue is not installed, or what a job needs is given nowhere.
    """
    cls = _class_of(queue)
    cores = group.cores if group.cores is not None else _default(queue, "cores")
    memory = group.memory if group.memory is not None else _default(queue, "memory")
    if memory is None:
        raise ConfigurationError(
            f"how much memory is a job to have? Give cluster.memory, as in 2GB, or "
            f"jobqueue.{queue.kind}.memory in Dask's configuration"
        )
    logs = _default(queue, "log-directory") or LOGS
    # dask-jobqueue fails where another trial makes the folder between its look and its own attempt.
    os.makedirs(logs, exist_ok=True)
    with dask.config.set(_without_amounts(queue, group)):
        job = cls(
            scheduler=scheduler,
            name=f"{node.name}{queue.again}",
            job_name=f"dps-{node.name}",
            queue=group.queue,
            cores=cores if cores is not None else node.threads,
            memory=memory,
            walltime=group.walltime,
            processes=1,
            # What is sent to the script reaches the node: in its place, not as its child.
            python=f"exec {_default(queue, 'python') or sys.executable}",
            nanny=False,  # a node that dies stays dead, so that its loss is seen and counted
            interface=interface,
            protocol="tls://" if security.require_encryption else None,
            security=_in_script(security) if security.require_encryption else None,
            log_directory=logs,
            worker_extra_args=[
                *_worker_options(queue, group),
                *_options_of(node),
                *(("--worker-class", WORKER_CLASS) if security.require_encryption else ()),
            ],
            job_extra_directives=[*queue.directives, *directives_of(queue, group)],
            job_script_prologue=[
                *_lines(queue, "job-script-prologue"),
                *_exports(security),
                *queue.prologue,
            ],
        )
    job._command_template = _each_once(job._command_template)
    return job


def script_of(
    queue: Queue, group: JobGroup, node: NodeSpec, interface: str | None, encrypted: bool
) -> str:
    """Return the job script of a node; errors as `job_of`."""
    files = {f"tls_{name}": f"FOLDER/{name}" for name in ("ca_file", "worker_cert", "worker_key")}
    security = Security(require_encryption=True, **files) if encrypted else Security()
    scheduler = f"{'tls' if encrypted else 'tcp'}://{SOMEWHERE}"
    script: str = job_of(queue, group, node, scheduler, interface, security).job_script()
    with contextlib.suppress(OSError):  # made for the job, which is not submitted
        os.rmdir(LOGS)
    return script


def check_submits(queue: Queue) -> None:
    """Refuse a machine on which jobs cannot be submitted; raises `ConfigurationError`."""
    command = shlex.split(_class_of(queue).submit_command)[0]
    if shutil.which(command) is None:
        raise ConfigurationError(
            f"jobs of {queue.kind} are submitted with {command}, which is not there; run dps on a "
            "machine from which jobs can be submitted"
        )


def directives_of(queue: Queue, group: JobGroup) -> tuple[str, ...]:
    """The directives that were asked for, in `jobqueue.yaml` and for a group."""
    return (*_lines(queue, "job-extra-directives"), *group.directives)


def room_for(queue: Queue, group: JobGroup, node: NodeSpec) -> tuple[str | None, int, float]:
    """The queue of a node's job, its cores, and its memory in megabytes."""
    cores = cores_of(queue, group, node)
    memory = group.memory or _default(queue, "memory") or "0 MB"
    return group.queue or _default(queue, "queue"), cores, parse_bytes(memory) / 2**20


def interface_of(queue: Queue) -> str | None:
    """The network interface that `jobqueue.yaml` names; errors as `job_of`."""
    _jobqueue()
    interface: str | None = _default(queue, "interface")
    return interface


def shared_folder(queue: Queue) -> str:
    """A folder that all machines see: the one `jobqueue.yaml` names, else where we are."""
    _jobqueue()
    named = _default(queue, "shared-temp-directory")
    return os.path.expanduser(os.path.expandvars(named)) if named else os.getcwd()


def address_on(interface: str | None) -> str:
    """Return this machine's address on a network interface; None: on the one to other machines.

    Raises
    ------
    ConfigurationError
        There is no such interface.
    """
    try:
        return str(get_ip_interface(interface) if interface else get_ip())
    except (KeyError, ValueError) as error:
        raise ConfigurationError(f"cluster.interface: {error}") from error


def _without_amounts(queue: Queue, group: JobGroup) -> dict[str, None]:
    """What of `jobqueue.yaml` would go before the cores and the memory that a group asks for."""
    if group.cores is None and group.memory is None:
        return {}
    return {f"jobqueue.{queue.kind}.{key}": None for key in AMOUNTS}


def _in_script(security: Security) -> Security:
    """The certificates of a node as they are written on a command line."""
    files = security.get_tls_config_for_role("worker")
    key = files["key"] or files["cert"]  # it may be in the same file
    named = {"ca_file": files["ca_file"], "worker_cert": files["cert"], "worker_key": key}
    quoted = {f"tls_{name}": shlex.quote(path) for name, path in named.items()}
    return Security(require_encryption=True, **quoted)


def _worker_options(queue: Queue, group: JobGroup) -> Sequence[str]:
    """What all nodes of a group have in common: a lifetime of the user's own is left as it is."""
    own = _lines(queue, "worker-extra-args")
    if any(option.startswith("--lifetime") for option in own):
        return own
    walltime = group.walltime if group.walltime is not None else _default(queue, "walltime")
    return (*own, *lifetime_options(queue.kind, walltime))


def _each_once(command: str) -> str:
    """Leave out limits of a node that are given again: dask-jobqueue takes them from its job."""
    for option in ("--nthreads", "--memory-limit"):
        *earlier, last = command.split(f" {option} ")
        kept = [earlier[0], *(rest.partition(" ")[2] for rest in earlier[1:])]
        command = f"{' '.join(kept)} {option} {last}"
    return command


def _options_of(node: NodeSpec) -> Sequence[str]:
    # A node has the threads that its role needs, however many cores its job has, and its memory is
    # the queueing system's to limit.
    return (
        *("--nthreads", str(node.threads), "--memory-limit", "0", "--no-dashboard"),
        *("--resources", f"{node.resource}={node.threads}"),
    )


def _exports(security: Security) -> list[str]:
    """What nodes on this machine are started with, as lines of a job script."""
    dask_settings = {
        "DASK_" + key.upper().replace(".", "__").replace("-", "_"): value
        for key, value in {**DASK_SETTINGS, **dashboard_settings(security, "worker")}.items()
    }
    settings = {**ENVIRONMENT, **dask_settings}
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in settings.items()]
    return ["umask 077", *exports]  # not every queueing system hands it on


def _class_of(queue: Queue) -> Any:
    module, _, name = queue.job.partition(".")
    return getattr(getattr(_jobqueue(), module), name)


def _default(queue: Queue, key: str) -> Any:
    return dask.config.get(f"jobqueue.{queue.kind}.{key}", None)


def _lines(queue: Queue, key: str) -> Sequence[str]:
    lines: Sequence[str] = _default(queue, key) or ()
    return lines


def _jobqueue() -> ModuleType:
    """Import dask-jobqueue; must first be called in the main thread.

    Imported, it takes SIGINT for itself, and leaves a file in the user's configuration.
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


SPREAD = 0.05
MOST_SPREAD = 300.0

# The units of what is between colons, by how many of them there are: 30 is half an hour to Slurm.
_HOURS = (3600, 60, 1)
_MINUTES_ALONE = {1: (60,), 2: (60, 1), 3: _HOURS}
_SECONDS_ALONE = {1: (1,), 2: (60, 1), 3: _HOURS}
_UNITS = {
    "slurm": _MINUTES_ALONE,
    "pbs": _SECONDS_ALONE,
    "sge": _SECONDS_ALONE,
    "lsf": {1: (60,), 2: (3600, 60), 3: _HOURS},
}


def seconds_of(kind: str, walltime: str) -> float | None:
    """How many seconds a walltime is to a queueing system; None: it cannot be told."""
    days, dash, clock = walltime.strip().rpartition("-")
    numbers = clock.split(":")
    units = _HOURS[: len(numbers)] if dash else _UNITS[kind].get(len(numbers), ())
    if len(units) != len(numbers) or not all(n.isdecimal() for n in (*numbers, days or "0")):
        return None
    return 86400.0 * int(days or 0) + sum(int(n) * u for n, u in zip(numbers, units, strict=True))


def lifetime_options(kind: str, walltime: str | None) -> tuple[str, ...]:
    """The options of `dask worker` by which a node ends before its job does; none without a limit.

    Its lifetime is drawn from 85% to 95% of the walltime, or from 15 to 5 minutes less than it if
    that is longer.
    """
    seconds = seconds_of(kind, walltime) if walltime is not None else None
    if not seconds:
        return ()
    spread = min(SPREAD * seconds, MOST_SPREAD)
    lifetime = seconds - 2 * spread
    return ("--lifetime", f"{lifetime:.0f}s", "--lifetime-stagger", f"{spread:.0f}s")
