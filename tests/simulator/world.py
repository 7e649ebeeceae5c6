"""A whole group in simulation: coordinator, hosts, driver and workers, as on a Dask cluster.

The world does what Dask and the driver do around the protocol: it starts processes with names and
roles, tells the coordinator of those that are gone, has initial values installed where they are
wanted, and brings fresh nodes up in the place of lost ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

import numpy as np

from dps.core.shard import ShardState
from dps.errors import ConfigurationError, NotServing
from dps.events import Event
from dps.protocol.client.client import Caller, Client
from dps.protocol.client.driver import Bootstrap
from dps.protocol.client.routing_table import Router
from dps.protocol.client.shard_client import OnAck
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.coordinator.losses import Losses
from dps.protocol.coordinator.placement import Rebalancer
from dps.protocol.group import Group
from dps.protocol.messages import AddHosts, Drain, HostInfo, Table, View
from dps.protocol.server.node import ServerNode
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.transport import Endpoint, Watched
from dps.recovery.manifest import Run
from tests.simulator.monitors import SimMonitor, SimMonitors
from tests.simulator.network import Network, Process, SimClock, SimTransport

HOST = "host"
COORDINATOR = Endpoint("sim://scheduler/0", "coordinator")
START_SECONDS = 60.0
DETECTION_SECONDS = 0.05
GLANCE_SECONDS = 0.01
BACK_SECONDS = 0.1  # until a node is there again that was killed by its monitor


class World:
    """A group on simulated processes. Used from one virtual event loop.

    Parameters
    ----------
    group
        Its coordinator is `COORDINATOR`.
    initial
        Each shard's buffer of initial values.
    random
        Draws how long it takes until the coordinator is told of a loss.
    saved
        Each shard's state to go on from instead of the initial values.
    machines
        How many machines all nodes are on; 0: each has one of its own.
    watched
        Whether there is a monitor on each machine.

    Attributes
    ----------
    events
        What the group recorded, in order, each with the name of the process it comes from.
    watchers
        Called with each event as it is recorded, and the process that it comes from.
    on_kill
        Called with each process that a monitor is about to kill.
    tells
        Whether the coordinator is told of connections that break; if not, it has to find out.
    hosts
        The host on each node, dead ones included, by the address of its process.
    clients
        The client in each worker's process, dead ones included.
    drained
        The hosts that are to be emptied, and to have nothing more.
    monitors
        The monitor of each machine, by its name.
    """

    def __init__(
        self,
        group: Group,
        initial: Sequence[np.ndarray],
        network: Network,
        random: Random,
        saved: Sequence[ShardState] = (),
        machines: int = 0,
        watched: bool = False,
    ) -> None:
        self.tells = True
        self.monitors: dict[str, SimMonitor] = {}
        self.network = network
        self.events: list[tuple[str, Event]] = []
        self.watchers: list[Callable[[Process, Event], None]] = []
        self.on_kill: Callable[[Process], None] = _unheard
        self.hosts: dict[str, ShardServer] = {}
        self.clients: dict[Process, Client] = {}
        self.drained: set[Endpoint] = set()
        self._random = random
        self._machines = machines
        self._watched = watched
        self._nodes: dict[str, Process] = {}
        self._started: list[Process] = []
        self._scheduler = network.process("scheduler")
        self.driver = network.process("driver")
        coordinator = Endpoint(self._scheduler.address, COORDINATOR.key)
        self.group = group = replace(group, coordinator=coordinator)
        self._transport = SimTransport(network, self.driver)
        self._router = Router(group, self._transport)
        self._coordinator = self._scheduler.do(self._make_coordinator)
        self._scheduler.services[COORDINATOR.key] = self._coordinator.handle
        self._seeding = self.driver.run(Bootstrap(self._router, initial, saved).run())

    async def start(self, extra: Sequence[str] = ()) -> None:
        """Bring up every node that the group needs, and others; return when all is served."""
        await self.bring_up([*node_names(self.group), *extra])
        async with asyncio.timeout(START_SECONDS):
            await self.complete()

    async def bring_up(self, names: Iterable[str]) -> None:
        """Start fresh nodes, and have the coordinator make use of them."""
        request = AddHosts(tuple(self._start_host(name) for name in names))
        await self._router.ask(request)

    def crash(self, name: str, back_after: float | None = None) -> None:
        """Crash a node; a fresh one takes its place after so many seconds (None: never)."""
        if self.tells:
            self.suspect(name)
        self.network.crash(self._nodes.pop(name))
        if back_after is not None:
            self.driver.run(self._bring_back(name, back_after))

    def crash_process(self, process: Process) -> None:
        """Crash a process whose name another one has now."""
        self._scheduler.run(self._notice(process))
        self.network.crash(process)

    @property
    def processes(self) -> list[Process]:
        """The processes that were started for nodes, dead ones included."""
        return list(self._started)

    def on_machine(self, machine: str) -> list[Process]:
        """The processes of a machine, but for its monitor."""
        return [process for process in self._started if process.machine == machine]

    def lose_monitor(self, machine: str) -> bool:
        """Crash the monitor of a machine; return whether there was one. Another one starts."""
        monitor = self.monitors.pop(machine, None)
        if monitor is not None:
            self.network.crash(monitor.process)
        return monitor is not None

    def lose_power(self, name: str) -> tuple[str, list[Process]]:
        """Crash all nodes on the machine of one, without a sign; return which these were."""
        machine = self._nodes[name].machine
        self.lose_monitor(machine)
        lost = [process for process in self._nodes.values() if process.machine == machine]
        for process in lost:
            del self._nodes[process.name]
            self.network.crash(process, silent=True)
        return machine, lost

    def power_up(self, lost: Iterable[Process], again: Iterable[str]) -> None:
        """Have a machine up again, and fresh nodes with these names on it if the group goes on."""
        for process in lost:
            self.network.reveal(process)
        missing = [name for name in again if name not in self._nodes]
        if missing and self.driver.alive:
            self.driver.run(self.bring_up(missing))

    def end(self, leave_hosts: bool) -> None:
        """End the group, but perhaps its hosts, of which nobody knows any more.

        All workers end with it, also one whose name another process has had since.
        """
        for process in self._started:
            if process.alive and (process.name.startswith("worker") or not leave_hosts):
                self.network.crash(process)
        for machine in list(self.monitors):
            self.lose_monitor(machine)
        self.network.crash(self.driver)
        self.network.crash(self._scheduler)
        self.watchers.clear()

    @property
    def machines(self) -> list[str]:
        """The machines that anything of the group has been on."""
        others = [self._scheduler.machine, self.driver.machine]
        return list(dict.fromkeys([*others, *(process.machine for process in self._started)]))

    def has_ended(self, host: Endpoint) -> bool:
        """Whether it is proven to the coordinator that a host has ended."""
        return host in self._coordinator.members._ended

    def has_given_up(self, process: Process) -> bool:
        """Whether the coordinator counts on the host in a process no more."""
        member = self._coordinator.members._known.get(Endpoint(process.address, HOST))
        return member is None or member.given_up

    def counts_on(self, process: Process) -> bool:
        """Whether the coordinator waits for a process, though it need not for what it holds."""
        if process.name.startswith("worker"):
            return self._coordinator.workers.places.get(process.name) == (process.address, True)
        host = Endpoint(process.address, HOST)
        return not self.has_given_up(process) and not self._coordinator.holds_only_copy(host)

    @property
    def workers(self) -> list[str]:
        """The names of the workers that live."""
        return [name for name in self._nodes if name.startswith("worker")]

    def ask(self, request: Any) -> None:
        """Have the driver ask the coordinator for something, which may refuse it."""
        self.driver.run(self._asked(request))

    async def _asked(self, request: Any) -> bool:
        try:
            await self._router.ask(request)
        except (ConfigurationError, NotServing):
            return False
        return True

    async def drain(self, host: Endpoint) -> bool:
        """Have a host emptied; return when it is, or False if that was refused."""
        return await self.driver.run(self._drained(host))

    async def _drained(self, host: Endpoint) -> bool:
        if not await self._asked(Drain(host)):
            return False
        self.drained.add(host)
        table = await self._router.fetch()
        while host in table.leaving:
            table = await self._router.newer(table.version)
        return True

    def suspect(self, name: str) -> None:
        """Have the coordinator told that a node is lost, whether it is or not."""
        self._scheduler.run(self._notice(self._nodes[name]))

    def process(self, name: str) -> Process | None:
        """The live process of that name, if there is one."""
        return self._nodes.get(name) or {"scheduler": self._scheduler}.get(name)

    def resume_all(self) -> None:
        """Let every process go on that is paused, also those that were given up.

        Of those that ended without a sign it is known from now on, and no task raises any more.
        """
        for process in (*self._started, self._scheduler):
            self.network.resume(process)
            self.network.reveal(process)
            process.doomed_in = 0

    async def bring_back_missing(self) -> None:
        """Start every node that the group needs and does not have."""
        missing = [name for name in node_names(self.group) if name not in self._nodes]
        if missing:
            await self.bring_up(missing)

    @property
    def scaling(self) -> Rebalancer:
        """What the coordinator knows of how many hosts are to hold shards."""
        return self._coordinator.rebalancer

    @property
    def losses(self) -> Losses:
        """What the coordinator knows of acknowledged updates that were lost."""
        return self._coordinator.losses

    @property
    def cuts(self) -> Sequence[int] | None:
        """The cuts that shards may go back to together; None: each goes back by itself."""
        cuts = self._coordinator.cuts
        return cuts._complete if cuts is not None else None

    @property
    def table(self) -> Table:
        """The routing table that the coordinator would give now."""
        return self._coordinator._table()

    def view(self, shard: int) -> View:
        """Who serves a shard, as the coordinator knows it now."""
        return self._coordinator.controllers[shard].view

    def stored(self, shard: int) -> tuple[Endpoint, ...]:
        """The stores that have all that was acked of a shard, as the coordinator knows it."""
        return self._coordinator.controllers[shard].stored

    def hears(self, host: Endpoint) -> bool:
        """Whether the coordinator counts on a host, which is not silent."""
        members = self._coordinator.members
        return host in members and not members[host].silent

    def known_life(self, host: Endpoint) -> int:
        """How often a host has started over, as the coordinator knows it."""
        return self._coordinator.members[host].life

    def name_of(self, endpoint: Endpoint) -> str:
        """Name of the node at the endpoint; "" if it is not alive."""
        found = (n for n, process in self._nodes.items() if process.address == endpoint.address)
        return next(found, "")

    def endpoint(self, name: str) -> Endpoint:
        """Where the host on a live node is called."""
        return Endpoint(self._nodes[name].address, HOST)

    def client(self, worker: str, on_ack: OnAck | None = None) -> tuple[Process, Client]:
        """A fresh worker process, and the client in it."""
        process = self._start_process(worker)
        transport = SimTransport(self.network, process)
        watched = self._watch(process)
        caller = Caller(worker, on_ack=on_ack or (lambda *outcome: None), watched=watched)
        client = Client(self.group, transport, caller)
        self.clients[process] = client
        return process, client

    async def complete(self) -> Table:
        """Wait until every shard is served by all its replicas; return that table."""
        table = await self._router.fetch()
        while not table.complete:
            table = await self._router.newer(table.version)
        return table

    def states(self, view: View) -> list[ShardState]:
        """The state of each replica in a view, from head to tail."""
        return [self.hosts[member.address].replica(view.shard).state for member in view.chain]

    # -- nodes -----------------------------------------------------------------------------------

    def _start_process(self, name: str) -> Process:
        process = self._nodes[name] = self.network.process(name)
        if self._machines:
            process.machine = f"machine-{crc32(name.encode()) % self._machines}"
        self._started.append(process)
        self.network.note("up", name, "", "")
        return process

    def _start_host(self, name: str) -> HostInfo:
        process = self._start_process(name)
        me = Endpoint(process.address, HOST)
        transport = SimTransport(self.network, process)
        clock, sink, watched = SimClock(process), self._sink(process), self._watch(process)
        host = ShardServer(
            ServerNode(self.group, name, me, transport, clock, emit=sink, watched=watched)
        )
        process.services[me.key] = host.handle
        process.do(host.start)
        self.hosts[process.address] = host
        role, _, rest = name.partition("-")
        home = int(rest.partition("-")[0]) if role in ("server", "replica") else -1
        return HostInfo(me, name, role, home, process.machine if self._machines else "")

    def _watch(self, process: Process) -> Callable[[], Watched | None]:
        """Have a process watched by the monitor of its machine, if there are any.

        It asks another one as soon as that is lost.
        """
        known: dict[SimMonitor, Watched] = {}

        def watched() -> Watched | None:
            if not self._watched:
                return None
            monitor = self._monitor_of(process.machine)
            if monitor not in known:
                known[monitor] = monitor.watch(process)
            return known[monitor]

        return watched

    def _monitor_of(self, machine: str) -> SimMonitor:
        if machine not in self.monitors:
            rest = self.network, self.group.coordinator, self.group.timings, self._killed
            start = partial(SimMonitor, machine, *rest)
            self.monitors[machine] = self.network.nowhere.run(start)
        return self.monitors[machine]

    def _killed(self, process: Process) -> None:
        """A stopped process is killed; whatever started it starts another one."""
        self.on_kill(process)
        if self._nodes.get(process.name) is process:
            self.network.nowhere.run(self.crash, process.name, BACK_SECONDS)
        else:
            self.network.nowhere.run(self.network.crash, process)

    async def _notice(self, process: Process) -> None:
        """Have the coordinator told that a connection broke, which a cut keeps from showing."""
        await asyncio.sleep(self._random.uniform(0, DETECTION_SECONDS))
        while self.network.is_cut(process.name, self._scheduler.name):
            await asyncio.sleep(GLANCE_SECONDS)
        await self._coordinator.lose(process.address, "scheduler")

    async def _bring_back(self, name: str, after: float) -> None:
        await asyncio.sleep(after)
        if name not in self._nodes:
            await self.bring_up([name])

    def _make_coordinator(self) -> Coordinator:
        transport = SimTransport(self.network, self._scheduler)
        clock, sink = SimClock(self._scheduler), self._sink(self._scheduler)
        monitors = SimMonitors(transport, self.group.timings)
        return Coordinator(self.group, transport, clock, sink, monitors)

    def _sink(self, process: Process) -> Callable[[Event], None]:
        def record(event: Event) -> None:
            if process.alive:
                self.network.note("event", process.name, "", type(event).__name__)
                self.events.append((process.name, event))
                for watcher in self.watchers:
                    watcher(process, event)

        return record


def node_names(group: Group) -> list[str]:
    """The nodes that a group has on a real cluster: one a replica or as chosen, and the stores'."""
    shards = range(len(group.layout.shards))
    stores = [f"store-{number}" for number in range(group.recovery.stores)]
    if group.servers is not None:
        servers = [f"server-{number}" for number in range(group.servers)]
        return servers + stores
    servers = [f"server-{shard}" for shard in shards]
    replicas = [f"replica-{shard}-{i}" for shard in shards for i in range(1, group.replicas)]
    return servers + replicas + stores


def _unheard(process: Process) -> None:
    pass


def run_of(group: Group, generation: int, started: float, about: str = "{}") -> Run:
    """What a driver writes beside a group's checkpoints."""
    return Run(
        group.name,
        generation,
        started,
        group.layout,
        group.rule,
        group.consistency,
        group.recovery,
        about,
        group.filters,
        group.servers,
        group.pull_filters,
        group.placement,
    )
