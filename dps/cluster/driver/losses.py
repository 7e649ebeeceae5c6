"""What the driver and the workers are told of acknowledged updates that were lost, by default.

The driver hears of a loss with the routing table, whether it records events or not, and issues a
Python warning. Workers and Dask's scheduler write a line to Dask's own log.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterable

from dps.cluster.node.loss_log import SILENT
from dps.errors import DpsError, UpdatesLostWarning
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import GetLosses, Loss, Table


class LossWatch:
    """Knows a group's losses, and warns of new ones. Used from the client's event loop.

    Attributes
    ----------
    found
        The losses that are known, one for each restoration that cost any. May be read in any
        thread.
    """

    def __init__(self, group: Group) -> None:
        self.found: tuple[Loss, ...] = ()
        self._group = group
        self._router: Router | None = None
        self._told_of = 0  # the revision that the last table had
        self._asking: asyncio.Task[None] | None = None

    def open(self, router: Router) -> None:
        """Begin to listen."""
        self._router = router
        router.listen(self._heard)

    async def close(self) -> None:
        """Stop listening, once all is known that the coordinator knows."""
        if self._router is None:
            return
        asking = self.abandon()
        if asking is not None:
            await asyncio.gather(asking, return_exceptions=True)
        await self.look()

    def abandon(self) -> asyncio.Task[None] | None:
        """Stop listening, and asking; return what was asking."""
        if self._router is not None:
            self._router.unlisten(self._heard)
        if self._asking is not None:
            self._asking.cancel()
        return self._asking

    async def look(self) -> bool:
        """Ask the coordinator; return whether it has answered. If not, what is known must do."""
        assert self._router is not None
        try:
            reply = await self._router.ask_once(GetLosses(), self._group.timings.call)
        except DpsError:
            return False
        before, self.found = self.found, reply.losses
        if self._group.on_loss != SILENT:
            warn(self._group, (loss for loss in self.found if loss not in before))
        return True

    def _heard(self, table: Table) -> None:
        news, self._told_of = table.losses > self._told_of, table.losses
        if news and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        """Look until everything is known that the tables told of, also while it was asked for."""
        known = 0
        while known < self._told_of:
            told_of = self._told_of
            if await self.look():
                known = told_of
            else:
                await asyncio.sleep(self._group.timings.retry)


def warn(group: Group, losses: Iterable[Loss]) -> None:
    """Issue a Python warning of each loss, which is shown unless somebody has filtered it out."""
    for loss in losses:
        text = (
            f"dps: {loss} (parameter server {group.name}, epoch {loss.epoch}). See ps.losses; "
            "recovery= says what survives, on_loss='raise' ends a training that has lost updates"
        )
        warnings.warn(text, UpdatesLostWarning, stacklevel=2)
