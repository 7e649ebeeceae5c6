"""A cluster of Slurm's jobs: away from each other on hosts, requeued, lost with their host.

Nodes that must not fail together are kept on different hosts where Slurm has room on others: which
host a job gets is only known when it has started, so one that starts beside such a node is
submitted again, with the hosts that it must not get.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from distributed.security import Security

from dps.cluster.backends.assignment import bound
from dps.cluster.backends.base import Act
from dps.cluster.backends.jobqueue import QUEUES, JobGroup, directives_of, room_for
from dps.cluster.backends.jobs import JobCluster
from dps.cluster.backends.slurm import Hosts, JobState
from dps.cluster.names import NodeSpec
from dps.core.names import predecessor, replacement
from dps.errors import CapacityError

LOOK_SECONDS = 0.3
SPREAD_SECONDS = 20.0  # how long a job is kept from hosts that have room, if others get none
ACCOUNT_SECONDS = 2.0
ANSWER_SECONDS = 2.0
_CHOOSING = ("-x", "--exclude", "-w", "--nodelist")


class SlurmCluster(JobCluster):
    """Nodes as jobs of Slurm; see `JobCluster`."""

    def __init__(
        self,
        groups: Mapping[str, JobGroup],
        nodes: Sequence[NodeSpec],
        interface: str | None,
        security: Security | None,
        patience: float,
        tell: Callable[[str], None],
    ) -> None:
        self._hosts = Hosts()
        self._at: dict[str, str] = {}
        self._again: set[str] = set()
        self._spreading: list[threading.Timer] = []
        self._down: dict[str, set[str]] = {}
        self._taking = threading.Lock()
        self._looked = 0.0
        try:
            super().__init__(QUEUES["slurm"], groups, nodes, interface, security, patience, tell)
        except BaseException:
            self._forget_timers()
            raise

    def close(self) -> None:
        """Cancel every job, end the scheduler, and give hosts back that were taken away."""
        self._forget_timers()
        try:
            super().close()
        finally:
            self._hosts.close()

    def start(self, node: NodeSpec) -> None:
        """Submit a job for one more node; if it replaces one whose host is down, that is set up.

        Errors are those of `JobCluster.start`.
        """
        before = predecessor(node.name)
        if before != node.name and before in self._at:
            self._hosts.give_back(self._at[before])
        super().start(node)

    def obstacle(self, name: str, act: Act) -> str | None:
        """Why something cannot be done to a node's process; None: it can, as far as is known."""
        return None if act in ("requeue", "host") else super().obstacle(name, act)

    def requeue(self, name: str) -> int:
        """End a node's job, which Slurm starts again: as for `Cluster.requeue`."""
        node, job = self.living(name), self._jobs[name]
        again = replace(node.spec, name=replacement(name))
        with self._lock:
            self._specs[again.name], self._jobs[again.name] = again, job
        self._end_without_notice([name])
        self._hosts.requeue(job.job_id)
        return node.process.pid

    def take_host(self, name: str) -> int:
        """Set a node's host down, which has to have no jobs of others: as for `Cluster.take_host`.

        Slurm allows it to its administrators.
        """
        pid, host = self._nodes[name].process.pid, self._host_of(name)
        with self._taking:
            lost = self._down.get(host, set())
            if not self._hosts.has_taken(host) or name not in lost:
                self.living(name)
                lost = set(self.on_host_of(name))
                self._end_without_notice(lost)
                self._hosts.take(host, [job.job_id for job in self._jobs.values()])
            self._down[host] = lost - {name}
        return pid

    def _end_without_notice(self, names: Collection[str]) -> None:
        """Have nodes end by the SIGTERM that Slurm sends first, and take it for no notice."""
        self.client.sync(self._forgo_notice, [self._nodes[name].address for name in names])

    async def _forgo_notice(self, addresses: list[str]) -> None:
        with contextlib.suppress(TimeoutError):  # whoever does not answer takes no notice either
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.client.run(_end_by_sigterm, workers=addresses, on_error="ignore")

    def on_host_of(self, name: str) -> tuple[str, ...]:
        """The living nodes on the host of a node, and itself."""
        if name not in self._nodes:
            return (name,)
        host = self._host_of(name)
        others = [other for other in self._nodes if not self.gone(other, 0.0)]
        return (name, *(o for o in others if o != name and self._host_of(o) == host))

    def account(self, name: str) -> str:
        """What Slurm says of a job that was ended, and of its host, as soon as it has noticed."""
        job, until = self._jobs[name].job_id, time.monotonic() + ACCOUNT_SECONDS
        while time.monotonic() < until:
            known = self._hosts.of([job]).get(job)
            if known is None or known.state != "RUNNING":
                break
        return self._hosts.account(job, self._at.get(name, ""))

    # -- where jobs are --------------------------------------------------------------------------

    def _submit(self, node: NodeSpec, group: JobGroup) -> None:
        avoid = self._to_avoid(node)
        if avoid:
            group = replace(group, directives=(*group.directives, f"--exclude={','.join(avoid)}"))
        super()._submit(node, group)
        if avoid:
            job = self._jobs[node.name].job_id
            timer = threading.Timer(SPREAD_SECONDS, self._hosts.anywhere, [job])
            timer.daemon = True
            timer.start()
            self._spreading.append(timer)

    def _forget_timers(self) -> None:
        for timer in self._spreading:
            timer.cancel()

    def _to_avoid(self, node: NodeSpec) -> list[str]:
        """The hosts of nodes that must not fail with this one, if it could start elsewhere."""
        group = self._groups[node.resource]
        if any(line.startswith(_CHOOSING) for line in directives_of(self._queue, group)):
            return []  # whoever says so much knows better
        others = self._specs.keys() - self._lost - {node.name}
        beside = {self._at[o] for o in others if bound(node.name, o) and o in self._at}
        room = self._hosts.with_room(*room_for(self._queue, group, node)) if beside else set()
        return sorted(beside) if room - beside else []

    def _host_of(self, name: str) -> str:
        if name not in self._at:
            job = self._jobs[name].job_id
            known = self._hosts.of([job]).get(job)
            self._at[name] = known.host if known is not None else super()._host_of(name)
        return self._at[name]

    def _waiting(self) -> set[str]:
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            self._look()
        return super()._waiting() | (self._specs.keys() - self._at.keys())

    def _look(self) -> None:
        """See which jobs have started, and submit those again that are in the wrong place."""
        jobs = {name: self._jobs[name].job_id for name in self._specs if name not in self._at}
        if not jobs:
            return
        states = self._hosts.of(jobs.values())
        for name, job in jobs.items():
            if job in states:
                self._judge(name, job, states[job])

    def _judge(self, name: str, job: str, state: JobState) -> None:
        again = name in self._again
        if state.over:
            if again:
                raise CapacityError(
                    f"the job of {name} (job {job}) has ended, as the one before, before it could "
                    f"become a node: it is {state.state}; look at its log"
                )
            self._submit_again(name)
        elif state.state == "RUNNING":
            self._at[name] = state.host
            if not again and state.host in self._to_avoid(self._specs[name]):
                self._hosts.cancel(job)
                self._submit_again(name)

    def _submit_again(self, name: str) -> None:
        with self._lock:
            self._nodes.pop(name, None)
            self._at.pop(name, None)
        self._again.add(name)
        spec = self._specs[name]
        self._submit(spec, self._groups[spec.resource])


async def _end_by_sigterm() -> None:
    """Runs in a node's process, on its event loop: that is in the main thread there."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
