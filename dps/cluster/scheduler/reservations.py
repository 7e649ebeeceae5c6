"""The Dask workers of a deployment that each client uses: a table in the scheduler's process.

With it the trials of several drivers share a deployment. Each takes all nodes that it needs, or
none, in the order of arrival. They are free again when the client leaves, or its connection ends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dps.cluster.names import Offer, resource_in

NAME = "dps-reservations"
FREED = "dps-freed"  # the scheduler's event when Dask workers are free again


@dataclass(frozen=True, slots=True)
class Found:
    """The Dask workers of a deployment, and the addresses of those that one client may take."""

    offers: tuple[Offer, ...]
    free: frozenset[str]


class Reservations(SchedulerPlugin):
    """The table, while any client uses it. Used from the scheduler's event loop.

    Meanwhile the scheduler does not restart tasks of lost workers.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.name = NAME
        self._scheduler = scheduler
        self._taken: dict[str, set[str]] = {}
        self._waiting: list[str] = []
        self._allowed_failures = scheduler.allowed_failures
        scheduler.allowed_failures = 0

    def enter(self, client: str) -> None:
        """Add a client, which waits its turn for the nodes that it needs at first."""
        self._taken[client] = set()
        self._waiting.append(client)

    def free(self, client: str) -> frozenset[str]:
        """Return what a client may take: nothing while others wait that came before."""
        if client in self._waiting and self._waiting[0] != client:
            return frozenset()
        return frozenset(self._scheduler.workers).difference(*self._taken.values())

    def take(self, client: str, addresses: Collection[str]) -> bool:
        """Take all of these for a client, or none if one is not free any more."""
        if not self.free(client).issuperset(addresses):
            return False
        self._taken[client] |= set(addresses)
        if client in self._waiting:
            self._waiting.remove(client)
        return True

    def leave(self, client: str) -> None:
        """Free the nodes of a client; the last one leaves the scheduler as it was."""
        if self._taken.pop(client, None) is None:
            return
        if client in self._waiting:
            self._waiting.remove(client)
        self._scheduler.log_event("all", {"action": FREED})
        if not self._taken:
            self._scheduler.allowed_failures = self._allowed_failures
            self._scheduler.remove_plugin(NAME)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Free the nodes of a client that is gone; called by Dask."""
        self.leave(client)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a lost Dask worker: another one may join at its address."""
        for addresses in self._taken.values():
            addresses.discard(worker)


# -- what clients run in the scheduler -------------------------------------------------------------


def enter(client: str, dask_scheduler: Scheduler) -> None:
    """Add a client, which must `leave`."""
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Reservations(dask_scheduler))
    _table(dask_scheduler).enter(client)


def look(client: str, dask_scheduler: Scheduler) -> Found:
    """Return the Dask workers, and those that a client may take; of hosts only what Dask knows."""
    offers = []
    for address, known in dask_scheduler.workers.items():
        resource = resource_in({"resources": known.resources})
        offers.append(Offer(address, str(known.name), known.host, known.nthreads, resource))
    return Found(tuple(offers), _table(dask_scheduler).free(client))


def take(client: str, addresses: Collection[str], dask_scheduler: Scheduler) -> bool:
    """Take Dask workers; see `Reservations.take`."""
    return _table(dask_scheduler).take(client, addresses)


def leave(client: str, dask_scheduler: Scheduler) -> None:
    """Free all nodes of a client."""
    if NAME in dask_scheduler.plugins:
        _table(dask_scheduler).leave(client)


def _table(scheduler: Scheduler) -> Reservations:
    table: Reservations = scheduler.plugins[NAME]
    return table
