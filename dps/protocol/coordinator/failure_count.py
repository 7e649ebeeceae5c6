"""How many failures the shards of a group have met, and in how long a time.

Both are counted over all shards, because whatever strikes one may strike the others. Servers learn
of them when they renew their leases, and choose by them how often to write checkpoints.
"""

from __future__ import annotations

from dps.core.checkpoint_interval import FailureHistory
from dps.protocol.transport import Clock


class FailureCount:
    """Counts restorations, and the time that shards are served."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._exposure = 0.0
        self._serving = 0
        self._at = clock.monotonic()

    def look(self, serving: int) -> None:
        """Take note of how many shards are served from now on."""
        self._exposure, self._at = self._exposure_at(now := self._clock.monotonic()), now
        self._serving = serving

    def restored(self) -> None:
        """Take note that a shard that was lost is served again."""
        self._failures += 1

    @property
    def history(self) -> FailureHistory:
        """What has been seen up to now."""
        return FailureHistory(self._failures, self._exposure_at(self._clock.monotonic()))

    def _exposure_at(self, now: float) -> float:
        return self._exposure + self._serving * (now - self._at)
