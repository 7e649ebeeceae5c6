"""What Slurm knows of hosts: which one a job is on, which have room, and taking one away.

A host that was taken away is given back in any case: by who took it, else by a process of its own
that notices the end of this one.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dps.errors import ConfigurationError

COMMAND_SECONDS = 30.0
BACK_SECONDS = 10.0
LOOK_SECONDS = 0.1
REASON = "dps: a fault that is planned"
_OVER = ("CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "COMPLETED", "BOOT_FAIL")
_UP = ("IDLE", "MIXED", "ALLOCATED", "IDLE+COMPLETING", "MIXED+COMPLETING")
_OPEN = ("idle", "mix", "mix-", "alloc", "alloc+", "comp", "plnd")  # some planned by backfill
_COLUMNS = ("Partition", "NodeList", "StateCompact", "CPUsState", "Memory", "AllocMem")
_WIDTH = 60


@dataclass(frozen=True, slots=True)
class JobState:
    """What Slurm says of a job: its state, and the host that it is or was on ("": none yet)."""

    state: str
    host: str

    @property
    def over(self) -> bool:
        """Whether it has ended, and will not start again by itself."""
        return self.state in _OVER


class Hosts:
    """The hosts that jobs run on. Thread-safe."""

    def __init__(self) -> None:
        self._taken: dict[str, _Taken] = {}
        self._lock = threading.RLock()

    def of(self, jobs: Iterable[str]) -> dict[str, JobState]:
        """Return what Slurm says of jobs, by their numbers; of those that it knows still."""
        wanted = ",".join(jobs)
        # It fails if it knows none of them any more.
        shown = _run("squeue", "-h", "-t", "all", "-j", wanted, "-o", "%i|%T|%N", check=False)
        rows = (line.split("|") for line in shown.splitlines())
        return {job: JobState(state, host) for job, state, host in rows}

    def with_room(self, partition: str | None, cores: int, megabytes: float) -> set[str]:
        """Return the hosts of a partition with room for a job; None: of the default partition.

        The state of a host alone does not tell: for a while after its first job has started it is
        "alloc", and "comp" while jobs are ending, however much of it is free.
        """
        form = ",".join(f"{column}:{_WIDTH}" for column in _COLUMNS)
        found = set()
        for line in _run("sinfo", "-h", "-N", "-O", form).splitlines():
            name, host, state, cpus, memory, taken = line.split()
            right = name.endswith("*") if partition is None else name.rstrip("*") == partition
            idle, free = int(cpus.split("/")[1]), float(memory) - float(taken)
            if right and state in _OPEN and idle >= cores and free >= megabytes:
                found.add(host)
        return found

    def requeue(self, job: str) -> None:
        """End a job, and have it start again by itself; raises `ConfigurationError`."""
        _told("update", f"jobid={job}", "requeue=1")  # else only a job that was submitted so
        _told("requeue", job)

    def anywhere(self, job: str) -> None:
        """Let a job start on any host, if it waits still."""
        _run("scontrol", "update", f"jobid={job}", "excnodelist=", check=False)

    def cancel(self, job: str) -> None:
        """End a job for good."""
        _run("scancel", job, check=False)

    def has_taken(self, host: str) -> bool:
        """Whether a host is down by `take`."""
        return host in self._taken

    def take(self, host: str, ours: Collection[str]) -> None:
        """Set a host down, with which all of its jobs are lost, if it is not down already.

        Raises
        ------
        ConfigurationError
            Slurm refuses; or there are jobs on it besides `ours`.
        """
        with self._lock:
            if host in self._taken:
                return
            others = set(
                _run("squeue", "-h", "-t", "running", "-w", host, "-o", "%A").split()
            ) - set(ours)
            if others:
                raise ConfigurationError(
                    f"host {host} has jobs of others, who would lose them: "
                    f"{', '.join(sorted(others))}"
                )
            self._taken[host] = _Taken(host)

    def give_back(self, host: str) -> None:
        """Undo `take`, if it was done."""
        with self._lock:
            taken = self._taken.pop(host, None)
        if taken is not None:
            taken.give_back()

    def close(self) -> None:
        """Give all hosts back that were taken."""
        for host in list(self._taken):
            self.give_back(host)

    def account(self, job: str, host: str) -> str:
        """Say what Slurm says of a job and of its host."""
        known = self.of([job]).get(job)
        state = _state_of(host) if host else ""
        told = f"job {job} is {known.state if known else 'forgotten'}"
        return f"{told}, host {host} is {state}" if state else told


class _Taken:
    """A host that is down, until `give_back` or the end of this process, however it ends."""

    def __init__(self, host: str) -> None:
        self._host = host
        resume = ("scontrol", "update", f"nodename={host}", "state=resume")
        wait = ("sh", "-c", 'cat > /dev/null; exec "$@"', "sh")
        # What it reads ends when this process does, and an interrupt does not reach it.
        self._waiting = subprocess.Popen(
            [*wait, *resume],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _told("update", f"nodename={host}", "state=down", f"reason={REASON}")
        except ConfigurationError:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Set the host up again, and wait until jobs can start there."""
        # That it fails means that it is up already: Slurm may be set up to see to that by itself.
        self._waiting.communicate(timeout=COMMAND_SECONDS)
        until = time.monotonic() + BACK_SECONDS
        while _state_of(self._host) not in _UP and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)


def _state_of(host: str) -> str:
    """The state of a host, such as "MIXED" or "IDLE*+DRAIN"; "" if Slurm does not say.

    `sinfo` would tell of one that is down for a moment still how much of it is in use.
    """
    found = re.search(r" State=(\S+)", _run("scontrol", "show", "node", "-o", host, check=False))
    return found[1] if found else ""


def _told(*words: str) -> None:
    try:
        _run("scontrol", *words)
    except subprocess.CalledProcessError as error:
        told = " ".join(error.stderr.split())
        raise ConfigurationError(f"Slurm refused `scontrol {' '.join(words)}`: {told}") from error


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(
        command, check=check, capture_output=True, text=True, timeout=COMMAND_SECONDS
    )
    return done.stdout
