"""The driver's part in recovery: the initial values, which nobody else has.

The coordinator says in its table which host needs the initial values of which shard: every first
head at the start, and later a shard of which nothing survives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dps.core.shard import ShardState, initial_state
from dps.core.tables.table import SparseTable
from dps.errors import DpsError, RemoteError
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import Install, Seed, Seeded, brought
from dps.protocol.tasks import Tasks, internal_error
from dps.protocol.transport import Transport

_log = logging.getLogger("dps.client")


class Bootstrap:
    """Installs initial values wherever the coordinator asks for them.

    Parameters
    ----------
    initial
        Each shard's buffer of initial values.
    saved
        Each shard's state to go on from instead, if it is from a run before.
    tables
        Each shard's rows that sparse tables begin with; none: they begin empty.

    Attributes
    ----------
    error
        Why the last installation failed; None if it did not.
    """

    def __init__(
        self,
        group: Group,
        initial: Sequence[np.ndarray],
        transport: Transport,
        router: Router,
        saved: Sequence[ShardState] = (),
        tables: Sequence[dict[str, SparseTable]] = (),
    ) -> None:
        self._group = group
        self._initial = initial
        self._saved = saved
        self._tables = tables
        self._transport = transport
        self._router = router
        self.error: DpsError | None = None
        self._tasks = Tasks(self._fail)

    async def run(self) -> None:
        """Serve until cancelled. A host that does not answer holds up its own shard only."""
        try:
            await self._tasks.keep(self._follow, self._group.timings.retry)
        finally:
            await self._tasks.close()

    def _fail(self, error: Exception) -> None:
        self.error = internal_error(error)
        _log.error("dps: initial values could not be installed", exc_info=error)

    async def _follow(self) -> None:
        under_way: dict[Seed, asyncio.Task[None]] = {}
        version = -1
        while True:
            try:
                table = await self._router.newer(version)
            except DpsError as error:
                self.error = error
                await asyncio.sleep(self._group.timings.retry)
                continue
            version = table.version
            for seed in under_way.keys() - set(table.seeds):
                under_way.pop(seed).cancel()
            for seed in table.seeds:
                if not seed.donor and seed not in under_way:
                    install = partial(self._install_in_the_end, seed)
                    under_way[seed] = self._tasks.keep(install, self._group.timings.call)

    async def _install_in_the_end(self, seed: Seed) -> None:
        """Install, again and again: what the host depends on may not be there yet."""
        while True:
            try:
                await self._install(seed)
                self.error = None
                return
            except DpsError as error:
                self.error = error
                timings = self._group.timings
                has_defect = isinstance(error, RemoteError)  # which will hardly go away
                await asyncio.sleep(timings.call if has_defect else timings.retry)

    async def _install(self, seed: Seed) -> None:
        if self._saved:
            state, source = self._saved[seed.shard], "checkpoint"
        else:
            state = initial_state(self._initial[seed.shard], self._group.rule)
            if self._tables:
                state = replace(state, tables=self._tables[seed.shard])
            source = "initial"
        chain = (seed.host,)
        request = Install(seed.shard, seed.epoch, chain, state, source, keepers=seed.keepers)
        await self._transport.call(seed.host, request, self._group.timings.copy)
        await self._router.ask(Seeded(seed.shard, seed.epoch, brought(source, state)))
