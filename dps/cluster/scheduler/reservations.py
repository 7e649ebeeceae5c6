"""Who uses which Dask workers of a deployment: a table in the process of its scheduler.

By it the trials of several drivers share a deployment. Each takes what it needs as a whole or not
at all, in the order in which they came; what a client has is free again when it leaves, or when its
connection ends, as it does with its process.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dps.cluster.names import Offer, resource_in

NAME = "dps-reservations"
FREED = "dps-freed"  # what the scheduler's events call it when Dask workers are free again


@dataclass(frozen=True, slots=True)
class Found:
    """The Dask workers of a deployment, and the addresses of those that one client may take.

    The host of each is what the scheduler knows, which is less than `Offer` asks for.
    """

    offers: tuple[Offer, ...]
    free: frozenset[str]


class Reservations(SchedulerPlugin):
    """The table; it is there while anybody uses it. Used from the scheduler's event loop.

    Meanwhile the scheduler does not start tasks of lost workers again by itself.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.name = NAME
        self._scheduler = scheduler
        self._taken: dict[str, set[str]] = {}
        self._waiting: list[str] = []
        self._allowed_failures = scheduler.allowed_failures
        scheduler.allowed_failures = 0

    def enter(self, client: str) -> None:
        """Have a client wait its turn for what it needs at first."""
        self._taken[client] = set()
        self._waiting.append(client)

    def free(self, client: str) -> frozenset[str]:
        """What a client may take: nothing while others wait that came before."""
        if client in self._waiting and self._waiting[0] != client:
            return frozenset()
        return frozenset(self._scheduler.workers).difference(*self._taken.values())

    def take(self, client: str, addresses: Collection[str]) -> bool:
        """Take all of these for a client; or none, if one of them is not free any more."""
        if not self.free(client).issuperset(addresses):
            return False
        self._taken[client] |= set(addresses)
        if client in self._waiting:
            self._waiting.remove(client)
        return True

    def leave(self, client: str) -> None:
        """Free what a client has; the last one leaves the scheduler as it was."""
        if self._taken.pop(client, None) is None:
            return
        if client in self._waiting:
            self._waiting.remove(client)
        self._scheduler.log_event("all", {"action": FREED})
        if not self._taken:
            self._scheduler.allowed_failures = self._allowed_failures
            self._scheduler.remove_plugin(NAME)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Free what a client had that is gone; called by Dask."""
        self.leave(client)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Forget a Dask worker that is lost: another one may join at its address."""
        for addresses in self._taken.values():
            addresses.discard(worker)


# -- what clients have the scheduler run ---------------------------------------------------------


def enter(client: str, dask_scheduler: Scheduler) -> None:
    """Enter a client, which must `leave`."""
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Reservations(dask_scheduler))
    _table(dask_scheduler).enter(client)


def look(client: str, dask_scheduler: Scheduler) -> Found:
    """See which Dask workers there are, and which of them a client may take."""
    offers = (
        Offer(
            address,
            str(known.name),
            known.host,
            known.nthreads,
            resource_in({"resources": known.resources}),
        )
        for address, known in dask_scheduler.workers.items()
    )
    return Found(tuple(offers), _table(dask_scheduler).free(client))


def take(client: str, addresses: Collection[str], dask_scheduler: Scheduler) -> bool:
    """Take Dask workers; see `Reservations.take`."""
    return _table(dask_scheduler).take(client, addresses)


def leave(client: str, dask_scheduler: Scheduler) -> None:
    """Free all that a client has."""
    if NAME in dask_scheduler.plugins:
        _table(dask_scheduler).leave(client)


def _table(scheduler: Scheduler) -> Reservations:
    table: Reservations = scheduler.plugins[NAME]
    return table
