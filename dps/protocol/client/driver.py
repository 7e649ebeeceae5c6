"""Requests of a group's driver: initial values and checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dps.core.shard import ShardState, initial_state
from dps.core.tables.table import SparseTable
from dps.errors import (
    DeadlineExceeded,
    DpsError,
    NotServing,
    RemoteError,
    ShardUnavailable,
    StaleEpoch,
    TransportError,
)
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import Install, Save, Seed, Seeded, brought
from dps.protocol.tasks import Tasks, internal_error

_log = logging.getLogger("dps.client")


class Bootstrap:
    """Installs initial values, or states of an earlier run, where the routing table asks for them.

    Every first head needs them, and later the head of a shard of which nothing survives. `error` is
    why the last installation failed. `initial` has each shard's buffer, `tables` its rows.
    """

    def __init__(
        self,
        router: Router,
        initial: Sequence[np.ndarray],
        saved: Sequence[ShardState] = (),
        tables: Sequence[dict[str, SparseTable]] = (),
    ) -> None:
        self._router = router
        self._group = router.group
        self._initial = initial
        self._saved = saved
        self._tables = tables
        self.error: DpsError | None = None
        self._tasks = Tasks(self._fail)

    async def run(self) -> None:
        """Serve until cancelled. A host that does not answer delays its own shard only."""
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
                    install = partial(self._install, seed)
                    under_way[seed] = self._tasks.keep(install, self._group.timings.call)

    async def _install(self, seed: Seed) -> None:
        """Install repeatedly: other nodes that the host needs may not be ready yet."""
        if self._saved:
            state, source = self._saved[seed.shard], "checkpoint"
        else:
            state, source = initial_state(self._initial[seed.shard], self._group.rule), "initial"
            if self._tables:
                state = replace(state, tables=self._tables[seed.shard])
        chain, keepers, timings = (seed.host,), seed.keepers, self._group.timings
        request = Install(seed.shard, seed.epoch, chain, state, source, keepers=keepers)
        while True:
            try:
                await self._router.transport.call(seed.host, request, timings.copy)
                await self._router.ask(Seeded(seed.shard, seed.epoch, brought(source, state)))
                self.error = None
                return
            except DpsError as error:
                self.error = error
                is_defect = isinstance(error, RemoteError)  # which will hardly go away
                await asyncio.sleep(timings.call if is_defect else timings.retry)


async def save_all(router: Router, limit: float) -> tuple[int, ...]:
    """Write a checkpoint of every shard; return the version that each contains at least.

    Raises `StoreUnavailable` if one cannot be written, `ShardUnavailable` if a shard is not served
    for `limit` seconds, and `DeadlineExceeded` if the coordinator does not answer within that time.
    """
    until = asyncio.get_running_loop().time() + limit
    timings = router.group.timings

    async def save(shard: int) -> int:
        while True:
            try:
                async with asyncio.timeout(limit):
                    view = (await router.fetch()).views[shard]  # also when the group is closed
            except TimeoutError:
                reason = f"checkpoint: the coordinator did not answer for {limit:g} s"
                raise DeadlineExceeded(reason) from None
            try:
                if view.serving:
                    request = Save(shard, view.epoch)
                    return int(await router.transport.call(view.chain[-1], request, timings.copy))
            except (TransportError, NotServing, StaleEpoch):
                router.report(view.chain[-1])
            if asyncio.get_running_loop().time() >= until:
                raise ShardUnavailable(f"checkpoint: shard {shard} was not served for {limit:g} s")
            await asyncio.sleep(timings.retry)

    return tuple(await asyncio.gather(*(save(s) for s in range(len(router.group.layout.shards)))))
