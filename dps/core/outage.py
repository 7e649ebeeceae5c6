"""What workers do while a shard is down, and how buffered gradients are applied afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dps.core import ranges


@dataclass(frozen=True, slots=True)
class Wait:
    """Workers wait until the shard is back.

    >>> Wait()
    Wait()
    """


@dataclass(frozen=True, slots=True)
class Continue:
    """Workers continue with the last weights, and their gradients are buffered.

    Parameters
    ----------
    limit
        Buffered gradients of one worker and shard; then the worker waits.
    buffer
        "mailbox": on the store's node, where they survive the worker; "worker": in the worker.

    Examples
    --------
    >>> Continue(limit=100, buffer="worker")
    Continue(limit=100, buffer='worker')
    """

    limit: int = 32
    buffer: Literal["mailbox", "worker"] = "mailbox"

    def __post_init__(self) -> None:
        ranges.count(self, "limit", 1, "gradients")
        ranges.choice(self, "buffer", "mailbox", "worker")


Policy = Literal["sum", "mean", "each", "staleness_scaled", "clip", "drop_older", "published"]


@dataclass(frozen=True, slots=True)
class Replay:
    """How buffered gradients are applied after an outage (see `dps.core.replay`).

    >>> Replay("clip", clip_norm=5.0).policy
    'clip'
    """

    policy: Policy = "sum"
    clip_norm: float = 1.0
    drop_older_than: int = 100

    def __post_init__(self) -> None:
        ranges.choice(self, "policy", *get_args(Policy))
        ranges.positive(self, "clip_norm")
        ranges.count(self, "drop_older_than", 0, "versions")


Outage = Wait | Continue
