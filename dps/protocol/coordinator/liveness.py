"""Liveness: the state of every process, the evidence for it, and what follows.

==============  ==========================================  ========================================
state           evidence                                    what follows
==============  ==========================================  ========================================
dead            its port refuses connections, or the        it is given up at once
                monitor of its host has seen it end
stopped         the monitor sees it stopped for             a host is killed by its monitor, so that
                `Timings.stopped` seconds                   it is dead; a worker is evicted
busy            it does not answer, and the monitor sees    its lease is extended, up to
                it running                                  `Timings.patience` seconds
unreachable     it and its monitor do not answer            it is given up when its lease is over
==============  ==========================================  ========================================

A host that holds anything is given up only when its end is proven or its lease is over, so it never
serves beside its replacement (see `dps.protocol.lease` and `dps.protocol.monitor`). A host that
holds the only copy of a state, or is the only node that can be a store, is never killed. The
coordinator waits for it as long as its monitor sees its process, and for `Timings.last_copy`
seconds if it is unreachable.

A live host that was given up learns that when it renews its lease. Then it drops all that it held
and starts over in a new *life*, as an empty host.

A paused server that resumes is harmless for five reasons. Its own lease ends before the
coordinator's, and it checks the lease before each reply; its monitor may have killed it; its
successors serve in a later epoch; members of the chain refuse its operations; stores refuse its
states.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dps.errors import DpsError, TransportError
from dps.protocol.lease import Leases
from dps.protocol.messages import HostInfo, LookUp
from dps.protocol.monitor import Sighting
from dps.protocol.transport import Endpoint, Watched

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator

# A process that was killed may hold its port for a moment longer than its connections.
FIRST_PROBE = 0.002
LAST_PROBE = 0.05


@dataclass(slots=True)
class Member:
    """A known host; the coordinator waits for one that is `silent`, beyond its lease."""

    life: int
    info: HostInfo | None = None  # None until its role is known
    given_up: bool = False  # in its present life, as the next one
    excluded: bool = False  # as out of reach for its predecessor
    silent: bool = False
    halted: bool = False  # it was stopped when last seen, or did not answer a call
    seen: float = -math.inf  # the monotonic time at which its monitor last saw its process
    watched: Watched | None = None

    @property
    def is_listed(self) -> bool:
        """Whether it may be used."""
        return self.info is not None and not self.given_up and not self.excluded


_UNKNOWN = Member(life=0, given_up=True)


class Membership:
    """The hosts of a group, and their `leases`. All calls come from one event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._timings = coordinator.group.timings
        self._clock = coordinator.clock
        self._known: dict[Endpoint, Member] = {}
        self.leases = Leases[Endpoint](self._timings, self._clock)
        self._ended: set[Endpoint] = set()
        self._ended_at: set[str] = set()
        self._probed: set[str] = set()
        self._killed: set[Watched] = set()
        coordinator.tasks.keep(lambda: self.leases.watch(self._over), self._timings.retry)

    @property
    def hosts(self) -> dict[Endpoint, HostInfo]:
        """The hosts that may be used."""
        return {h: m.info for h, m in self._known.items() if m.is_listed and m.info is not None}

    def __getitem__(self, host: Endpoint) -> Member:
        return self._known.get(host, _UNKNOWN)

    def __contains__(self, host: Endpoint) -> bool:
        return self[host].is_listed

    def node(self, host: Endpoint) -> str:
        """Return the name of a host's node; "" if the host may not be used."""
        return self.hosts[host].node if host in self else ""

    def answers(self, host: Endpoint) -> bool:
        """Whether a host has recently asked for its lease, and was not stopped when last seen."""
        return self.leases.silence(host) < self._timings.lease / 2 and not self[host].halted

    def is_live(self, host: Endpoint) -> bool:
        """Whether a host answers, or was recently seen running."""
        quiet = min(self.leases.silence(host), self._unseen_for(host))
        return quiet < self._timings.lease / 2 and not self[host].halted

    async def add(self, infos: Iterable[HostInfo]) -> None:
        """Add hosts, except those that are known to have ended."""
        # A host at the address of an ended process is checked: it is new, or has ended too.
        for info in infos:
            if info.host.address in self._ended_at:
                self.suspect(info.host.address, "coordinator")
            if info.host not in self._ended:
                member = self._known.setdefault(info.host, Member(life=0))
                member.info = info
                if not member.given_up:
                    self.leases.grant(info.host)
        await self._coordinator.use_hosts()

    async def renew(self, host: Endpoint, life: int, watched: Watched | None = None) -> bool:
        """Renew a lease; False if the host was given up and has to start over."""
        if host in self._ended:
            return False  # a message that was under way when the process ended
        member = self._known.setdefault(host, Member(life))
        member.watched = watched
        # The request may be older than the monitor's report that the process is stopped.
        member.halted = member.halted and self._unseen_for(host) < self._timings.lease
        if life > member.life:
            # It has dropped all that it held, so there is nothing to wait for.
            lost = member.info if not member.given_up else None
            member.life, member.given_up, member.excluded, member.silent = life, False, False, False
            if lost is not None:
                await self._coordinator.lose_host(lost, "host")
            await self._coordinator.use_hosts()
        elif life < member.life or member.given_up:
            return False
        elif member.excluded:
            if not self._coordinator.holds_only_copy(host):
                return False
            member.excluded = False  # the others were lost before it learned of this
        self.leases.grant(host)
        if member.silent:
            member.silent = False
            await self._coordinator.use_hosts()
        return host not in self._ended  # its end may have been seen since

    async def sighted(self, watched: Watched, sighting: Sighting) -> None:
        """Process a monitor's report on a process."""
        hosts = [host for host, member in self._known.items() if member.watched == watched]
        if sighting.state == "gone":
            await self._end(hosts, "monitor")
            return
        for host in hosts:
            self._known[host].seen = self._clock.monotonic()
            self._known[host].halted = sighting.state == "stopped"
        if sighting.state == "running":
            for host in hosts:
                self.leases.vouch(host)
        elif sighting.seconds >= self._timings.stopped:
            await self._have_stopped(watched, hosts)

    def suspect(self, address: str, by: str) -> None:
        """Check whether the process at an address has ended; if so, give its hosts up."""
        if address not in self._probed:
            self._probed.add(address)
            self._coordinator.tasks.start(self._probe(address, by))

    # -- losses ----------------------------------------------------------------------------------

    async def _probe(self, address: str, by: str) -> None:
        pause = FIRST_PROBE
        try:
            while pause < self._timings.lease:  # after that, it has answered or its lease is over
                if await self._end_if_gone(address, by):
                    return
                await asyncio.sleep(min(pause, LAST_PROBE))
                pause *= 1.2
        finally:
            self._probed.discard(address)

    async def _end_if_gone(self, address: str, by: str) -> bool:
        gone = await self._coordinator.transport.gone(address)
        if gone:
            self._ended_at.add(address)
            hosts = [host for host in self._known if host.address == address]
            await asyncio.shield(self._end(hosts, by))
        return gone

    async def _end(self, hosts: Collection[Endpoint], by: str) -> None:
        self._ended.update(hosts)
        self._ended_at.update(host.address for host in hosts)
        members = [member for host in hosts if (member := self._known.pop(host, None))]
        for host in hosts:
            self.leases.end(host)
        for member in members:
            if member.info is not None and not member.given_up:
                await self._coordinator.lose_host(member.info, by)

    async def _have_stopped(self, watched: Watched, hosts: Iterable[Endpoint]) -> None:
        """Kill a stopped process, unless it has the only copy of a state, or holds nothing."""
        listed = [host for host in hosts if host in self]
        if any(self._coordinator.holds_only_copy(host) for host in listed):
            for host in listed:
                await self._fall_silent(host, "monitor")
        elif any(map(self._holds_anything, listed)):
            if watched not in self._killed:
                self._killed.add(watched)
                self._coordinator.tasks.start(self._kill(watched, listed))
        else:
            for host in listed:
                # This may have changed while another host was given up.
                if host in self and not self._holds_anything(host):
                    await self._give_up(host, "monitor")

    async def _kill(self, watched: Watched, hosts: Collection[Endpoint]) -> None:
        """Kill a process, unless its hosts turn out to have the only copy of a state."""
        # If the coordinator was paused, other hosts may have ended unnoticed: it calls them first.
        chains = [view.chain for view in self._coordinator.views if {*view.chain} & {*hosts}]
        others = {host for chain in (*chains, self._coordinator.stores) for host in chain}
        try:
            await asyncio.gather(*(self._check(other) for other in others - {*hosts}))
            if not any(self._coordinator.holds_only_copy(host) for host in hosts):
                with suppress(DpsError):
                    await self._coordinator.monitors.kill(watched, self._timings.stopped)
                await asyncio.sleep(self._timings.stopped)  # until its end is reported
        finally:
            self._killed.discard(watched)

    async def _check(self, host: Endpoint) -> None:
        """Find out whether a host runs: it answers, or its monitor sees it running."""
        if await self._end_if_gone(host.address, "coordinator"):
            return
        began = self._clock.monotonic()
        try:
            await self._coordinator.transport.call(host, LookUp(0, 0), self._timings.stopped)
        except TransportError:
            if host in self._known and self._unseen_for(host) > self._clock.monotonic() - began:
                self._known[host].halted = True
        except DpsError:
            pass  # it refuses, so it runs

    async def _over(self, host: Endpoint) -> None:
        if self[host].info is None or self[host].given_up:
            self.leases.end(host)
        elif (
            self._unseen_for(host) < self._timings.lease
            or self.leases.overdue(host) < self._timings.last_copy
        ) and self._coordinator.holds_only_copy(host):
            self.suspect(host.address, "coordinator")  # it may have ended unnoticed
            await self._fall_silent(host, "lease")
        else:
            await self._give_up(host, "lease")

    def _holds_anything(self, host: Endpoint) -> bool:
        """Whether a host has a replica, or keeps states or gradients, or is about to."""
        return self._coordinator.rebalancer.loads[host] > 0 or host in self._coordinator.keepers

    async def _fall_silent(self, host: Endpoint, by: str) -> None:
        member = self[host]
        if not member.silent and member.info is not None:
            member.silent = True
            await self._coordinator.suspend_host(member.info, by)

    async def _give_up(self, host: Endpoint, by: str) -> None:
        member = self._known[host]
        self.leases.end(host)
        member.given_up, member.silent = True, False
        if member.info is not None:
            await self._coordinator.lose_host(member.info, by)

    def _unseen_for(self, host: Endpoint) -> float:
        return self._clock.monotonic() - self[host].seen
