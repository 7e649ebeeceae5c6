"""Messages to the user of a parameter server, most of which report incidents of its shards.

Messages arise in the event loop of the Dask client. A Python warning that is issued there appears
below the notebook cell that made the client, and user code cannot catch it. So a warning waits for
the next call of the parameter server, or for the end of the running cell.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Scheduler

from dps.cluster.node.logs import SILENT, is_logged
from dps.cluster.platform import SYSTEM, platform_of
from dps.errors import CopiesMissingWarning, DpsError, LastStateNotSavedWarning, UpdatesLostWarning
from dps.events import Failover
from dps.observe.views import notebook
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import GetIncidents, Loss, Table, View
from dps.protocol.tasks import Tasks

if TYPE_CHECKING:
    import distributed

# A child of a logger that Dask shows by default.
_log = logging.getLogger("distributed.client.dps")
_DPS = str(Path(__file__).parents[2])

# A copy that is replaced within this time causes no warning: no user could act sooner.
GRACE_SECONDS = 1.0


class News:
    """The messages of one parameter server to its user. Thread-safe."""

    def __init__(self, client: distributed.Client) -> None:
        address = client.scheduler.address
        here = any(each.address == address for each in list(Scheduler._instances))
        # Whether this process also shows the log of Dask's scheduler, as always on virtual time.
        self.scheduler_logs = here or platform_of(client) is not SYSTEM
        self.unsaved = ""  # the warning to issue if the parameter server is never closed
        self._waiting: deque[tuple[str, type[Warning]]] = deque()
        self._failures: Counter[str] = Counter()
        self._cells = getattr(notebook(), "events", None)
        if self._cells is not None:
            self._cells.register("post_run_cell", self.deliver)

    def log(self, text: str) -> None:
        """Log a line."""
        _log.warning("dps: %s", text)

    def warn(self, text: str, category: type[Warning], *, logged: bool = False) -> None:
        """Queue a warning, and log it now unless it is `logged`: it may be issued much later."""
        if not logged:
            self.log(text)
        self._waiting.append((f"dps: {text}", category))

    def failed(self, what: str, error: BaseException) -> None:
        """Warn of the first failure of this kind, log its traceback, and count the others."""
        kind = f"{what}: {type(error).__name__}"
        self._failures[kind] += 1
        if (times := self._failures[kind]) == 1:
            _log.warning("dps: %s", what, exc_info=error)
            self.warn(f"{kind}: {error}", RuntimeWarning, logged=True)
        elif is_logged(times):
            self.log(f"{kind}, {times} times so far")

    def deliver(self, *_: Any) -> None:
        """Issue the queued warnings; called in the user's thread."""
        with suppress(IndexError):  # another thread may have issued the last one
            while True:
                text, category = self._waiting.popleft()
                warnings.warn(text, category, stacklevel=_level_of_user())

    def close(self) -> None:
        """Issue the last warnings; `weakref.finalize` calls this if the user has not."""
        if self.unsaved:
            self.warn(self.unsaved, LastStateNotSavedWarning, logged=True)
            self.unsaved = ""
        if self._cells is not None:
            self._cells.unregister("post_run_cell", self.deliver)
            self._cells = None
        self.deliver()


def _level_of_user() -> int:
    """Return the stack level, from the caller's, of the first function outside dps."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_DPS):
        frame, level = frame.f_back, level + 1
    return level


class IncidentWatch:
    """Collects a group's incidents, and reports new ones. Used from the client's event loop."""

    def __init__(self, router: Router, news: News) -> None:
        self.losses: tuple[Loss, ...] = ()  # any thread may read this and the next two
        self.failovers: tuple[Failover, ...] = ()
        self.views: tuple[View, ...] = ()  # of the last routing table
        self.closing = False  # the driver itself closes the group
        self._router = router
        self._group = router.group
        self._news = news
        self._announced = (0, 0)  # revision of losses, number of failovers
        self._tasks = Tasks(partial(news.failed, "incidents cannot be reported"))
        self._asking: asyncio.Task[None] | None = None
        self._whole: set[int] = set()  # shards that have had all their copies at some time
        self._due: dict[int, asyncio.TimerHandle] = {}  # warnings, if a copy stays missing
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
            now = await self._router.ask_once(GetIncidents())
        except DpsError:
            return False
        losses = [each for each in now[0] if each not in self.losses]
        failovers = [each for each in now[1] if each not in self.failovers]
        self.losses, self.failovers = now
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
                f"{loss} (parameter server {self._group.name}, epoch {loss.epoch}). See ps.losses. "
                "Choose another recovery= to keep more, or on_loss='raise' to end the training"
            )
            self._news.warn(text, UpdatesLostWarning, logged=self._news.scheduler_logs)
        return True

    def heard(self, table: Table) -> None:
        """Look for incidents and missing copies when there is a new routing table."""
        if table.closed:
            # The router logs it if the client's connections are closed before this table arrives.
            if not self.closing:
                self._news.log(
                    f"parameter server {self._group.name} was not closed before its Dask client. "
                    "Leave its `with` block or call ps.close() first"
                )
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
        """Ask until all incidents that the tables have announced are known."""
        known = (0, 0)
        while known != (announced := self._announced):
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
                self._news.log(f"shard {shard} has all its copies{self._of_group}")
        elif shard in self._whole and shard not in self._due:
            loop = asyncio.get_running_loop()
            self._due[shard] = loop.call_later(GRACE_SECONDS, self._warn_of, shard)

    def _warn_of(self, shard: int) -> None:
        self._warned_of.add(shard)
        there, wanted = len(self.views[shard].chain), self._group.replicas
        state = f"has {there} of {wanted} copies" if there else "is down: no copy is left"
        text = (
            f"shard {shard} {state}{self._of_group}. It gets another copy as soon as a node for "
            "servers is free; start another Dask worker if there is none"
        )
        self._news.warn(text, CopiesMissingWarning)
