"""Nodes as jobs of Slurm: on different hosts, requeued, and lost with their host.

Nodes that must not fail together are kept on different hosts where Slurm has room on others. The
host of a job is only known when the job has started, so one that starts beside such a node is
submitted again, with the hosts to exclude.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dask.utils import parse_bytes

from dps.cluster.backends.assignment import must_be_apart
from dps.cluster.backends.jobs import COMMAND_SECONDS, JobCluster, run_command
from dps.cluster.backends.processes import holds
from dps.cluster.names import NodeSpec
from dps.core.names import predecessor, replacement
from dps.errors import CapacityError, ConfigurationError

SPREAD_SECONDS = 20.0  # until a job may start on hosts that it avoids
ACCOUNT_SECONDS = 2.0
ANSWER_SECONDS = 2.0
BACK_SECONDS = 10.0
LOOK_SECONDS = 0.1
_CHOOSING = ("-x", "--exclude", "-w", "--nodelist")
_OVER = ("CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "COMPLETED", "BOOT_FAIL")
_UP = ("IDLE", "MIXED", "ALLOCATED", "IDLE+COMPLETING", "MIXED+COMPLETING")
_OPEN = ("idle", "mix", "mix-", "alloc", "alloc+", "comp", "plnd")  # "plnd": by backfill
_COLUMNS = ("Partition", "NodeList", "StateCompact", "CPUsState", "Memory", "AllocMem")


@dataclass(eq=False, repr=False)
class SlurmCluster(JobCluster):
    """Nodes as jobs of Slurm; see `JobCluster`."""

    NO_QUEUE = None
    _at: dict[str, str] = field(init=False, default_factory=dict)  # the host of each node
    # The nodes whose jobs were submitted a second time.
    _again: set[str] = field(init=False, default_factory=set)
    _down: dict[str, _HostDown] = field(init=False, default_factory=dict)
    _spreading: list[threading.Timer] = field(init=False, default_factory=list)
    _taking: threading.Lock = field(init=False, default_factory=threading.Lock)

    def start(self, node: NodeSpec) -> None:
        """Submit a job for one more node; if it replaces one whose host is down, give that back."""
        before = predecessor(node.name)
        if before != node.name and before in self._at:
            self._give_back(self._at[before])
        super().start(node)

    def requeue(self, name: str) -> int:
        """Requeue a node's job: as for `Cluster.requeue`."""
        process, job = self._living(name), self._job_of[name]
        again = replace(self._specs[name], name=replacement(name))
        with self._claimed(again):
            self._job_of[again.name] = job
            self._end_without_notice([name])
            # Jobs are submitted with --no-requeue.
            _scontrol("update", f"jobid={job.job_id}", "requeue=1")
            _scontrol("requeue", job.job_id)
        return process.pid

    def take_host(self, name: str) -> int:
        """Set a node's host down: as for `Cluster.take_host`.

        Only administrators of Slurm may do this. Hosts with jobs of others are refused.
        """
        pid, host = self._processes[name].pid, self._host_of(name)
        with self._taking:
            # This is called once for each node that is lost with the host.
            if host not in self._down:
                self._living(name)
                nodes = set(self.on_host_of(name))
                shown = run_command("squeue", "-h", "-t", "running", "-w", host, "-o", "%A")
                if others := set(shown.split()) - {job.job_id for job in self._job_of.values()}:
                    raise ConfigurationError(
                        f"taking away host {host} would end other jobs: {', '.join(sorted(others))}"
                    )
                self._end_without_notice(nodes)
                self._down[host] = _HostDown(host, nodes)
            elif name not in self._down[host].nodes:
                raise ProcessLookupError(f"{name} was already lost with host {host}")
            self._down[host].nodes.discard(name)
        return pid

    def on_host_of(self, name: str) -> tuple[str, ...]:
        """Return the living nodes on the host of a node, and the node itself."""
        if name not in self._processes:
            return (name,)
        host = self._host_of(name)
        others = [other for other in self.pids if other != name and not self.gone(other, 0.0)]
        return (name, *(other for other in others if self._host_of(other) == host))

    def account(self, name: str) -> str:
        """Return what Slurm reports of a job that was ended, and of its host."""
        job, host = self._job_of[name].job_id, self._at.get(name, "")
        # It takes Slurm a moment to notice.
        holds(lambda: _state_of_job(job)[0] != "RUNNING", ACCOUNT_SECONDS, LOOK_SECONDS)
        text = f"job {job} is {_state_of_job(job)[0]}"
        return f"{text}, host {host} is {_state_of(host)}" if host else text

    def _end_without_notice(self, names: Collection[str]) -> None:
        """Make nodes end at once on the SIGTERM that Slurm sends first, instead of leaving."""
        client, addresses = self.client, [self._processes[name].address for name in names]
        choices = {"workers": addresses, "on_error": "ignore", "callback_timeout": ANSWER_SECONDS}
        with contextlib.suppress(TimeoutError):  # one that does not answer cannot leave either
            client.sync(client.run, _end_by_sigterm, **choices)

    def _give_back(self, host: str) -> None:
        with self._taking:
            down = self._down.pop(host, None)
        if down is not None:
            down.give_back()

    # -- where jobs are --------------------------------------------------------------------------

    def _submit(self, node: NodeSpec, directives: Sequence[str] = ()) -> None:
        avoid = self._to_avoid(node)
        super()._submit(node, [f"--exclude={','.join(avoid)}"] if avoid else directives)
        if avoid:
            job = self._job_of[node.name].job_id
            update = ("scontrol", "update", f"jobid={job}", "excnodelist=")  # if it still waits
            timer = threading.Timer(SPREAD_SECONDS, run_command, update, {"check": False})
            timer.daemon = True
            timer.start()
            self._spreading.append(timer)

    def _cancel(self) -> None:
        for timer in self._spreading:
            timer.cancel()
        try:
            super()._cancel()
        finally:
            for host in list(self._down):
                self._give_back(host)

    def _to_avoid(self, node: NodeSpec) -> list[str]:
        """Return the hosts of nodes that must not fail with this one, if it can start elsewhere."""
        options = self.jobs.options(node)
        if any(line.startswith(_CHOOSING) for line in options["directives"]):
            return []  # the user has chosen hosts
        others = self._specs.keys() - self._lost - {node.name}
        beside = {self._at[o] for o in others if must_be_apart(node.name, o) and o in self._at}
        if not beside:
            return []
        megabytes = parse_bytes(options["memory"]) / 2**20
        room = hosts_with_room(options.get("queue"), options["cores"], megabytes)
        return sorted(beside) if room - beside else []

    def _host_of(self, name: str) -> str:
        if name not in self._at:
            _, host = _state_of_job(self._job_of[name].job_id)
            self._at[name] = host or super()._host_of(name)
        return self._at[name]

    def _waiting(self) -> set[str]:
        """Return nodes that have not joined; resubmit, once, jobs that ended or are misplaced."""
        jobs = {name: self._job_of[name].job_id for name in self._specs if name not in self._at}
        states = job_states(jobs.values()) if jobs else {}
        for name, job in jobs.items():
            state, host = states.get(job, ("", ""))
            if state == "RUNNING":
                self._at[name] = host
            if name in self._again:
                if state in _OVER:
                    raise CapacityError(
                        f"the job of {name} (job {job}) and its predecessor ended before they "
                        f"became a node; state: {state}; see its log"
                    )
            # Only a job that has just started is worth an `sinfo`.
            elif state in _OVER or (
                state == "RUNNING" and host in self._to_avoid(self._specs[name])
            ):
                run_command("scancel", job, check=False)
                with self._lock:
                    self._processes.pop(name, None)
                    self._at.pop(name, None)
                self._again.add(name)
                self._submit(self._specs[name])
        return super()._waiting() | (self._specs.keys() - self._at.keys())


def job_states(jobs: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the state of each known job by its number, and its present or last host, or ""."""
    wanted = ",".join(jobs)
    # squeue fails if it has forgotten all of them.
    shown = run_command("squeue", "-h", "-t", "all", "-j", wanted, "-o", "%i|%T|%N", check=False)
    rows = (line.split("|") for line in shown.splitlines())
    return {job: (state, host) for job, state, host in rows}


def _state_of_job(job: str) -> tuple[str, str]:
    return job_states([job]).get(job, ("forgotten", ""))


def hosts_with_room(partition: str | None, cores: int, megabytes: float) -> set[str]:
    """Return the hosts of a partition with room for a job; None: of the default partition."""
    # The state of a host alone does not show that. A host is "alloc" for a while after its first
    # job has started, and "comp" while jobs are ending, however much of it is free.
    form = ",".join(f"{column}:60" for column in _COLUMNS)
    hosts = set()
    for line in run_command("sinfo", "-h", "-N", "-O", form).splitlines():
        name, host, state, cpus, memory, taken = line.split()
        right = name.endswith("*") if partition is None else name.rstrip("*") == partition
        idle, free = int(cpus.split("/")[1]), float(memory) - float(taken)
        if right and state in _OPEN and idle >= cores and free >= megabytes:
            hosts.add(host)
    return hosts


class _HostDown:
    """A host that is down until `give_back`, or until this process ends, however it ends."""

    def __init__(self, host: str, nodes: set[str]) -> None:
        self.nodes = nodes  # those that have not been reported yet
        self._host = host
        # A shell whose input ends with this process, and which an interrupt does not reach.
        self._waiting = subprocess.Popen(
            ["sh", "-c", f"cat > /dev/null; exec scontrol update nodename={host} state=resume"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            down = ("state=down", "reason=dps: a planned fault")
            _scontrol("update", f"nodename={host}", *down)
        except ConfigurationError:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Set the host up again, and wait until jobs can start there."""
        # A failure means that it is up already: Slurm may be configured to resume hosts.
        self._waiting.communicate(timeout=COMMAND_SECONDS)
        holds(lambda: _state_of(self._host) in _UP, BACK_SECONDS, LOOK_SECONDS)


def _state_of(host: str) -> str:
    """Return the state of a host, such as "MIXED" or "IDLE*+DRAIN"; "unknown" without one."""
    # Not from `sinfo`, which still reports a host as in use for a moment after it is down.
    shown = run_command("scontrol", "show", "node", "-o", host, check=False)
    match = re.search(r" State=(\S+)", shown)
    return match[1] if match else "unknown"


def _scontrol(*words: str) -> None:
    try:
        run_command("scontrol", *words)
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split())
        raise ConfigurationError(f"Slurm refused `scontrol {' '.join(words)}`: {reason}") from error


async def _end_by_sigterm() -> None:
    """Restore the default action of SIGTERM; runs in the main thread of a node's process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
