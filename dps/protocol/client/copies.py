"""How a lost shard is rebuilt from the copies of its weights that workers hold.

Under this durability weights come with the table that belongs to them, so that a copy of them is a
whole state but for the optimizer's, which starts anew. When a shard is lost the coordinator says in
its table that it wants copies; each worker says how fresh its own is; the one with the freshest
installs it. If it cannot, the shard is down in another epoch and everybody is asked again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import DpsError
from dps.protocol.client.routing_table import Router
from dps.protocol.group import Group
from dps.protocol.messages import (
    NOTHING,
    Install,
    Offer,
    Seed,
    Seeded,
    Table,
    Weights,
    brought,
)
from dps.protocol.transport import Endpoint, Transport

ATTEMPTS = 3  # after which a worker takes a host for out of its reach


def rebuilt(copy: Weights, rule: UpdateRule) -> ShardState:
    """The state that a copy was read from, with the optimizer's part of it at its start."""
    assert copy.metadata is not None
    metadata = copy.metadata
    slots = {name: np.zeros_like(copy.values) for name in rule.slots}
    # The rule's steps count from where its slots start.
    steps = 0 if slots else metadata.steps
    state = ShardState(metadata.index, copy.version, steps, copy.values, slots, metadata.workers)
    return replace(state, results=metadata.results)


class Copies:
    """One worker's part: it says what copies it holds, and installs one when it is asked to.

    Used from one event loop.

    Parameters
    ----------
    held
        The weights of a shard that were read last.
    """

    def __init__(
        self,
        group: Group,
        transport: Transport,
        router: Router,
        donor: str,
        held: Callable[[int], Weights | None],
    ) -> None:
        self._group = group
        self._transport = transport
        self._router = router
        self._donor = donor
        self._held = held
        self._offered: dict[int, tuple[int, Weights | None]] = {}
        self._accepted: set[Seed] = set()
        self._failures: Counter[Endpoint] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        router.listen(self._heard)

    async def close(self) -> None:
        """End what is under way."""
        self._router.unlisten(self._heard)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _heard(self, table: Table) -> None:
        for wanted in table.wanted:
            if self._offered.get(wanted.shard, (0, None))[0] < wanted.epoch:
                self._offered[wanted.shard] = (wanted.epoch, self._held(wanted.shard))
                self._start(self._offer(wanted.shard, wanted.host))
        for seed in table.seeds:
            if seed.donor == self._donor and seed not in self._accepted:
                self._accepted.add(seed)
                self._start(self._install(seed))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _offer(self, shard: int, host: Endpoint) -> None:
        epoch, copy = self._offered[shard]
        based_on, version, at = 0, NOTHING, 0.0
        if copy is not None and copy.metadata is not None:
            based_on, version, at = copy.metadata.epoch, copy.version, copy.at
        failures = self._failures[host]
        offer = Offer(shard, epoch, self._donor, based_on, version, at, failures)
        await self._router.ask(offer)

    async def _install(self, seed: Seed) -> None:
        epoch, copy = self._offered[seed.shard]
        if epoch != seed.epoch or copy is None:
            return  # that was long ago
        assert copy.metadata is not None
        state, based_on = rebuilt(copy, self._group.rule), copy.metadata.epoch
        request = Install(seed.shard, epoch, (seed.host,), state, "worker")
        timings = self._group.timings
        for _ in range(ATTEMPTS):
            try:
                await self._transport.call(seed.host, request, timings.copy, "replicate")
                told = Seeded(seed.shard, seed.epoch, brought("worker", state, based_on))
                await self._router.ask(told)
            except DpsError:
                await asyncio.sleep(timings.retry)
            else:
                return
        self._failures[seed.host] += 1  # somebody else's copy may have to do
        await self._offer(seed.shard, seed.host)
