"""Worker caches: a lost shard is rebuilt from the copies of its weights that workers hold.

Under this durability weights come with the table that belongs to them, so that a copy of them is a
whole state but for the optimizer's, which starts anew. When a shard is lost the coordinator says in
its table that it wants copies; each worker says how fresh its own is; the one with the freshest
installs it. If it cannot, the shard is down in another epoch and everybody is asked again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import DpsError
from dps.events import Rebuilt
from dps.protocol.messages import (
    Done,
    Install,
    Seed,
    Seeded,
    ShardMetadata,
    Table,
    Weights,
    brought,
)
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message
from dps.recovery.durability import (
    CoordinatorContext,
    Durability,
    Feature,
    InstallState,
    WorkerContext,
)

ATTEMPTS = 3  # after which a worker takes a host for out of its reach

# Workers are asked at once, but the freshest copy may be one that is told of a little later.
OFFER_SECONDS = 0.2

NOTHING = -1  # the version that a worker offers that holds no copy

_NO_TABLES = (
    "worker_cache cannot bring sparse tables back: no worker holds all rows of one; use "
    "chain, checkpoint or shared_store"
)
_NO_FILTERED_PULLS = (
    "worker_cache brings a shard back from what workers have read of it, which pull_filters leave "
    "less exact; use another durability, or leave the filters out"
)
_REFUSALS: dict[Feature, str] = {"tables": _NO_TABLES, "filtered pulls": _NO_FILTERED_PULLS}


@message
@dataclass(frozen=True, slots=True)
class WorkerCache(Durability):
    """Shard state lives on in what workers read of it; a lost shard is rebuilt from the freshest.

    Updates that nobody has read since are lost, and the optimizer's state starts anew. If no
    worker that takes part holds a copy, the shard restarts from its initial values.
    """

    def refusal(self, feature: Feature) -> str | None:
        """Why it does not go with tables and filters, where workers hold less than the state."""
        return _REFUSALS.get(feature)

    def metadata(self, epoch: int, state: ShardState) -> ShardMetadata:
        """Return what makes a copy of the weights a whole state, but for the optimizer's part."""
        return ShardMetadata(epoch, state.index, state.steps, state.workers, state.results)

    def worker_part(self, context: WorkerContext) -> Copies:
        """Return what offers a worker's copies."""
        return Copies(context)

    def coordinator_part(self, context: CoordinatorContext) -> CopyOffers:
        """Return what takes the freshest copy that is offered."""
        return CopyOffers(context)


# -- what the coordinator asks, and workers answer ---------------------------------------------


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
    """A worker's copy of a lost shard: its `version`, read at `at` in epoch `based_on`.

    The version is -1 if the worker holds none; `failures` is how often it was to give one to this
    host and could not. Reply: Done.
    """

    shard: int
    epoch: int
    donor: str
    based_on: int
    version: int
    at: float
    failures: int


# -- the parts --------------------------------------------------------------------------------


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
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._offered: dict[int, tuple[int, Weights | None]] = {}
        self._accepted: set[Seed] = set()
        self._failures: Counter[Endpoint] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        context.router.listen(self._heard)

    async def close(self) -> None:
        """End what is under way."""
        self._context.router.unlisten(self._heard)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _heard(self, table: Table) -> None:
        for wanted in table.wanted:
            if self._offered.get(wanted.shard, (0, None))[0] < wanted.epoch:
                self._offered[wanted.shard] = (wanted.epoch, self._context.held(wanted.shard))
                self._start(self._offer(wanted.shard, wanted.host))
        for seed in table.seeds:
            if seed.donor == self._context.name and seed not in self._accepted:
                self._accepted.add(seed)
                self._start(self._install(seed))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._context.tasks.start(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _offer(self, shard: int, host: Endpoint) -> None:
        epoch, copy = self._offered[shard]
        based_on, version, at = 0, NOTHING, 0.0
        if copy is not None and copy.metadata is not None:
            based_on, version, at = copy.metadata.epoch, copy.version, copy.at
        failures = self._failures[host]
        offer = Offer(shard, epoch, self._context.name, based_on, version, at, failures)
        await self._context.router.ask(offer)

    async def _install(self, seed: Seed) -> None:
        epoch, copy = self._offered[seed.shard]
        if epoch != seed.epoch or copy is None:
            return  # that was long ago
        assert copy.metadata is not None
        state, based_on = rebuilt(copy, self._context.rule), copy.metadata.epoch
        chain = (seed.host,)
        request = Install(seed.shard, epoch, chain, state, "worker", keepers=seed.keepers)
        timings = self._context.timings
        for _ in range(ATTEMPTS):
            try:
                await self._context.transport.call(seed.host, request, timings.copy, "replicate")
                told = Seeded(seed.shard, seed.epoch, brought("worker", state, based_on))
                await self._context.router.ask(told)
            except DpsError:
                await asyncio.sleep(timings.retry)
            else:
                return
        self._failures[seed.host] += 1  # somebody else's copy may have to do
        await self._offer(seed.shard, seed.host)


class CopyOffers:
    """The coordinator's part: which shards copies are wanted of, and what was offered.

    Used from one event loop.
    """

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._wanted: dict[int, Wanted] = {}
        self._made: dict[int, dict[str, Offer]] = {}
        self._news = asyncio.Condition()
        self.services: dict[type, Callable[[Any], Awaitable[Any]]] = {Offer: self.take}

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The lost shards of which copies are wanted."""
        return tuple(self._wanted.values())

    async def restore(self, shard: int, epoch: int, host: Endpoint, install: InstallState) -> Any:
        """Have the worker with the freshest copy install it; without any, start from the first."""
        self.ask(Wanted(shard, epoch, host))
        try:
            await self._context.publish()
            offer = await self.best(shard)
            if offer is None:
                return await install()
            installed = await install(offer.donor, lambda: self.stands(offer))
        finally:
            self.close(shard)
        now = self._context.clock.now()
        event = Rebuilt(now, shard, epoch, offer.donor, offer.version, now - offer.at)
        self._context.emit(event)
        return installed

    async def take(self, offer: Offer) -> Done:
        """Keep what a worker offers; a second offer takes the place of its first."""
        wanted = self._wanted.get(offer.shard)
        if wanted is not None and wanted.epoch == offer.epoch:
            async with self._news:
                self._made[offer.shard][offer.donor] = offer
                self._news.notify_all()
        return Done()

    def ask(self, wanted: Wanted) -> None:
        """Want copies from now on."""
        self._wanted[wanted.shard] = wanted
        self._made[wanted.shard] = {}

    def close(self, shard: int) -> None:
        """Want none any more."""
        self._wanted.pop(shard, None)
        self._made.pop(shard, None)

    def stands(self, offer: Offer) -> bool:
        """Whether the worker still takes part, and offers this."""
        made = self._made.get(offer.shard, {}).get(offer.donor)
        return made == offer and offer.donor in self._context.workers()

    async def best(self, shard: int) -> Offer | None:
        """The freshest copy that active workers hold, None if they hold none.

        One that does not answer is not waited for longer than a moment if there is another's copy,
        and else until it is no longer among the active workers.
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
            here = [o for o in self._made[shard].values() if o.donor in self._context.workers()]
            copies = [o for o in here if o.version != NOTHING]
            if copies:
                return max(copies, key=_freshness)
            if answered():
                return None


def _freshness(offer: Offer) -> tuple[int, int, int, str]:
    """How good an offer is: it must reach the host, and be of the history that others went on from.

    A copy that was read in a later epoch is of a later history, whatever its version.
    """
    return -offer.failures, offer.based_on, offer.version, offer.donor
