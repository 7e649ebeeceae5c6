"""Chain replication: shard state lives on several nodes.

- Written: each update goes down the chain, and is acked when the tail has it. Every kind of
  durability has this (`dps.protocol.server.commit_log`); this one only sets how many replicas.
- Restored: the next replica continues, and a new one gets a copy of its state.
- Promised: no acked update is lost while one replica lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dps.core.ranges import Positive, whole_from
from dps.protocol.wire import message
from dps.recovery.durability import Durability


@message
@dataclass(frozen=True, slots=True)
class Chain(Durability):
    """Shard state lives on a chain of `replicas` nodes; an update is acked when the tail has it.

    Parameters
    ----------
    reads
        Who serves pulls: the "tail", or "any" replica, which then answers with what it knows to be
        committed, and with nothing older than that worker has seen.
    aggregate
        How many updates are summed into one before they go down the chain (replication after
        aggregation, OSDI 2014, 3.5). Fewer are, when no more come within `linger` seconds.
    linger
        How long an update waits for others to be summed with, in seconds.

    Examples
    --------
    >>> Recovery(Chain(3), outage=Continue()).durability.replicas
    3
    """

    replicas: Annotated[int, whole_from(1, "nodes")] = 2
    reads: Literal["tail", "any"] = "tail"
    aggregate: Annotated[int, whole_from(1, "updates")] = 1
    linger: Positive = 0.01

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Whether a host is the only replica: one that is merely silent may come back with it."""
        return alone
