"""Owns the driver's part in recovery: the initial values, which nobody else has.

The coordinator says in its table which host needs the initial values of which shard: every first
head at the start, and later a shard of which nothing survives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from dps.core.shard import ShardState, initial_state
from dps.errors import DpsError
from dps.protocol.group import Group
from dps.protocol.messages import Install, Seed, Seeded
from dps.protocol.router import Router
from dps.protocol.transport import Transport


class Seeder:
    """Installs initial values wherever the coordinator asks for them.

    Parameters
    ----------
    initial
        Each shard's buffer of initial values.
    saved
        Each shard's state to go on from instead, if it is from a run before.

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
    ) -> None:
        self._group = group
        self._initial = initial
        self._saved = saved
        self._transport = transport
        self._router = router
        self.error: DpsError | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        version, done = -1, set[Seed]()
        while True:
            try:
                table = await self._router.newer(version)
                version = table.version
                for seed in table.seeds:
                    if not seed.donor and seed not in done:
                        await self._install(seed)
                        done.add(seed)
                        self.error = None
            except DpsError as error:
                # The host is gone or going, and the coordinator will name another one; or what the
                # host depends on cannot be used, and it is tried again.
                self.error, version = error, -1
                await asyncio.sleep(self._group.timings.retry)

    async def _install(self, seed: Seed) -> None:
        if self._saved:
            state, source = self._saved[seed.shard], "checkpoint"
        else:
            state = initial_state(self._initial[seed.shard], self._group.rule)
            source = "initial"
        request = Install(seed.shard, seed.epoch, (seed.host,), state, source)
        await self._transport.call(seed.host, request, self._group.timings.copy)
        await self._router.ask(Seeded(seed.shard, seed.epoch))
