"""The driver's reports on shards: failovers, losses of acknowledged updates, and missing copies.

They arrive with the routing table, whether events are recorded or not. Failovers are logged; losses
and missing copies are also Python warnings. Workers and Dask's scheduler log them in Dask's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from dps.cluster.driver.news import News
from dps.cluster.node.logs import SILENT
from dps.errors import CopiesMissingWarning, DpsError, UpdatesLostWarning
from dps.events import Failover
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import GetIncidents, Loss, Table, View
from dps.protocol.tasks import Tasks

# No warning if the replica is back before a person could act.
GRACE_SECONDS = 1.0


class IncidentWatch:
    """Collects a group's incidents, and reports new ones. Used from the client's event loop.

    `losses`, `failovers` and the `views` of the last routing table may be read in any thread.
    """

    def __init__(self, router: Router, news: News) -> None:
        self.losses: tuple[Loss, ...] = ()
        self.failovers: tuple[Failover, ...] = ()
        self.views: tuple[View, ...] = ()
        self._router = router
        self._group = router.group
        self._news = news
        self._announced = (0, 0)  # the revisions that the last table had
        self._tasks = Tasks(partial(news.failed, "incidents cannot be reported"))
        self._asking: asyncio.Task[None] | None = None
        self._whole: set[int] = set()  # shards that have had all their copies
        self._due: dict[int, asyncio.TimerHandle] = {}  # of shards that lack a copy
        self._warned_of: set[int] = set()
        self._listeners: list[Callable[[Failover], None]] = []
        self._of_group = f" (parameter server {router.group.name})"

    @property
    def updates_lost(self) -> int:
        """The number of acknowledged updates that were lost, on all shards together."""
        return sum(loss.updates for loss in self.losses)

    def listen(self, listener: Callable[[Failover], None]) -> None:
        """Call `listener` for each failover, past ones first; it must not block."""
        self._listeners.append(listener)
        for failover in self.failovers:
            listener(failover)

    async def stop(self) -> None:
        """Stop listening, and end the request under way."""
        for timer in self._due.values():
            timer.cancel()
        self._router.unlisten(self.heard)
        await self._tasks.close()

    async def look(self) -> bool:
        """Ask the coordinator for incidents; return whether it has answered."""
        try:
            reply = await self._router.ask_once(GetIncidents(), self._group.timings.call)
        except DpsError:
            return False
        failovers = [each for each in reply.failovers if each not in self.failovers]
        losses = [each for each in reply.losses if each not in self.losses]
        self.failovers, self.losses = reply.failovers, reply.losses
        for listener in self._listeners:
            for failover in failovers:
                listener(failover)
        if self._group.on_loss == SILENT:
            return True
        for failover in failovers:
            if not self._news.scheduler_logs:
                self._news.log(f"{failover}{self._of_group}")
        for loss in losses:
            text = (
                f"{loss} (parameter server {self._group.name}, epoch {loss.epoch}). See "
                "ps.losses; recovery= sets what survives, on_loss='raise' ends a training that "
                "has lost updates"
            )
            self._news.warn(text, UpdatesLostWarning, logged=self._news.scheduler_logs)
        return True

    def heard(self, table: Table) -> None:
        """Look for incidents and missing copies when there is a new routing table."""
        if table.closed:
            return
        self.views = table.views
        if self._group.on_loss != SILENT:
            for view in table.views:
                self._look_for_copies(view)
        announced = table.losses, table.failovers
        is_new, self._announced = announced != self._announced, announced
        if is_new and (self._asking is None or self._asking.done()):
            self._asking = self._tasks.start(self._catch_up())

    async def _catch_up(self) -> None:
        """Ask until every incident is known that the tables have announced."""
        known = (0, 0)
        while known != self._announced:
            announced = self._announced
            if await self.look():
                known = announced
            else:
                await asyncio.sleep(self._group.timings.retry)

    def _look_for_copies(self, view: View) -> None:
        """Warn of a shard that had all its copies, and has lacked one for `GRACE_SECONDS`."""
        shard = view.shard
        if len(view.chain) >= self._group.replicas:
            self._whole.add(shard)
            if (due := self._due.pop(shard, None)) is not None:
                due.cancel()
            if shard in self._warned_of:
                self._warned_of.remove(shard)
                self._news.log(f"shard {shard} has all its copies again{self._of_group}")
        elif shard in self._whole and shard not in self._due:
            loop = asyncio.get_running_loop()
            self._due[shard] = loop.call_later(GRACE_SECONDS, self._warn_of, shard)

    def _warn_of(self, shard: int) -> None:
        self._warned_of.add(shard)
        there, wanted = len(self.views[shard].chain), self._group.replicas
        state = f"has {there} of {wanted} copies" if there else "is down: no copy of it is left"
        text = (
            f"shard {shard} {state}{self._of_group}. It gets another copy as soon as a node for "
            "servers is free; start another Dask worker if there is none"
        )
        self._news.warn(text, CopiesMissingWarning)
