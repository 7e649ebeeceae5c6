"""A client's copy of the routing table, and keeps it fresh while the client lives.

One request waits at the coordinator for the next change, so a client knows of a loss as soon as the
coordinator does. A call to a server that is no longer the one to ask is then given up at once: the
next connection to a dead process may take seconds to fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dps.errors import CoordinatorGone, GroupClosed, NotServing, TransportError
from dps.protocol.group import Group
from dps.protocol.messages import GetTable, ReportFailure, ReportLink, Table, View
from dps.protocol.tasks import Tasks, internal_error
from dps.protocol.transport import Endpoint, Transport

_log = logging.getLogger("dps.client")


class Router:
    """Knows who serves what. Used from one event loop; `close` ends its task."""

    def __init__(self, group: Group, transport: Transport) -> None:
        self._group = group
        self._transport = transport
        self._table: Table | None = None
        self._news = asyncio.Event()
        self._tasks = Tasks(self._fail)
        self._failure: Exception | None = None
        self._is_watching = False
        self._reported: set[Endpoint] = set()
        self._calls: dict[asyncio.Timeout, tuple[int, Endpoint, bool]] = {}
        self._listeners: list[Callable[[Table], None]] = []

    async def close(self) -> None:
        """Stop watching."""
        await self._tasks.close()

    def listen(self, listener: Callable[[Table], None]) -> None:
        """Have each new table passed on, beginning with the one that is known."""
        self._listeners.append(listener)
        if self._table is not None:
            listener(self._table)

    def unlisten(self, listener: Callable[[Table], None]) -> None:
        """Undo `listen`, if that was not undone before."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def table(self) -> Table:
        """The table, as far as is known here.

        Raises
        ------
        GroupClosed
            The group is closed.
        InternalError
            The table is not kept up to date any more, as that has failed.
        """
        if self._failure is not None:
            raise internal_error(self._failure)
        if not self._is_watching:
            self._is_watching = True
            self._tasks.start(self._watch())
        table = self._table or await self.fetch()
        if table.closed:
            raise GroupClosed("the parameter server was closed while it was in use")
        return table

    async def view(self, shard: int) -> View:
        """Who serves the shard, as far as is known here."""
        return (await self.table()).views[shard]

    async def newer(self, than: int) -> Table:
        """Wait for a table of a version above `than`, for a moment at most."""
        table = await self.table()
        if table.version <= than:
            try:
                async with asyncio.timeout(self._group.timings.hold):
                    await self._news.wait()
            except TimeoutError:
                return table
        return await self.table()

    async def fetch(self) -> Table:
        """Ask the coordinator for the table."""
        return self._keep(await self.ask(GetTable(-1, self._group.timings.hold)))

    async def ask(self, request: Any) -> Any:
        """Ask the coordinator, again if need be, for as long as a shard may be unavailable."""
        timings = self._group.timings
        until = asyncio.get_running_loop().time() + timings.unavailable
        while True:
            try:
                return await self._ask(request)
            except TransportError:
                if asyncio.get_running_loop().time() >= until:
                    raise
                await asyncio.sleep(timings.retry)

    async def ask_once(self, request: Any, deadline: float) -> Any:
        """Ask the coordinator, without trying again."""
        return await self._transport.call(self._group.coordinator, request, deadline)

    def report(self, host: Endpoint, request: ReportLink | None = None) -> None:
        """Tell the coordinator that a call to the host failed; what follows comes as a new table.

        The coordinator takes its time to check, so the reply is not awaited. `request` says that
        it has failed for long.
        """
        if host not in self._reported:
            self._reported.add(host)
            self._tasks.start(self._report(host, request or ReportFailure(host)))

    @contextmanager
    def while_asked(self, view: View, to: Endpoint, scope: asyncio.Timeout) -> Iterator[None]:
        """Have the scope time out as soon as the replica is no longer the one to ask.

        That is when it leaves the chain; for the head, also when another one is.
        """
        self._calls[scope] = view.shard, to, to == view.chain[0]
        try:
            yield
        finally:
            del self._calls[scope]

    @property
    def closed(self) -> bool:
        """Whether the group is known to be closed; its coordinator has ended or soon will."""
        return self._table is not None and self._table.closed

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._news.set()

    async def _watch(self) -> None:
        while not self.closed:
            version = self._table.version if self._table else -1
            try:
                self._keep(await self._ask(GetTable(version, self._group.timings.hold)))
            except CoordinatorGone:
                if self._table is not None:
                    self._keep(replace(self._table, version=version + 1, closed=True))
                return
            except (TransportError, NotServing):
                await asyncio.sleep(self._group.timings.retry)
            except GroupClosed as error:
                _log.warning(
                    "dps: parameter server %s was not closed: %s. Leave its `with`, or call "
                    "ps.close(), before that",
                    self._group.name,
                    error,
                )
                return

    async def _report(self, host: Endpoint, request: ReportFailure | ReportLink) -> None:
        try:
            self._keep(await self._ask(request))
        except (TransportError, NotServing, GroupClosed):
            return  # the coordinator is out of reach; whoever meets the failure again reports again
        finally:
            self._reported.discard(host)

    async def _ask(self, request: Any) -> Any:
        timings = self._group.timings
        return await self._transport.call(self._group.coordinator, request, timings.call)

    def _keep(self, table: Table) -> Table:
        known = self._table
        if known is not None and table.version <= known.version:
            return known
        self._table = table
        news, self._news = self._news, asyncio.Event()
        news.set()
        for listener in self._listeners:
            listener(table)
        for scope, (shard, to, as_head) in self._calls.items():
            now = table.views[shard]
            able = now.chain[:1] if as_head else now.chain
            if (table.closed or not now.serving or to not in able) and not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())
        return table
