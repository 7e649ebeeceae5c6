"""Workers' offers of copies from which a lost shard is rebuilt; the freshest is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dps.protocol.messages import (
    NOTHING,
    OFFER_SECONDS,
    Offer,
    Wanted,
)


class CopyOffers:
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
