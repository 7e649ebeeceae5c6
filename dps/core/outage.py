"""What workers do while a shard is down, and how the gradients they buffered are applied then.

Two of the three axes of a `dps.recovery.strategy.Recovery`, as data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dps.core import ranges


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker whose shard is down waits until it is back."""


@dataclass(frozen=True, slots=True)
class Continue:
    """A worker whose shard is down computes on with the last weights and buffers its gradients.

    Parameters
    ----------
    limit
        How many gradients of one worker and shard are buffered; when there are more, it waits.
    buffer
        "mailbox" keeps them on the store's node, where they survive the worker; "worker" keeps
        them in the worker.
    """

    limit: int = 32
    buffer: Literal["mailbox", "worker"] = "mailbox"

    def __post_init__(self) -> None:
        ranges.count(self, "limit", 1, "gradients")
        ranges.choice(self, "buffer", "mailbox", "worker")


Policy = Literal["sum", "mean", "each", "staleness_scaled", "clip", "drop_older", "published"]


@dataclass(frozen=True, slots=True)
class Replay:
    """How buffered gradients are applied after an outage (see `dps.core.replay`)."""

    policy: Policy = "sum"
    clip_norm: float = 1.0
    drop_older_than: int = 100

    def __post_init__(self) -> None:
        ranges.choice(self, "policy", *get_args(Policy))
        ranges.positive(self, "clip_norm")
        ranges.count(self, "drop_older_than", 0, "versions")


Outage = Wait | Continue
