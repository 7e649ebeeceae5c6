"""Owns reading a group from outside: weights, rows, and the numbers of its shards' states."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dps.core.rows import KEYS
from dps.errors import DpsError, GroupClosed
from dps.protocol.client.client import Client
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Audit, AuditReply, Table
from dps.protocol.transport import Transport

T = TypeVar("T")


async def audit(
    shard: int, router: Router, transport: Transport, deadline: float
) -> AuditReply | None:
    """Return the numbers of a shard's state, None if it does not answer."""
    try:
        view = await router.view(shard)
        if not view.serving:
            return None
        async with asyncio.timeout(None) as scope:
            head = view.chain[0]
            with router.while_asked(view, head, scope):
                request = Audit(shard, view.epoch)
                reply: AuditReply = await transport.call(head, request, deadline)
    except (DpsError, TimeoutError):
        return None
    return reply


async def audit_all(group: Group, router: Router, transport: Transport) -> list[AuditReply | None]:
    """Return the numbers of each shard's state, None for one that does not answer."""
    shards = range(len(group.layout.shards))
    asked = (audit(shard, router, transport, group.timings.call) for shard in shards)
    return list(await asyncio.gather(*asked))


class Readable:
    """What anybody may read of a parameter server: a part of `dps.cluster.server`."""

    group: Group
    _client: Any
    _router: Router
    _transport: Transport
    _open: bool

    def pull(self) -> dict[str, np.ndarray]:
        """Return the current weights as fresh arrays, without waiting for any worker.

        Raises
        ------
        ShardUnavailable
            A shard stayed down for too long.
        """

        async def read(reader: Client) -> dict[str, np.ndarray]:
            await reader.pull()
            return {name: array.copy() for name, array in reader.weights().items()}

        return self._read(read)

    def pull_rows(self, table: str, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return rows of a sparse table by their keys, without waiting for any worker.

        Parameters
        ----------
        table
            Its name.
        keys
            Whole numbers from 0 to 2⁶³ - 1, in any order; some may be repeated.

        Returns
        -------
        rows
            (keys, width), in the order asked for. A row that nobody has pushed to is as it begins.

        Raises
        ------
        ShapeMismatch
            An unknown table, or keys that are none.
        ShardUnavailable
            A shard stayed down for too long.
        """
        return self._read(lambda reader: reader.pull_rows(table, keys))

    def pull_range(
        self, table: str, start: int = 0, stop: int = KEYS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that exist with keys from `start` to below `stop`; errors as `pull_rows`.

        Returns
        -------
        keys
            int64, sorted: those that were pushed to.
        rows
            (keys, width).
        """
        return self._read(lambda reader: reader.pull_range(table, start, stop))

    def audit(self) -> list[AuditReply | None]:
        """Return the numbers of each shard's state, None for one that does not answer."""
        self._require_open()
        asked = self._client.sync(audit_all, self.group, self._router, self._transport)
        replies: list[AuditReply | None] = asked
        return replies

    def table(self) -> Table:
        """Return who serves what at this moment."""
        self._require_open()
        table: Table = self._client.sync(self._router.fetch)
        return table

    def _read(self, what: Callable[[Client], Awaitable[T]]) -> T:
        self._require_open()

        async def read() -> T:
            reader = Client(self.group, self._transport)
            try:
                return await what(reader)
            finally:
                await reader.close()

        found: T = self._client.sync(read)
        return found

    def _require_open(self) -> None:
        if not self._open:
            raise GroupClosed("this parameter server is closed")
