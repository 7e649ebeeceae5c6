"""The check of checkpoints that are promised in seconds: how old what is lost may be.

Whatever is lost with a server was committed within so many seconds; and as long as the disk is
well and nobody stands still, within that time before the loss, though nothing else was pushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

from dps.core.shard import ShardState
from dps.protocol.server.commit_log import CommitLog
from dps.sim.patches import Patch, patched
from dps.sim.violation import require

SLOWEST_CLOCK = 0.95  # the promise is kept by the server's own clock
MARGIN = 0.01


class Committed:
    """When each version of a shard was committed first, as far as it may still be lost."""

    def __init__(self, seconds: float, work: float) -> None:
        self._seconds = seconds
        # A write that is due may have to wait for one that is under way.
        self._saved_within = max(seconds, seconds / 2 + 2 * work)
        self._at: list[tuple[int, float]] = []

    def note(self, version: int, now: float) -> None:
        """Take note of a version that is committed."""
        if not self._at or version > self._at[-1][0]:
            self._at.append((version, now))

    def restored(self, what: str, version: int, whole: bool, lost_at: float | None) -> None:
        """A state was restored; `lost_at` says when the last server ended, if that is to count.

        If the newest checkpoint was not `whole`, that is not what the promise is about.
        """
        lost = [at for committed, at in self._at if committed > version]
        self._at = []
        if not lost or not whole:
            return
        span = lost[-1] - lost[0]
        text = f"{what}: updates of {span:.3f} s are lost, {self._seconds:g} s are promised"
        require(span <= self._seconds / SLOWEST_CLOCK + MARGIN, "lost", text)
        if lost_at is not None:
            age = lost_at - lost[0]
            text = f"{what}: an update was committed {age:.3f} s before, and is not saved"
            require(age <= self._saved_within / SLOWEST_CLOCK + MARGIN, "lost", text)


def committing(
    told: Callable[[CommitLog, ShardState], None],
) -> AbstractContextManager[None]:
    """Have `told` called with each state that is committed on any replica."""
    set_committed = CommitLog.set_committed

    def set_and_tell(self: CommitLog, state: ShardState) -> None:
        told(self, state)
        set_committed(self, state)

    return patched(Patch(CommitLog, "set_committed", set_and_tell))


def now() -> float:
    """The time in the simulation."""
    return asyncio.get_running_loop().time()
