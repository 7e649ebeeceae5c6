"""Whether a Dask client still has the scheduler that a parameter server was brought up on.

When the connection breaks, the coordinator is lost to the driver for good, also where Dask connects
again: it is in the scheduler's process, and has closed the group if that lives.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import distributed

LOOK_SECONDS = 0.05
CLOSED = ("closing", "closed")


class SchedulerConnection:
    """The connection that a client has now. May be used in any thread.

    Attributes
    ----------
    can_break
        Whether there is one; a client on virtual time has none.
    """

    def __init__(self, client: distributed.Client) -> None:
        self._client = client
        self._stream = getattr(client, "scheduler_comm", None)
        self.can_break = hasattr(client, "scheduler_comm")

    @property
    def broken(self) -> bool:
        """Whether it is no longer there, for whatever reason."""
        return self._was_replaced or (self._stream is not None and self._stream.comm.closed())

    @property
    def lost(self) -> bool:
        """Whether it broke, and was not closed here by closing the client."""
        # Dask lets go of a stream that broke, before it connects again or gives up.
        return self._was_replaced or (self.broken and self._client.status not in CLOSED)

    @property
    def closed_here(self) -> bool:
        """Whether the client was closed in this process: its event loop may have ended."""
        return getattr(self._client, "status", None) in CLOSED

    async def until_broken(self) -> None:
        """Return as soon as it is."""
        while not self.broken:
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def _was_replaced(self) -> bool:
        # None: it was broken from the beginning, and Dask is about to connect again.
        there = self._client.scheduler_comm if self.can_break else None
        return self.can_break and (self._stream is None or there is not self._stream)
