"""A client's copy of the routing table, kept up to date while the client lives.

One request waits at the coordinator for the next change, so a client knows of a recovery as soon as
the coordinator does. A call to a replica that was replaced is then given up at once: the next
connection to a dead process may take seconds to fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dps.errors import CoordinatorGone, GroupClosed, NotServing, TransportError
from dps.protocol.group import Group
from dps.protocol.messages import GetTable, ReportFailure, ReportLink, Table, View
from dps.protocol.tasks import Tasks, internal_error
from dps.protocol.transport import Done, Endpoint, Transport

_log = logging.getLogger("dps.client")


class Router:
    """Finds the coordinator and the replicas of each shard. Used from one event loop."""

    def __init__(self, group: Group, transport: Transport) -> None:
        self.group = group
        self.transport = transport
        self._table: Table | None = None
        self._news = asyncio.Event()
        self._tasks = Tasks(self._fail)
        self._failure: Exception | None = None
        self._is_watching = False
        self._reported: set[Endpoint] = set()
        # How to give up a call, and what it is: the shard, the replica, and whether it is the head.
        self._calls: dict[Callable[[], None], tuple[int, Endpoint, bool]] = {}
        self._listeners: list[Callable[[Table], None]] = []

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.close()

    def listen(self, listener: Callable[[Table], None]) -> None:
        """Call a function with the table, and with each newer one."""
        self._listeners.append(listener)
        if self._table is not None:
            listener(self._table)

    def unlisten(self, listener: Callable[[Table], None]) -> None:
        """Undo `listen`; no effect if repeated."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def closed(self) -> bool:
        """Whether the group is known to be closed; its coordinator has ended or soon will."""
        return self._table is not None and self._table.closed

    def served(self, shard: int) -> View | None:
        """Return the view of a shard; None: it is not served, or that is not known here."""
        table = self._table
        if table is None or table.closed or self._failure is not None:
            return None
        view = table.views[shard]
        return view if view.serving else None

    async def table(self) -> Table:
        """Return the latest table that is known here; raises `GroupClosed` in a closed group."""
        if self._failure is not None:
            raise internal_error(self._failure)
        if not self._is_watching:
            self._is_watching = True
            self._tasks.start(self._watch())
        table = self._table or await self.fetch()
        if table.closed:
            raise GroupClosed("the parameter server was closed while it was in use")
        return table

    async def newer(self, than: int) -> Table:
        """Wait for a table of a version above `than`, for `Timings.hold` at most."""
        table = await self.table()
        if table.version <= than:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.group.timings.hold):
                    await self._news.wait()
        return await self.table()

    async def fetch(self) -> Table:
        """Ask the coordinator for the table."""
        return self._keep(await self.ask(GetTable(-1, self.group.timings.hold)))

    async def ask(self, request: Any) -> Any:
        """Ask the coordinator, repeatedly if need be, for up to `Timings.unavailable`."""
        timings = self.group.timings
        until = asyncio.get_running_loop().time() + timings.unavailable
        while True:
            try:
                return await self.ask_once(request)
            except TransportError:
                if asyncio.get_running_loop().time() >= until:
                    raise
                await asyncio.sleep(timings.retry)

    async def ask_once(self, request: Any, deadline: float | None = None) -> Any:
        """Ask the coordinator once, for up to `deadline` seconds; None: `Timings.call`."""
        deadline = deadline or self.group.timings.call
        return await self.transport.call(self.group.coordinator, request, deadline)

    async def call(
        self, view: View, to: Endpoint, request: Any, deadline: float, link: str = "control"
    ) -> Any:
        """Call a replica of a shard; raise `TimeoutError` once it is no longer the one to ask."""
        # That is when it leaves the chain or, for the head, when another replica is the head.
        async with asyncio.timeout(None) as scope:
            give_up = partial(_expire, scope)
            self._calls[give_up] = view.shard, to, to == view.chain[0]
            try:
                return await self.transport.call(to, request, deadline, link)
            finally:
                del self._calls[give_up]

    def begin(
        self, view: View, to: Endpoint, request: Any, deadline: float, link: str, done: Done
    ) -> bool:
        """Call a replica as `call` does, without a task (see `Transport.begin`), if possible."""

        def ended(reply: Any) -> None:
            if give_up is not None:
                del self._calls[give_up]
            done(reply)

        give_up = self.transport.begin(to, request, deadline, link, ended)
        if give_up is None:
            return False
        self._calls[give_up] = view.shard, to, to == view.chain[0]
        return True

    def report(self, host: Endpoint, request: ReportLink | None = None) -> None:
        """Report to the coordinator that a call to a host failed, or has failed for a while."""
        # It takes its time to check, so its reply, a table, is not awaited.
        if host not in self._reported:
            self._reported.add(host)
            self._tasks.start(self._report(host, request or ReportFailure(host)))

    async def _report(self, host: Endpoint, request: ReportFailure | ReportLink) -> None:
        try:
            self._keep(await self.ask_once(request))
        except (TransportError, NotServing, GroupClosed):
            return  # the coordinator is unreachable; the next failed call is reported again
        finally:
            self._reported.discard(host)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._news.set()

    async def _watch(self) -> None:
        timings = self.group.timings
        while not self.closed:
            version = self._table.version if self._table else -1
            try:
                self._keep(await self.ask_once(GetTable(version, timings.hold)))
            except CoordinatorGone:
                if self._table is not None:
                    self._keep(replace(self._table, version=version + 1, closed=True))
                return
            except (TransportError, NotServing):
                await asyncio.sleep(timings.retry)
            except GroupClosed as error:
                _log.warning(
                    "dps: parameter server %s was not closed: %s. Leave its `with` block or "
                    "call ps.close() first",
                    self.group.name,
                    error,
                )
                return

    def _keep(self, table: Table) -> Table:
        known = self._table
        if known is not None and table.version <= known.version:
            return known
        self._table = table
        news, self._news = self._news, asyncio.Event()
        news.set()
        for listener in self._listeners:
            listener(table)
        for give_up in [give_up for give_up, call in self._calls.items() if self._is_vain(*call)]:
            give_up()
        return table

    def _is_vain(self, shard: int, to: Endpoint, as_head: bool) -> bool:
        """Whether the replica that was called is no longer the one to ask."""
        assert self._table is not None
        now = self._table.views[shard]
        able = now.chain[:1] if as_head else now.chain
        return self._table.closed or not now.serving or to not in able


def _expire(scope: asyncio.Timeout) -> None:
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())
