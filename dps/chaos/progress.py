"""How many updates the shards have applied, asked in a thread of its own.

A shard that is down or stopped answers late; faults that come at seconds must not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dps.cluster.platform import Platform, Running
from dps.protocol.messages import AuditReply
from dps.protocol.transport import Clock

SHORTEST_WAIT = 0.002
LONGEST_WAIT = 0.1


class Progress:
    """Asks for as long as it is entered.

    Parameters
    ----------
    audit
        Returns the numbers of each shard's state, None for one that is down.
    """

    def __init__(
        self,
        audit: Callable[[], Sequence[AuditReply | None]],
        clock: Clock,
        platform: Platform,
    ) -> None:
        self._audit = audit
        self._clock = clock
        self._updates = 0
        self._goals: tuple[int, ...] = ()
        self._platform = platform
        self._over = platform.flag()
        self._error: Exception | None = None
        self._running: Running

    def begin(self) -> None:
        """Begin to ask."""
        self._running = self._platform.start(self._ask, "dps-progress")

    def end(self) -> None:
        """Ask no more."""
        self._over.set()
        self._running.join()

    @property
    def updates(self) -> int:
        """How many updates all shards had applied when they last answered."""
        if self._error is not None:
            raise self._error
        return self._updates

    def expect(self, goals: Sequence[int]) -> None:
        """Say which numbers of updates matter: near one of them it asks often, else seldom."""
        self._goals = tuple(goals)

    def look(self) -> int:
        """Ask now; return what was known before, if a shard is down."""
        replies = self._audit()
        if all(replies):
            self._updates = min(reply.version for reply in replies if reply)
        return self._updates

    def _ask(self) -> None:
        began, wait = self._clock.now(), SHORTEST_WAIT
        while not self._over.wait(wait):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - raised where the number is read
                self._error = error
                return
            # Asking costs the servers a little: ask seldom until a moment is near.
            seconds_per_update = (self._clock.now() - began) / max(1, self._updates)
            left = [goal - self._updates for goal in self._goals if goal > self._updates]
            soonest = min(left, default=math.inf) * seconds_per_update
            wait = min(LONGEST_WAIT, max(SHORTEST_WAIT, soonest / 4))
