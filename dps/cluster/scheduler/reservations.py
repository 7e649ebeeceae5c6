"""The Dask workers of a deployment that each client uses: a table in the scheduler's process.

With it the trials of several drivers share a deployment. Each takes all nodes that it needs, or
none, in the order of arrival. They are free again when the client leaves, or its connection ends.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dps.cluster.names import Offer, resource_in

NAME = "dps-reservations"


class Reservations(SchedulerPlugin):
    """The table, while any client uses it: see `reserve`. Used from the scheduler's event loop.

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

    def look(self, client: str) -> tuple[list[Offer], frozenset[str]]:
        """Return the Dask workers, and the addresses of those that a client may take.

        These are none while other clients wait that came before. Of hosts only Dask's name is known
        here.
        """
        workers, free = self._scheduler.workers, frozenset[str]()
        if client not in self._waiting or self._waiting[0] == client:
            free = frozenset(workers).difference(*self._taken.values())
        offers = [
            Offer(address, str(w.name), w.host, w.nthreads, resource_in({"resources": w.resources}))
            for address, w in workers.items()
        ]
        return offers, free

    def take(self, client: str, addresses: Collection[str]) -> bool:
        """Take all of these for a client, or none if one is not free any more."""
        if not self.look(client)[1].issuperset(addresses):
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
        self._scheduler.log_event("all", {"action": "dps-freed"})  # Dask workers are free again
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


def reserve(act: str, client: str, *arguments: Any, dask_scheduler: Scheduler) -> Any:
    """Call a method of the table, such as "enter"; clients run this in the scheduler."""
    if act == "enter" and NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Reservations(dask_scheduler))
    table = dask_scheduler.plugins.get(NAME)
    return getattr(table, act)(client, *arguments) if table is not None else None
