"""Chain replication: shard state lives on several nodes.

- Written: each update goes down the chain, and is acked when the tail has it. This module only sets
  the number of replicas; `dps.protocol.server.commit_log` is the same for every durability.
- Restored: the next replica takes over, and a new replica gets a copy of its state.
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
    replicas
        Number of nodes that hold each shard.
    reads
        The replica that serves pulls: the "tail", or "any". It answers from the newest state that
        it knows to be committed, and never from an older one than that worker has seen.
    aggregate
        How many updates are summed into one before they go down the chain (replication after
        aggregation, OSDI 2014, 4.4). Fewer are summed if no more arrive in `linger` seconds.
    linger
        Seconds for which an update waits for others before they are summed.

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
        """Return whether a host is the only replica: a silent one may still have the state."""
        return alone
