"""One trial of the emulation: the driver that brings nodes up, has them train, and kills.

As in the published code, the driver does the killing, waits for a time that was typed in, and only
then makes the new server. That time stands for finding out that a server is gone.
"""

from __future__ import annotations

import logging
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.inbox import Inbox
from dps.cluster.names import NodeSpec
from dps.cluster.platform import SystemClock
from dps.core.names import replacement
from dps.errors import DpsError
from dps.events import (
    CapacityRestored,
    Detected,
    FaultMissed,
    Killed,
    Promoted,
    Restored,
    Sink,
    TrainingStarted,
    TrialEnded,
    TrialStarted,
)
from flows.config.plugins import distributions, modules
from flows.execution.attempt import versions
from flows.execution.preload import PRELOAD
from flows.execution.trial import reason_of
from flows.records.record import EVENTS_FILE, FAILED_ATTEMPTS, EventWriter
from flows.replication.ttf.claims import fixed
from flows.replication.ttf.emulation import nodes
from flows.replication.ttf.emulation.nodes import Place, State
from flows.replication.ttf.emulation.settings import PublishedTrial
from flows.workloads import with_torch

PROOF_SECONDS = 5.0
START_SECONDS = 60.0
LOOK_SECONDS = 0.01
CHAIN = ("server-0", "replica-0-1", "replica-0-2")


class RemoteFailure(DpsError):
    """A task or an actor of the emulation failed on its node."""


def run_published(trial: PublishedTrial, folder: Path, failed_before: int = 0) -> None:
    """Run one trial and record it in `folder`, as `flows.execution.trial.run_trial` does for the
    real dps.

    Recorded with it is how many attempts at it failed before.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # a lost node is no news here
    clock = SystemClock()
    with EventWriter(folder / EVENTS_FILE) as record:
        torch = trial.config.workload.kind in with_torch.KINDS
        told = {**trial.settings(), "circumstances": {FAILED_ATTEMPTS: failed_before, **fixed()}}
        software = versions(torch, distributions(trial.config))
        record(TrialStarted(clock.now(), trial.name, told, software))
        status, reason = "valid", ""
        try:
            preload = (
                *PRELOAD,
                *modules(trial.config),
                "flows.replication.ttf.emulation.nodes",
                *(with_torch.PRELOAD if torch else ()),
            )
            specs = [NodeSpec(name, name) for name in _names(trial)]
            with LocalCluster(specs, preload) as cluster:
                reason = _Run(trial, cluster, record).run()
                status = "invalid" if reason else "valid"
        except Exception as error:  # noqa: BLE001 (whatever an actor raised must not stop the others)
            status, reason = "failed", reason_of(error, folder)
        if record.failure is not None:
            status, reason = "failed", f"StoreUnavailable: {record.failure}"
        record.end(TrialEnded(clock.now(), status, reason))


def _names(trial: PublishedTrial) -> tuple[str, ...]:
    serving = CHAIN if trial.mechanics == "chain" else ("server-0", "store-0")
    return (*serving, "worker-0")


class _Run:
    """One trial on its cluster; every node has its name as a Dask resource as well."""

    def __init__(self, trial: PublishedTrial, cluster: LocalCluster, record: Sink) -> None:
        self.trial, self.config, self.record = trial, trial.config, record
        self.cluster, self.client, self.clock = cluster, cluster.client, SystemClock()
        self.group = uuid.uuid4().hex
        self.actors: dict[str, Any] = {}
        self.epoch, self.kills, self.number, self.missed = 1, 0, 0, ""
        self.version = 0  # that the server is at

    def run(self) -> str:
        """Train for the time of the trial; return why it is invalid, or nothing."""
        inbox = Inbox(self.client, self.group, self.record)
        inbox.open()
        try:
            {"checkpoint": self._checkpoint, "chain": self._chain, "stateless": self._stateless}[
                self.trial.mechanics
            ]()
            for future in list(self.actors.values()):
                if future.done():  # a new replica may still be starting: it is of no use any more
                    self.ask(self._joined(future), "finish")
        finally:
            self.client.sync(inbox.close)
        if not self.missed and self.kills < self.trial.kills:
            self._miss(f"only {self.kills} of {self.trial.kills} kills came before the end")
        return self.missed

    # -- the three algorithms ----------------------------------------------------------------------

    def _checkpoint(self) -> None:
        saver = self._up("store-0", "store", nodes.Saver)
        server = self._server("server-0", "server", State(self._initial(), 0), saver)
        self._begin(server)
        while self.clock.monotonic() < self.end:
            if self._due():
                self._kill(server, self.version)
                self._notice_after(self.config.recovery)
                # The published rule: only the last recovery restores, the others start afresh.
                saved = self.ask(saver, "load") if self.kills == self.trial.kills else None
                state = saved or State(self._initial(), 0)
                server = self._server(replacement(server.node), "server", state, saver)
                self._serves(server, state.version, "checkpoint" if saved else "initial")
            self._step(server)

    def _chain(self) -> None:
        state = State(self._initial(), 0)
        roles = ("server", "replica", "replica")
        chain = [
            self._server(name, role, state, None) for name, role in zip(CHAIN, roles, strict=True)
        ]
        for ahead, behind in pairwise(chain):
            self.ask(ahead, "follow", behind)
        self._begin(chain[0])
        joining: tuple[float, Any] | None = None
        while self.clock.monotonic() < self.end:
            if self._due():
                lost = chain.pop(0)
                joining = (self._later(self.config.recovery), replacement(lost.node))
                self._kill(lost, self.version)
                self._notice_after(self.config.session)
                self._takes_over(chain[0])
            if joining and isinstance(joining[1], str) and self.clock.monotonic() > joining[0]:
                arguments = (self.config, self.epoch, state, None)
                joining = (0.0, self._start(joining[1], "replica", nodes.Server, *arguments))
            if joining and not isinstance(joining[1], str) and joining[1].done():
                chain.append(self._joined(joining[1]))
                self.ask(chain[-2], "follow", chain[-1])
                joining = None
            self._step(chain[0])

    def _stateless(self) -> None:
        store = self._up("store-0", "store", nodes.Store, State(self._initial(), 0))
        server = self._up("server-0", "server", nodes.StatelessServer, self.config, 1, store)
        arguments = (self.config, self.trial.seed, self.group, store)
        self._begin(server)
        working = self.client.submit(nodes.work, *arguments, resources={"worker-0": 1}, pure=False)
        while self.clock.monotonic() < self.end and not working.done():
            if self._due():
                self._kill(server, self.ask(store, "read").version)
                self._notice_after(self.config.recovery)
                version = self.ask(store, "read").version  # before the new server goes on from it
                name = replacement(server.node)
                kind = nodes.StatelessServer
                server = self._up(name, "server", kind, self.config, self.epoch, store)
                self._serves(server, version, "store")
            time.sleep(LOOK_SECONDS)
        self.ask(store, "close")
        _result(working)

    # -- parts -------------------------------------------------------------------------------------

    def _begin(self, server: Place) -> None:
        """Start the clock, once the worker is ready."""
        self._up("worker-0", "worker", nodes.Member)
        warm = self.client.submit(nodes.warm_up, self.config, resources={"worker-0": 1}, pure=False)
        _result(warm)
        now = self.clock.now()
        parameters = sum(array.size for array in self._initial().values())
        self.record(TrainingStarted(now, 1, 1, parameters))
        self.record(Restored(now, 0, 1, server.node, 0, "initial"))
        self.end = self._later(self.config.seconds)
        self.next_kill = self._later(self.config.kill_after)

    def _step(self, server: Place) -> None:
        """Have one gradient computed and applied, in a task of its own."""
        arguments = (self.config, self.trial.seed, self.number, server)
        task = self.client.submit(
            nodes.one_gradient, *arguments, resources={"worker-0": 1}, pure=False
        )
        self.version, seconds = _result(task)
        now = self.clock.now()
        self.record(nodes.acked(now, self.number, self.version, "applied"))
        self.record(nodes.reported(now, self.number, seconds))
        self.number += 1

    def _due(self) -> bool:
        return self.kills < self.trial.kills and self.clock.monotonic() >= self.next_kill

    def _kill(self, place: Place, version: int) -> None:
        """Kill a node, which holds this version, with SIGKILL and see that its process is gone."""
        began, number = self.clock.now(), self.kills
        pid = self.cluster.kill(place.node)
        gone = self.cluster.gone(place.node, PROOF_SECONDS)
        del self.actors[place.node]
        self.kills += 1
        self.record(Killed(began, number, place.node, pid, version, gone))
        if not gone:
            self._miss(f"process {pid} was still there {PROOF_SECONDS:g} s later", place.node)
        self.lost = place.node

    def _miss(self, reason: str, node: str = "server-0") -> None:
        self.missed = f"fault on {node}: {reason}"
        self.record(FaultMissed(self.clock.now(), self.kills, node, reason))

    def _notice_after(self, seconds: float) -> None:
        """Wait for as long as the paper says that it takes to go on."""
        time.sleep(self.config.scaled(seconds))
        self.epoch += 1
        now = self.clock.now()
        self.record(Detected(now, 0, self.epoch, self.lost, False, "coordinator"))

    def _takes_over(self, successor: Place) -> None:
        self.version = self.ask(successor, "promote", self.epoch)
        self.record(Promoted(self.clock.now(), 0, self.epoch, successor.node, self.version))
        self.next_kill = self._later(self.config.kill_after)

    def _serves(self, server: Place, version: int, source: str) -> None:
        self.version, now = version, self.clock.now()
        self.record(CapacityRestored(now, self.kills - 1, server.node))
        self.record(Restored(now, 0, self.epoch, server.node, version, source))
        self.next_kill = self._later(self.config.kill_after)

    def _server(self, name: str, role: str, state: State, saver: Place | None) -> Place:
        return self._up(name, role, nodes.Server, self.config, self.epoch, state, saver)

    def _up(self, name: str, role: str, kind: type, *args: Any) -> Place:
        return self._joined(self._start(name, role, kind, *args))

    def _start(self, name: str, role: str, kind: type, *args: Any) -> Any:
        if name not in self.cluster.pids:
            self.cluster.start(NodeSpec(name, name))
        future = self.client.submit(
            kind, self.group, name, role, *args, actor=True, resources={name: 1}, pure=False
        )
        self.actors[name] = future
        return future

    def _joined(self, future: Any) -> Place:
        _result(future)
        return self._place(next(name for name, f in self.actors.items() if f is future))

    def _place(self, name: str) -> Place:
        future = self.actors[name]
        where = self.client.who_has([future])
        return Place(name, next(iter(where.values()))[0], future.key)

    def ask(self, place: Place, method: str, *args: Any) -> Any:
        """Call an actor from the driver, and wait."""
        return self.client.sync(nodes.call, self.client.rpc, place, method, *args)

    def _initial(self) -> Any:
        return nodes.initial(self.config, self.trial.seed, self.kills)

    def _later(self, seconds: float) -> float:
        return self.clock.monotonic() + self.config.scaled(seconds)


def _result(future: Any) -> Any:
    """Wait for a task; what fails on a node fails the trial, and not what comes after it."""
    error = future.exception(START_SECONDS)
    if error is not None:
        raise RemoteFailure(f"a task of the emulation failed: {error!r}") from error
    return future.result()
