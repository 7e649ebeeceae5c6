"""Broken variants of liveness: what monitors see, and what follows from it.

Like `dps.sim.broken.protocol`: each says what it leaves out in its docstring.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

from dps.errors import NotServing, TransportError
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.coordinator.membership import Membership
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.durability import NoDurability
from dps.protocol.lease import Lease, Leases
from dps.protocol.messages import ReportLink, Table
from dps.protocol.monitor import Look, Monitor, Sighting
from dps.protocol.transport import Endpoint, Watched
from dps.sim.broken import variant as broken
from dps.sim.broken.variant import alone, any_case, chains, gated

instead_of = partial(broken.instead_of, watched=True)


@instead_of(Leases, "vouch", "busy taken for dead", any_case)
def _vouch_for_nobody(self: Leases[Any], holder: Any) -> None:
    """Give a process up that does not renew its lease, though it is seen running."""


@instead_of(Coordinator, "_worker_sighted", "busy worker evicted", gated)
async def _worker_never_seen(self: Coordinator, name: str, worker: Any, sighting: Sighting) -> None:
    """Wait for busy servers, but not for busy workers."""


@instead_of(Leases, "vouch", "patience without end", any_case)
def _vouch_for_ever(self: Leases[Any], holder: Any) -> None:
    """Wait for a process for as long as it is seen running."""
    if holder in self._until:
        self._until[holder] = self._clock.monotonic() + self._seconds


@instead_of(ShardController, "is_last_copy", "stopped replica taken for a copy", chains)
def _counts_on_any(self: ShardController, host: Endpoint) -> bool:
    """Have a replica killed because there is another one, which may be stopped as well."""
    chain = self.view.chain
    alone = chain == (host,)
    return self._durability.is_last_copy(alone, False, not self.begun or self._is_kept)


@instead_of(Membership, "_have_stopped", "last copy killed", any_case)
async def _kill_whoever_stops(
    self: Membership, watched: Watched, hosts: Collection[Endpoint]
) -> None:
    """Have any stopped server killed, whatever it has."""
    await self._monitors.kill(watched, self._timings.stopped)


@instead_of(Monitor, "may_kill", "killed though it runs again", any_case)
def _kill_as_asked(self: Monitor, number: int, now: float, look: Look, seconds: float) -> bool:
    """Kill a process without another look at it."""
    return number in self._watched


@instead_of(Monitor, "look", "slow taken for stopped", any_case)
def _look_at_states_alone(self: Monitor, now: float, at: Callable[[int], Look]) -> list[Sighting]:
    """Take a process for stopped that was so whenever it was looked at, though it has run."""
    return _look(self, now, lambda number: at(number)._replace(progress=None))


@instead_of(Monitor, "may_kill", "slow taken for stopped", any_case)
def _kill_by_states_alone(
    self: Monitor, number: int, now: float, look: Look, seconds: float
) -> bool:
    """Take a process for stopped that was so whenever it was looked at, though it has run."""
    return _may_kill(self, number, now, look._replace(progress=None), seconds)


@instead_of(Membership, "sighted", "processes of two monitors confused", any_case)
async def _sighted_by_number(self: Membership, watched: Watched, sighting: Sighting) -> None:
    """Identify a process by its number alone, which is unique only within its monitor."""
    for member in self._known.values():
        if member.watched is not None and member.watched.number == watched.number:
            await _sighted(self, member.watched, sighting)
            return


@instead_of(Coordinator, "_report_link", "busy successor excluded", chains)
async def _blame_the_link(self: Coordinator, m: ReportLink) -> Table:
    """Take a successor out of use that does not answer, though it only is busy."""
    view = self._controllers[m.shard].view
    if m.epoch == view.epoch and m.host in view.chain[1:]:
        self.members.exclude(m.host)
    return self._table()


@instead_of(NoDurability, "is_last_copy", "busy server without a copy replaced", alone)
def _no_last_copy(self: NoDurability, alone: bool, tried: bool, restorable: bool) -> bool:
    """Go back to initial values because a server is silent for long."""
    return False


@instead_of(Lease, "_renew", "no allowance for a clock that is slow or stands still", any_case)
async def _renew_in_full(self: Lease, ask: Callable[[float], Awaitable[bool]]) -> None:
    """Count a lease as if all clocks ran alike."""
    asked = self._clock.monotonic()
    try:
        granted = await ask(self._seconds)
    except (TransportError, NotServing):
        return
    if granted:
        self._until = max(self._until, asked + self._seconds)


_look, _may_kill, _sighted = Monitor.look, Monitor.may_kill, Membership.sighted
