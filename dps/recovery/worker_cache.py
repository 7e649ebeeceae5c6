"""Worker caches: a lost shard is rebuilt from the copies of its weights that workers hold.

- Written: nothing. Workers get weights with their dedupe table, so a copy is a whole state, except
  the optimizer's part.
- Restored: the coordinator's table asks for copies, each worker offers its own, and the one with
  the freshest installs it. If that fails, all workers are asked again, in another epoch of the
  shard.
- Promised: nothing; updates after the freshest copy are lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import DpsError
from dps.events import Rebuilt
from dps.protocol.messages import Install, Seed, Seeded, ShardMetadata, Table, Weights, brought
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message
from dps.recovery.durability import CoordinatorContext, Durability, Feature, WorkerContext

ATTEMPTS = 3  # after which a host counts as out of a worker's reach
OFFER_SECONDS = 0.2  # how long to wait for a fresher copy than those that are offered
NOTHING = -1  # the version in the offer of a worker that holds no copy

_REFUSALS: dict[Feature, str] = {
    "tables": (
        "worker_cache cannot restore sparse tables: no worker holds all rows of one; use "
        "chain, checkpoint or shared_store"
    ),
    "filtered pulls": (
        "worker_cache restores a shard from the weights that workers read, and pull_filters make "
        "these inexact; use another durability, or leave the filters out"
    ),
}


@message
@dataclass(frozen=True, slots=True)
class WorkerCache(Durability):
    """Shard state lives in the copies that workers read; a lost shard is rebuilt from the freshest.

    Updates that no worker has read since are lost, and the optimizer's state restarts. If no active
    worker holds a copy, the shard restarts from its initial values.

    >>> Recovery(WorkerCache(), outage=Continue()).durability
    WorkerCache()
    """

    refusals = _REFUSALS

    def metadata(self, epoch: int, state: ShardState) -> ShardMetadata:
        """Return what makes a copy of the weights a whole state, except the optimizer's part."""
        own = state.index, state.steps, state.workers, state.results, state.batches
        return ShardMetadata(epoch, *own)

    def worker_part(self, context: WorkerContext) -> Callable[[Table], None]:
        """Return the function that offers a worker's copies."""
        return Copies(context).heard

    def coordinator_part(self, context: CoordinatorContext) -> CopyOffers:
        """Return the part that chooses the freshest copy on offer."""
        return CopyOffers(context)


@message
@dataclass(frozen=True, slots=True)
class Wanted:
    """A lost shard of which copies are wanted at `host`: every worker answers with an `Offer`."""

    shard: int
    epoch: int
    host: Endpoint


@message
@dataclass(frozen=True, slots=True)
class Offer:
    """A worker's copy of a lost shard: its `version`, read at `at` in epoch `based_on`."""

    shard: int
    epoch: int
    donor: str
    based_on: int
    version: int  # -1: the worker holds none
    at: float
    failures: int  # how often the worker failed to send a copy to this host


def rebuilt(copy: Weights, rule: UpdateRule) -> ShardState:
    """Return the state that a copy was read from, with the initial optimizer state."""
    assert copy.metadata is not None
    metadata = copy.metadata
    slots = {name: np.zeros_like(copy.values) for name in rule.slots}
    # The rule's steps count from where its slots start.
    steps = 0 if slots else metadata.steps
    state = ShardState(metadata.index, copy.version, steps, copy.values, slots, metadata.workers)
    return replace(state, results=metadata.results, batches=metadata.batches)


class Copies:
    """A worker's part: offers its copies, and installs one on request. For one event loop."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._offered: dict[int, tuple[int, Weights | None]] = {}  # by shard, with the epoch
        self._accepted: set[Seed] = set()
        self._failures: Counter[Endpoint] = Counter()

    def heard(self, table: Table) -> None:
        """Offer the copies that a table asks for, and install those that were accepted."""
        for wanted in table.wanted:
            if self._offered.get(wanted.shard, (0, None))[0] < wanted.epoch:
                self._offered[wanted.shard] = (wanted.epoch, self._context.held(wanted.shard))
                self._context.tasks.start(self._offer(wanted.shard, wanted.host))
        for seed in table.seeds:
            if seed.donor == self._context.name and seed not in self._accepted:
                self._accepted.add(seed)
                self._context.tasks.start(self._install(seed))

    async def _offer(self, shard: int, host: Endpoint) -> None:
        epoch, copy = self._offered[shard]
        based_on, version, at = 0, NOTHING, 0.0
        if copy is not None and copy.metadata is not None:
            based_on, version, at = copy.metadata.epoch, copy.version, copy.at
        failures = self._failures[host]
        offer = Offer(shard, epoch, self._context.name, based_on, version, at, failures)
        await self._context.ask(offer)

    async def _install(self, seed: Seed) -> None:
        epoch, copy = self._offered[seed.shard]
        if epoch != seed.epoch or copy is None:
            return  # an outdated request
        assert copy.metadata is not None
        state = rebuilt(copy, self._context.rule)
        request = Install(seed.shard, epoch, (seed.host,), state, "worker", keepers=seed.keepers)
        done = Seeded(seed.shard, epoch, brought("worker", state, copy.metadata.epoch))
        timings = self._context.timings
        for _ in range(ATTEMPTS):
            try:
                await self._context.transport.call(seed.host, request, timings.copy, "replicate")
                await self._context.ask(done)
            except DpsError:
                await asyncio.sleep(timings.retry)
            else:
                return
        self._failures[seed.host] += 1  # the coordinator may choose another worker's copy
        await self._offer(seed.shard, seed.host)


class CopyOffers:
    """The coordinator's part: requests copies of lost shards, and chooses. For one event loop."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._wanted: dict[int, Wanted] = {}
        self._made: dict[int, dict[str, Offer]] = {}
        self._news = asyncio.Condition()
        self.services: Mapping[type, Callable[[Any], Awaitable[Any]]] = {Offer: self.take}

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The requests for copies of lost shards."""
        return tuple(self._wanted.values())

    async def restore(
        self, shard: int, epoch: int, host: Endpoint, install: Callable[..., Awaitable[Any]]
    ) -> Any:
        """Make the worker with the freshest copy install it; without any, use initial values."""
        self._wanted[shard], self._made[shard] = Wanted(shard, epoch, host), {}
        try:
            await self._context.publish()
            offer = await self.best(shard)
            if offer is None:
                return await install()
            installed = await install(offer.donor, lambda: offer in self._offers(shard))
        finally:
            self._wanted.pop(shard, None)
            self._made.pop(shard, None)
        now = self._context.clock.now()
        rebuilt = Rebuilt(now, shard, epoch, offer.donor, offer.version, now - offer.at)
        self._context.emit(rebuilt)
        return installed

    async def take(self, offer: Offer) -> None:
        """Note a worker's offer, which replaces its previous one."""
        async with self._news:
            wanted = self._wanted.get(offer.shard)
            if wanted is not None and wanted.epoch == offer.epoch:
                self._made[offer.shard][offer.donor] = offer
                self._news.notify_all()

    async def best(self, shard: int) -> Offer | None:
        """Return the freshest copy that active workers hold, None if they hold none.

        A worker that does not answer is waited for only for a moment if there is another copy, and
        otherwise until it is no longer active.
        """

        def answered() -> bool:
            return self._context.workers() <= self._made[shard].keys()

        patience = OFFER_SECONDS
        while True:
            try:
                async with asyncio.timeout(patience), self._news:
                    await self._news.wait_for(answered)
            except TimeoutError:
                pass
            if copies := [o for o in self._offers(shard) if o.version != NOTHING]:
                # Workers that reach the host come first. A copy of a later epoch is of the history
                # that other workers continued, at any version.
                return max(copies, key=lambda o: (-o.failures, o.based_on, o.version, o.donor))
            if answered():
                return None

    def _offers(self, shard: int) -> list[Offer]:
        made = self._made.get(shard, {}).values()
        return [offer for offer in made if offer.donor in self._context.workers()]
