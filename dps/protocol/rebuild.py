"""Owns how a lost shard is rebuilt from the copies of its weights that workers hold.

Under this durability weights come with the table that belongs to them, so that a copy of them is a
whole state but for the optimizer's, which starts anew. When a shard is lost the coordinator says in
its table that it wants copies; each worker says how fresh its own is; the one with the freshest
installs it. If it cannot, the shard is down in another epoch and everybody is asked again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dps.core.recovery import WorkerCache
from dps.core.rules import UpdateRule
from dps.core.shard import ShardState
from dps.errors import DpsError
from dps.protocol.group import Group
from dps.protocol.losses import brought
from dps.protocol.messages import Beside, Install, Seed, Seeded, Table, Wanted, Weights
from dps.protocol.router import Router
from dps.protocol.transport import Endpoint, Transport
from dps.protocol.wire import message

# Workers are asked at once, but the freshest copy may be one that is told of a little later.
OFFER_SECONDS = 0.2

ATTEMPTS = 3  # after which a worker takes a host for out of its reach

NOTHING = -1  # the version that a worker offers that holds no copy


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


def donor_name(worker: str, incarnation: int) -> str:
    """What a worker is called as the holder of a copy."""
    return f"{worker}/{incarnation}"


def weights(state: ShardState, epoch: int, at: float, slack: int, group: Group) -> Weights:
    """What a worker gets to read of a state, with what a copy has to be rebuilt from if need be."""
    beside = None
    if isinstance(group.recovery.durability, WorkerCache):
        beside = Beside(epoch, state.index, state.steps, state.workers, state.results)
    return Weights(state.version, at, slack, state.values, beside)


def rebuilt(copy: Weights, rule: UpdateRule) -> ShardState:
    """The state that a copy was read from, with the optimizer's part of it at its start."""
    assert copy.beside is not None
    beside = copy.beside
    slots = {name: np.zeros_like(copy.values) for name in rule.slots}
    # The rule's steps count from where its slots start.
    steps = 0 if slots else beside.steps
    state = ShardState(beside.index, copy.version, steps, copy.values, slots, beside.workers)
    return replace(state, results=beside.results)


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
        if copy is not None and copy.beside is not None:
            based_on, version, at = copy.beside.epoch, copy.version, copy.at
        failures = self._failures[host]
        offer = Offer(shard, epoch, self._donor, based_on, version, at, failures)
        await self._router.ask(offer)

    async def _install(self, seed: Seed) -> None:
        epoch, copy = self._offered[seed.shard]
        if epoch != seed.epoch or copy is None:
            return  # that was long ago
        assert copy.beside is not None
        state, based_on = rebuilt(copy, self._group.rule), copy.beside.epoch
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


class Offers:
    """The coordinator's part: which shards copies are wanted of, and what was offered.

    Parameters
    ----------
    donors
        Returns the workers that take part.

    Attributes
    ----------
    wanted
        What is published in the table.
    """

    def __init__(self, donors: Callable[[], set[str]]) -> None:
        self._donors = donors
        self.wanted: dict[int, Wanted] = {}
        self._made: dict[int, dict[str, Offer]] = {}
        self._news = asyncio.Condition()

    async def take(self, offer: Offer) -> None:
        """Keep what a worker offers; a second offer takes the place of its first."""
        wanted = self.wanted.get(offer.shard)
        if wanted is not None and wanted.epoch == offer.epoch:
            async with self._news:
                self._made[offer.shard][offer.donor] = offer
                self._news.notify_all()

    def ask(self, wanted: Wanted) -> None:
        """Want copies from now on."""
        self.wanted[wanted.shard] = wanted
        self._made[wanted.shard] = {}

    def close(self, shard: int) -> None:
        """Want none any more."""
        self.wanted.pop(shard, None)
        self._made.pop(shard, None)

    def stands(self, offer: Offer) -> bool:
        """Whether the worker still takes part, and offers this."""
        made = self._made.get(offer.shard, {}).get(offer.donor)
        return made == offer and offer.donor in self._donors()

    async def best(self, shard: int) -> Offer | None:
        """The freshest copy that active workers hold, None if they hold none.

        One that does not answer is not waited for longer than a moment if there is another's copy,
        and else until it is no longer among the active workers.
        """

        def answered() -> bool:
            return self._donors() <= self._made[shard].keys()

        patience = OFFER_SECONDS
        while True:
            try:
                async with asyncio.timeout(patience), self._news:
                    await self._news.wait_for(answered)
            except TimeoutError:
                pass
            here = [o for o in self._made[shard].values() if o.donor in self._donors()]
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
